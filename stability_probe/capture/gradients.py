"""Sees the gradients of an attention call: hooks on the caller's own tensors.

They are q, k, v, the output, and the input of the module that made the call.

A hook returns None and keeps no tensor: gradients pass through unchanged, and the hook lives as
long as the graph that it is on. What autograd never computes is never told.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from stability_probe.capture.hooks import CopiesInert
from stability_probe.modes import unobserved


class GradientReceiver(Protocol):
    """What takes the gradients in: the meter."""

    def gradient(self, layer: str, call_index: int, kind: str, gradient: Tensor) -> None:
        """One gradient, on whatever thread autograd runs. The tensor must not be kept."""


class GradientHook(CopiesInert):
    """The hook on one tensor. It knows the watch only weakly, and does nothing without it."""

    def __init__(self, watch: Gradients, layer: str, call_index: int, kind: str) -> None:
        self._watch = weakref.ref(watch)
        self.layer, self.call_index, self.kind = layer, call_index, kind

    def same(self, other: object) -> bool:
        """Whether another hook tells the same: calls may share their tensors."""
        return (
            isinstance(other, GradientHook)
            and (other.layer, other.kind) == (self.layer, self.kind)
            and other._watch() is self._watch()
        )

    def __call__(self, gradient: Tensor | None) -> None:
        """Passes the gradient on; returning None leaves it as it is."""
        watch = self._watch()
        if watch is not None and gradient is not None:
            watch.take(self, gradient)


class Gradients:
    """Sets the hooks, and passes on what they see until `close`."""

    def __init__(
        self, receiver: GradientReceiver, fault: Callable[[None, Exception], None]
    ) -> None:
        """Tell `receiver`; `fault` takes the error where that fails, and there it ends."""
        self._receiver, self._fault = receiver, fault
        self._live = True

    def watch(self, layer: str, call_index: int, tensors: Mapping[str, Tensor | None]) -> None:
        """Hooks the tensors, by kind, that take part in a graph; each of them once.

        Not watched: leaves, because a hook on a parameter would outlive the step (attention
        whose queries are themselves a parameter), but for those that a checkpoint detached to
        recompute from; and nested tensors.
        """
        for kind, tensor in tensors.items():
            if tensor is None or tensor.is_nested or not tensor.requires_grad:
                continue
            if tensor.grad_fn is None and not _is_fleeting(tensor):
                continue
            hook = GradientHook(self, layer, call_index, kind)
            if not any(hook.same(other) for other in (tensor._backward_hooks or {}).values()):
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def take(self, hook: GradientHook, gradient: Tensor) -> None:
        """A gradient that a hook saw. Compiled and vectorised backwards are not read."""
        if not self._live or torch.compiler.is_compiling() or _is_vectorised(gradient):
            return
        with unobserved():
            try:
                gradient = gradient.detach()
                self._receiver.gradient(hook.layer, hook.call_index, hook.kind, gradient)
            except Exception as error:
                self._live = False
                self._fault(None, error)

    def close(self) -> None:
        """Hooks on graphs that still live do nothing from here on."""
        self._live = False


def _is_vectorised(gradient: Tensor) -> bool:
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(gradient) or functorch.is_legacy_batchedtensor(gradient)


def _is_fleeting(leaf: Tensor) -> bool:
    """Whether a leaf dies with this backward: the input that a checkpoint detached."""
    return torch._C._current_graph_task_id() != -1 and not isinstance(leaf, torch.nn.Parameter)
