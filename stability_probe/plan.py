"""What is measured at which step: a pure function of the step, so that every rank agrees."""

from __future__ import annotations

from dataclasses import dataclass

from stability_probe.records import Level


@dataclass(frozen=True, slots=True)
class Plan:
    """Dense at the start of a phase, then sparse.

    Attributes:
        dense: so many first steps of a phase are all measured (steps).
        every: afterwards each step divisible by it is measured (steps).
        full_every: each step divisible by it, and the first of a phase, gets every statistic
            and not only the default set (steps).

    Steps that are not measured still update the sentinel, which misses no non-finite value.
    """

    dense: int = 200
    every: int = 10
    full_every: int = 100

    def __post_init__(self) -> None:
        if self.dense < 0 or self.every < 1 or self.full_every < 1:
            raise ValueError(
                f"got dense={self.dense}, every={self.every}, full_every={self.full_every}; "
                "expected dense >= 0 and the others >= 1, all in steps. "
                "Use every(n) to measure each n-th step from the start."
            )

    def level(self, step: int, *, phase_start: int = 1) -> Level:
        """How much is measured at `step` of a phase that began with step `phase_start`."""
        if step == phase_start or step % self.full_every == 0:
            return Level.FULL
        if step < phase_start + self.dense or step % self.every == 0:
            return Level.DEFAULT
        return Level.SENTINEL

    def __str__(self) -> str:
        return (
            f"every step for {self.dense} steps of a phase, then every {self.every}; "
            f"all statistics every {self.full_every}"
        )


def every(n: int, *, full_every: int = 100) -> Plan:
    """Measures each `n`-th step."""
    return Plan(dense=0, every=n, full_every=full_every)
