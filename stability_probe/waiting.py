"""A step whose numbers are still on their way, to the host or from other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from stability_probe.meter import Measurement
from stability_probe.ranks.queued import Ticket
from stability_probe.records import Level, StepRecord, StepScalars
from stability_probe.transfer import HostCopy
from stability_probe.updates import Update

Scalar = float | Tensor


@dataclass(frozen=True, slots=True, eq=False)
class WaitingStep:
    """What is known of a step, and what will be."""

    scalars: StepScalars  # without the numbers below
    numbers: Mapping[str, HostCopy]  # loss, grad_norm, eval_loss: those that were given
    measurement: Measurement
    update: Update = field(default_factory=Update)
    ticket: Ticket | None = None  # where all ranks' record is to take the place of this one's

    @property
    def awaits_ranks(self) -> bool:
        """Whether the other ranks have not been heard of yet."""
        return self.ticket is not None and not self.ticket.done

    @property
    def ready(self) -> bool:
        """Whether `record` would not wait for a device."""
        numbers = all(copy.ready for copy in self.numbers.values())
        return self.measurement.ready and numbers and self.update.ready

    def record(self) -> StepRecord:
        """The whole record of the step: of all ranks, where they gave one, else of this one."""
        skipped = self.scalars.skipped or self.update.skipped
        known = replace(self.scalars, skipped=skipped)
        if self.ticket is not None and self.ticket.result is not None:
            here = self.measurement.observations(), self.measurement.first_bad()
            return self.ticket.result.record(known, *here)
        numbers = {name: float(copy.numpy()) for name, copy in self.numbers.items()}
        observations = self.measurement.observations()
        scalars = replace(
            known,
            first_bad=self.measurement.first_bad(),
            loss=numbers.get("loss"),
            grad_norm=numbers.get("grad_norm"),
            eval_loss=numbers.get("eval_loss"),
        )
        level = self.measurement.level if observations else Level.SENTINEL
        return StepRecord(scalars, observations, level)


def copied(value: Scalar) -> HostCopy:
    """A number or a tensor of one element on its way to the host."""
    tensor = value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)
    return HostCopy(tensor.detach().reshape(()))


def learning_rate(optimizer: torch.optim.Optimizer | None) -> float | None:
    """The first parameter group's, where it is a number on the host."""
    if optimizer is None:
        return None
    rate = optimizer.param_groups[0]["lr"]
    on_device = isinstance(rate, Tensor) and rate.device.type != "cpu"
    return None if on_device else float(rate)


def is_trouble(numbers: Mapping[str, Scalar]) -> bool:
    """Whether a number that is on the host already is not finite."""
    return any(
        x - x != 0
        for x in numbers.values()
        if not isinstance(x, Tensor) or (x.device.type == "cpu" and x.numel() == 1)
    )


def numbers_of(
    given: Mapping[str, object], complain: Callable[[str, Exception], None]
) -> dict[str, Scalar]:
    """The numbers that were given; what is none is told and left out, the step is kept.

    Args:
        given: loss, grad_norm and so on by name; None where there is none.
        complain: told what was being done, and the error.
    """
    return {
        name: value  # type: ignore[misc]
        for name, value in given.items()
        if value is not None and _is_number(value, name, complain)
    }


def _is_number(value: object, name: str, complain: Callable[[str, Exception], None]) -> bool:
    shape = tuple(value.shape) if isinstance(value, Tensor) else None
    try:
        if shape is None:
            float(value)  # type: ignore[arg-type]
        elif value.numel() != 1:  # type: ignore[attr-defined]
            raise ValueError(f"its shape is {shape}")
    except (TypeError, ValueError) as error:
        got = type(value).__name__ if shape is None else f"a tensor of shape {shape}"
        complain(
            f"reading {name}: got {got}, expected one number; reduce it first, as in {name}.mean()",
            error,
        )
        return False
    return True
