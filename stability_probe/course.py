"""One rank's own course through its plan: the past that decides what comes next."""

from __future__ import annotations

import time
from dataclasses import replace

from stability_probe.budget import Budget
from stability_probe.danger import Dangers
from stability_probe.plan import Past, Plan
from stability_probe.records import Level, StepRecord
from stability_probe.stopwatch import Stopwatch


class Course:
    """Folds what happens into the past.

    Attributes:
        plan: the plan.
        past: what has been decided so far.
        stopwatch: times the probe, where the plan has a budget.
    """

    def __init__(self, plan: Plan) -> None:
        """Before the first step."""
        self.plan, self.past = plan, Past()
        self.stopwatch = Stopwatch(on=plan.overhead is not None)
        self._dangers, self._budget = Dangers(), Budget(plan.overhead)
        self._ended: float | None = None  # when the last step did, by the performance counter

    def level(self, step: int) -> Level:
        """How much is measured at a step."""
        return self.plan.level(step, self.past)

    def mark(self, step: int) -> None:
        """A phase begins with a step; so does the run, which a resumed one begins later."""
        self.past = replace(self.past, phase_start=step)

    def take(self, record: StepRecord, next_step: int) -> None:
        """A record has come, before `next_step`."""
        danger = self._dangers.judge(record)
        self.past = self.plan.after(self.past, next_step, danger=danger)

    def end_step(self, level: Level) -> None:
        """Accounts for the time of the step that has ended, and was measured so."""
        if self.plan.overhead is None:
            return
        now, before = time.perf_counter(), self._ended
        own, self._ended = self.stopwatch.take(), now
        if before is not None:
            self._budget.note(own, now - before, whole=level.whole)
            self.past = replace(self.past, thinning=self._budget.thinning)

    @property
    def asked_thinning(self) -> int:
        """The code of how far this rank would thin the plan; 0 where there is no budget."""
        return 0 if self.plan.overhead is None else self._budget.thinning.code
