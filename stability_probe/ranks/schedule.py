"""Which steps are pooled: a function of the step and of what all ranks have heard alike."""

from __future__ import annotations

from collections import deque

from stability_probe.plan import Plan
from stability_probe.records import Level

LAG = 8  # pooled steps after which every rank has the result, or has given pooling up


class Schedule:
    """The plan, with phases that begin when every rank is sure to have heard of them.

    A rank that calls `mark` cannot make the others measure at once: they do not know. The mark
    travels with the next pooled step, and the dense measuring begins `LAG` pooled steps later.
    """

    def __init__(self, plan: Plan, first: int, phase_start: int) -> None:
        """Pool from step `first` on, in a phase that began at `phase_start`."""
        self._plan, self._first = plan, first
        self._phase_start = self._heard = phase_start
        self._begun = False
        self._results: deque[tuple[int, int]] = deque()  # pooled step, its newest phase

    def level(self, step: int) -> Level | None:
        """What is measured at a step; None before the first pooled one."""
        self._begun |= step >= self._first
        if not self._begun:
            return None
        return self._plan.level(step, phase_start=self._phase_start)

    def due(self, step: int) -> bool:
        """Whether the step is pooled."""
        return self.level(step) not in (None, Level.SENTINEL)

    def hear(self, index: int, phase_start: int) -> None:
        """Takes the result of the `index`-th pooled step into account, when its time comes."""
        self._results.append((index, phase_start))

    def advance(self, index: int, step: int) -> None:
        """The `index`-th pooled step was `step`: what all ranks know by now takes effect."""
        while self._results and self._results[0][0] <= index - LAG:
            phase_start = self._results.popleft()[1]
            if phase_start > self._heard:
                self._heard, self._phase_start = phase_start, step + 1
