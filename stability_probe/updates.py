"""Sees by itself whether an optimizer updated between two ends of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stability_probe.transfer import HostCopy


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """What is known of the update of one step; on CUDA a part of it is still on its way."""

    known: bool = False  # False: there is no optimizer to ask
    made: bool = False  # at least one `optimizer.step` that no scaler could have emptied
    found_inf: tuple[HostCopy, ...] = ()  # one each call that a scaler could have emptied

    @property
    def ready(self) -> bool:
        """Whether `skipped` would not wait for a device."""
        return all(copy.ready for copy in self.found_inf)

    @property
    def skipped(self) -> bool:
        """Whether the optimizer is known not to have changed the weights."""
        if not self.known or self.made:
            return False
        return all(float(copy.numpy().max()) > 0 for copy in self.found_inf)


class Updates:
    """Watches an optimizer through its step-post-hook, until `close`.

    A GradScaler that finds an overflow does not call `optimizer.step`, and the hook does not
    run. A fused optimizer is called all the same and leaves the weights alone where the scaler's
    `found_inf` says so; its value is copied, never waited for.

    Not seen: updates that bypass `optimizer.step`, and an object without such hooks; then nothing
    counts as skipped.
    """

    def __init__(self, optimizer: object | None) -> None:
        self.error: Exception | None = None  # the last fault, for the probe to take
        self._made = False
        self._found_inf: list[HostCopy] = []
        self._handle = None
        if (inner := _innermost(optimizer)) is not None:
            try:
                self._handle = inner.register_step_post_hook(self._after_step)
            except Exception as error:  # a subclass that never called Optimizer.__init__
                self.error = error

    def take(self) -> Update:
        """What happened since the last call."""
        update = Update(self._handle is not None, self._made, tuple(self._found_inf))
        self._made, self._found_inf = False, []
        return update

    def close(self) -> None:
        """Removes the hook."""
        if self._handle is not None:
            self._handle.remove()

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        found_inf = getattr(optimizer, "found_inf", None)
        if not isinstance(found_inf, Tensor):
            self._made = True
            return
        try:
            self._found_inf.append(HostCopy(found_inf))
        except Exception as error:  # the user's step has been made; a fault must not end it
            self.error, self._made = error, True


def _innermost(optimizer: object | None) -> torch.optim.Optimizer | None:
    """The optimizer whose step is made, inside wrappers that keep it as `optimizer`."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
