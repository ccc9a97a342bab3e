"""Is the loss still falling, and how far is it above its best?"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import islice

RATE = 0.1  # weight of one step's loss in the average, as in the calibration of the stock rules


@dataclass(frozen=True, slots=True)
class _Point:
    step: int
    average: float
    best: float


class LossTrack:
    """An exponential average of a loss, its best value, and its recent past.

    The average's rate is per optimizer step, so that a loss given every tenth step is smoothed
    over the same time as one given at every step.

    A loss that is not finite counts as infinitely bad until the next one is given, and leaves
    the average and the best as they are: one bad batch must not blind the track for ever.
    """

    def __init__(self, *, keep: int) -> None:
        self._keep = keep
        self.clear()

    def clear(self) -> None:
        """Forget every loss."""
        self._points: deque[_Point] = deque()
        self._bad = False

    def update(self, step: int, loss: float | None) -> None:
        """Take the loss of one step; None says that it was not given."""
        if loss is None:
            return
        loss = float(loss)
        self._bad = not math.isfinite(loss)
        if self._bad:
            return
        if not self._points:
            self._points.append(_Point(step, loss, loss))
            return
        last = self._points[-1]
        rate = 1.0 - (1.0 - RATE) ** max(step - last.step, 1)
        average = last.average + rate * (loss - last.average)
        self._points.append(_Point(step, average, min(last.best, average)))
        while len(self._points) > 2 and self._points[1].step < step - self._keep:
            self._points.popleft()

    def rewind(self, step: int) -> None:
        """Forget the losses from `step` on, which the run is about to do again."""
        while self._points and self._points[-1].step >= step:
            self._points.pop()
        self._bad = False

    @property
    def value(self) -> float | None:
        """The averaged loss now: infinite where the newest is not finite; None without any."""
        if self._bad:
            return math.inf
        return self._points[-1].average if self._points else None

    @property
    def excess(self) -> float | None:
        """How far the averaged loss is above its best, in the loss's own unit."""
        if self._bad:
            return math.inf
        return self._points[-1].average - self._points[-1].best if self._points else None

    def past(self, step: int, *, within: int) -> float | None:
        """The averaged loss `within` steps before `step`: the latest then known.

        It is never the newest one: where a loss is given more seldom than that, the newest is
        compared with the one before.
        """
        older = islice(reversed(self._points), 1, None)
        return next((p.average for p in older if p.step <= step - within), None)

    def falling(self, step: int, *, within: int, drop: float) -> bool | None:
        """Whether the averaged loss fell by more than a share within so many steps.

        Returns None while there is no loss that old.
        """
        if self._bad:
            return False
        then = self.past(step, within=within)
        if then is None:
            return None
        return then - self._points[-1].average > drop * abs(then)
