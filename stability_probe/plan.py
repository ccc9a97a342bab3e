"""What is measured at which step.

A pure function of the step and of what earlier records have decided (`Past`). Where ranks pool
their records, all of them fold the same reduced records into their `Past`, so that all measure
alike without talking about it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stability_probe.records import Level

WIDEST = 64  # times `every`: beyond, hardly anything is measured
LONGEST = 10  # times `escalation`: the longest run of steps that are measured fully in a row


@dataclass(frozen=True, slots=True)
class Thinning:
    """How a plan is thinned to keep to its share of the time.

    Attributes:
        stride: how many times rarer steps are measured: 1, 2, 4, ... 64.
        bare: whether the steps between them get nothing but the sentinel.
    """

    stride: int = 1
    bare: bool = False

    @property
    def code(self) -> int:
        """As one number above 0, to be sent."""
        return 2 * self.stride + self.bare

    @classmethod
    def of(cls, code: int) -> Thinning:
        """The inverse of `code`."""
        return cls(code // 2, bool(code % 2))


@dataclass(frozen=True, slots=True)
class Past:
    """What earlier records have decided of the steps to come.

    Attributes:
        phase_start: first step of the phase.
        escalated: first and last step of the newest run of steps that are measured fully.
        thinning: how the plan is thinned.
    """

    phase_start: int = 1
    escalated: tuple[int, int] | None = None
    thinning: Thinning = Thinning()


@dataclass(frozen=True, slots=True)
class Plan:
    """Dense at the start of a phase, then sparse; everything while there is danger.

    Attributes:
        dense: so many first steps of a phase are all measured (steps).
        every: afterwards each step divisible by it is measured (steps).
        full_every: each step divisible by it, and the first of a phase, gets every statistic
            and not only the default set (steps).
        between: what the other steps get: `Level.SENTINEL`, `Level.BRACKET` or
            `Level.SEQUENCE`. The sentinel, which misses no non-finite value, is always on.
        escalation: so many steps after a dangerous record get every statistic, and again while
            danger lasts; 0: none. See `danger.Dangers`.
        overhead: the largest share of the time that watching may take, as in 0.01. Where it
            takes more, the plan is thinned: measured steps by 2, 4 and so on up to 64 times,
            and what the steps between them get is left out where that costs more; escalations
            are not thinned. None: as planned, whatever it costs.
    """

    dense: int = 200
    every: int = 10
    full_every: int = 100
    between: Level = Level.BRACKET
    escalation: int = 10
    overhead: float | None = None

    def __post_init__(self) -> None:
        if self.dense < 0 or self.every < 1 or self.full_every < 1 or self.escalation < 0:
            raise ValueError(
                f"got dense={self.dense}, every={self.every}, full_every={self.full_every}, "
                f"escalation={self.escalation}; expected dense and escalation >= 0 and the others "
                ">= 1, all in steps. Use every(n) to measure each n-th step from the start."
            )
        if self.between not in (Level.SENTINEL, Level.BRACKET, Level.SEQUENCE):
            raise ValueError(
                f"got between={self.between!r}; expected Level.SENTINEL, Level.BRACKET or "
                "Level.SEQUENCE. Use every(1) to measure all sequences at each step."
            )
        if self.overhead is not None and not 0 < self.overhead < 1:
            raise ValueError(
                f"got overhead={self.overhead}; expected a share of the time between 0 and 1, as "
                "in 0.01 for one percent, or None for no limit."
            )

    def level(self, step: int, past: Past | None = None) -> Level:
        """How much is measured at a step, after such a past."""
        past = past or Past()
        first, last = past.escalated or (0, -1)
        if step == past.phase_start or first <= step <= last:
            return Level.FULL
        stride = past.thinning.stride
        if step % (self.full_every * stride) == 0:
            return Level.FULL
        dense = 0 <= step - past.phase_start < self.dense  # the run may go back before the phase
        if step % ((1 if dense else self.every) * stride) == 0:
            return Level.DEFAULT
        return Level.SENTINEL if past.thinning.bare else self.between

    def after(self, past: Past, step: int, *, danger: bool) -> Past:
        """The past as seen from `step` on, if the record that says so is heard of before it.

        An escalation lasts while danger does, but no longer than `LONGEST` times `escalation`,
        and is then followed by a rest as long as it was: a run that stays in danger for days
        must not be measured fully for days.
        """
        if not danger or not self.escalation:
            return past
        last = step + self.escalation - 1
        first, until = past.escalated or (0, -1)
        if step < first or step > 2 * until - first + 1:  # before: the run has gone back
            return replace(past, escalated=(step, last))
        if step > until + 1:
            return past
        end = first + LONGEST * self.escalation - 1
        return replace(past, escalated=(first, max(until, min(last, end))))

    def __str__(self) -> str:
        dense = f"every step for {self.dense} steps of a phase, then " if self.dense else ""
        return (
            f"{dense}every {self.every}; all statistics every {self.full_every}, and for "
            f"{self.escalation} steps after danger; between: {self.between}"
            + ("" if self.overhead is None else f"; at most {self.overhead:.1%} of the time")
        )


def every(n: int, *, full_every: int = 100, between: Level = Level.BRACKET) -> Plan:
    """Measures each `n`-th step."""
    return Plan(dense=0, every=n, full_every=full_every, between=between)


def rotating(n: int = 10, *, full_every: int = 100) -> Plan:
    """Measures one sequence of each call at each step, another one each time, and all each `n`-th.

    The records of one sequence and those of all are of different classes: rules judge a layer by
    one of them, see `Observation`.
    """
    return every(n, full_every=full_every, between=Level.SEQUENCE)
