"""Who holds a function: names in modules, Hugging Face's registry, a model and its classes."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

# These hold the functions for their own use, inside calls that are watched as a whole.
_LEFT_ALONE = ("stability_probe", "torch.", "transformers.integrations.")


@dataclass(frozen=True, slots=True, eq=False)
class Holder:
    """A name that holds a function: in a module, a class, an object or a registry."""

    owner: Any
    key: str

    def put(self, function: Any) -> None:
        """Lets the name hold another function."""
        if isinstance(self.owner, type):
            setattr(self.owner, self.key, function)
        else:
            _space(self.owner)[self.key] = function

    def get(self) -> Any:
        """What the name holds now; None: nothing."""
        return _space(self.owner).get(self.key)


Held = tuple[Holder, Any]


def defined(module: str, name: str) -> Holder | None:
    """The holder of a function or method by its dotted name, if its module is imported."""
    owner: Any = sys.modules.get(module)
    *classes, attribute = name.split(".")
    for part in classes:
        owner = _space(owner).get(part) if owner is not None else None
    if owner is None or _space(owner).get(attribute) is None:
        return None
    return Holder(owner, attribute)


def in_modules() -> Iterator[Held]:
    """Every name of every imported module with what it holds, and the entries of registries."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and not name.startswith(_LEFT_ALONE):
            yield from _held(module)
    yield from _registries()


def in_model(model: nn.Module) -> Iterator[Held]:
    """The attributes of a model's modules and of their classes."""
    classes: dict[type, None] = {}
    for module in model.modules():
        yield from _held(module)
        for kind in type(module).__mro__:
            if not kind.__module__.startswith(("torch.", "builtins")):
                classes[kind] = None
    for kind in classes:
        yield from _held(kind)


def original_of(function: Any) -> Any:
    """What a compiled or partial form of a function was made of; None: it is neither."""
    if isinstance(function, functools.partial):
        return function.func
    if isinstance(function, types.FunctionType):
        return getattr(function, "_torchdynamo_orig_callable", None)
    return None


def _registries() -> Iterator[Held]:
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is None:
        return
    space = vars(transformers)
    kind, shared = space.get("AttentionInterface"), space.get("ALL_ATTENTION_FUNCTIONS")
    for registry in (
        getattr(kind, "_global_mapping", None),
        getattr(shared, "_local_mapping", None),
    ):
        if isinstance(registry, dict):
            yield from _held(registry)


def _held(owner: Any) -> list[Held]:
    return [(Holder(owner, key), value) for key, value in list(_space(owner).items())]


def _space(owner: Any) -> Any:
    return owner if isinstance(owner, dict) else vars(owner)
