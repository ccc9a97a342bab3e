"""Which steps are pooled: a function of the step and of what all ranks have heard alike."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from stability_probe.danger import Dangers
from stability_probe.plan import Past, Plan, Thinning
from stability_probe.ranks.reduced import Reduced
from stability_probe.records import Level

LAG = 16  # steps after which every rank has a result, or has given pooling up


class Schedule:
    """The plan, after a past that is the same on all ranks.

    What a pooled step says (a new phase, danger, how far to thin the plan) reaches the ranks at
    different times. It takes effect `LAG` steps after that step on each of them: by then each has
    heard of it, or has given pooling up.
    """

    def __init__(self, plan: Plan, first: int, phase_start: int) -> None:
        """Pool from step `first` on, in a phase that began at `phase_start`."""
        self._plan, self._first = plan, first
        self._past = Past(phase_start)
        self._heard = phase_start
        self._begun = False
        self._dangers = Dangers()
        self._results: deque[tuple[int, Reduced]] = deque()
        self.tick = 0  # steps that ended since pooling began

    def level(self, step: int) -> Level | None:
        """What is measured at a step; None before the first pooled one."""
        self._begun |= step >= self._first
        return self._plan.level(step, self._past) if self._begun else None

    def due(self, step: int) -> bool:
        """Whether the step is pooled."""
        level = self.level(step)
        return level is not None and level.whole

    def hear(self, tick: int, result: Reduced) -> None:
        """Takes the result of the step that ended at `tick` into account, when its time comes."""
        self._results.append((tick, result))

    def advance(self, step: int) -> None:
        """`step` has ended: what all ranks know by now takes effect."""
        self.tick += 1
        while self._results and self._results[0][0] <= self.tick - LAG:
            self._apply(self._results.popleft()[1], step + 1)

    def _apply(self, result: Reduced, step: int) -> None:
        merged = result.merged
        if merged.phase_start > self._heard:
            self._heard, self._past = merged.phase_start, replace(self._past, phase_start=step)
        if merged.thinning:
            self._past = replace(self._past, thinning=Thinning.of(merged.thinning))
        danger = self._dangers.judge(result.common)
        self._past = self._plan.after(self._past, step, danger=danger)
