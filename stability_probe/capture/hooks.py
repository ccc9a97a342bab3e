"""The hooks that open and close the scope around a module's forward.

They are classes and not closures: a deep copy or a pickle of a watched model then carries
`InertHook`s, which do nothing, instead of a live probe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn


class Boundary(Protocol):
    """What is told of forwards beginning and ending."""

    def enter(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """A hooked module's forward begins."""

    def leave(self, name: str, module: nn.Module, output: object) -> None:
        """A hooked module's forward ended; after an exception without an output."""

    def begin(self) -> None:
        """The watched model's own forward begins."""

    def end(self) -> None:
        """The watched model's own forward ended, with or without an exception."""


class InertHook:
    """Does nothing: what a copy of a watched model carries."""

    def __call__(self, *_: object) -> None:
        """Changes nothing."""


class CopiesInert:
    """A hook whose copies and pickles are inert."""

    def __deepcopy__(self, memo: dict[int, Any]) -> InertHook:
        return InertHook()

    def __reduce__(self) -> tuple[type[InertHook], tuple[()]]:
        return InertHook, ()


class EnterHook(CopiesInert):
    """A module's forward pre-hook."""

    def __init__(self, boundary: Boundary, name: str) -> None:
        self.boundary = boundary
        self.name = name

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Opens the scope; a compiler that traces the module sees nothing of it."""
        if not torch.compiler.is_compiling():
            self.boundary.enter(self.name, module, args, kwargs)


class LeaveHook(CopiesInert):
    """A module's forward hook; registered so that it also runs after an exception."""

    def __init__(self, boundary: Boundary, name: str) -> None:
        self.boundary = boundary
        self.name = name

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        """Closes the scope."""
        if not torch.compiler.is_compiling():
            self.boundary.leave(self.name, module, output)


class BeginHook(CopiesInert):
    """The watched model's own forward pre-hook."""

    def __init__(self, boundary: Boundary) -> None:
        self.boundary = boundary

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Lets what an interrupted forward left behind be dropped."""
        if not torch.compiler.is_compiling():
            self.boundary.begin()


class EndHook(CopiesInert):
    """The watched model's own forward hook; also runs after an exception."""

    def __init__(self, boundary: Boundary) -> None:
        self.boundary = boundary

    def __call__(self, module: nn.Module, *_: object) -> None:
        """Lets later calls of the model's parts be told apart from those inside it."""
        if not torch.compiler.is_compiling():
            self.boundary.end()


def is_live(hook: object) -> bool:
    """Whether a registered hook belongs to a probe that still watches."""
    return isinstance(hook, EnterHook | LeaveHook | BeginHook | EndHook)
