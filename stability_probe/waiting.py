"""A step whose numbers are still on their way to the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from stability_probe.meter import Measurement
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

    @property
    def ready(self) -> bool:
        """Whether `record` would not wait for a device."""
        numbers = all(copy.ready for copy in self.numbers.values())
        return self.measurement.ready and numbers and self.update.ready

    def record(self) -> StepRecord:
        """The whole record of the step."""
        numbers = {name: float(copy.numpy()) for name, copy in self.numbers.items()}
        observations = self.measurement.observations()
        scalars = replace(
            self.scalars,
            skipped=self.scalars.skipped or self.update.skipped,
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


def is_trouble(numbers: Mapping[str, Scalar]) -> bool:
    """Whether a number that is on the host already is not finite."""
    return any(
        x - x != 0
        for x in numbers.values()
        if not isinstance(x, Tensor) or (x.device.type == "cpu" and x.numel() == 1)
    )
