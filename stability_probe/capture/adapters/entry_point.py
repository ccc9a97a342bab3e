"""Where a library's attention is called, and how such a call is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stability_probe.capture.functions import Seen

Reader = Callable[[Mapping[str, Any], Any], Seen]  # (arguments by name, result) -> Seen


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """A function, or a method of a class, that computes attention.

    Attributes:
        module: the module that defines it; it counts once it is imported, whoever does that.
        name: "function", or "Class.method".
        read: from the call's arguments, defaults filled in and extra keywords among them, and
            its result to a `Seen` without a path. It must not keep or change a tensor, nor wait
            for the device. `UnsupportedCallError` says that the call cannot be read.
    """

    module: str
    name: str
    read: Reader
