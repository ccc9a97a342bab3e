"""Acts when a library is imported, and not before.

The compiler takes seconds to import, and most runs never need it. What must be in place before
its first use is put there at its import.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class WhenImported(MetaPathFinder):
    """Calls `act` once: now where the module is imported already, else right after its import."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        """Wait for the module of this name; `act` must not raise."""
        self._name, self._act = name, act
        if name in sys.modules:
            act()
        else:
            sys.meta_path.insert(0, self)

    def cancel(self) -> None:
        """Waits no more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds nothing itself: the module is imported as ever, and then `act` is called."""
        if fullname != self._name or self not in sys.meta_path:
            return None
        self.cancel()
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            self._act()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
