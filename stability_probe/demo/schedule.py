"""The fault of the demo: after healthy training, W_q and W_k learn faster and faster."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rates over the steps of a run, counted from 1.

    Attributes:
        start: the last step before the ramp.
        ramp: steps over which the rate of W_q and W_k is raised, by the same factor each.
        hold: steps after that.
        learning_rate: of all parameters, after the warm-up.
        factor: by how much the ramp raises that of W_q and W_k.
        warmup: steps over which all rates rise from zero.
    """

    start: int
    ramp: int
    hold: int
    learning_rate: float
    factor: float = 100.0
    warmup: int = 50

    @property
    def steps(self) -> int:
        """Length of the run."""
        return self.start + self.ramp + self.hold

    def rates(self, step: int) -> tuple[float, float]:
        """Learning rate of W_q and W_k, and of everything else, at a step."""
        rest = self.learning_rate * min(1.0, step / self.warmup)
        share = min(1.0, max(0.0, (step - self.start) / self.ramp))
        return rest * self.factor**share, rest
