"""How far is the loss above its best, and is it still falling, in units of its own noise?

    z = (fast average - best of the slow average) / standard deviation of the fast average

The noise is the median absolute deviation of successive differences (a robust residual scale), so
that z needs no margin in nats and no initial loss to compare with: a margin of a tenth of what
was learned is 0.8 nat for a language model. Fast against slow averages are the control chart of
Roberts (1959), doi:10.1080/00401706.1959.10489860.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import islice, pairwise
from statistics import median

RATE = 0.1  # weight of one step's loss in the fast average
SLOW_RATE = 0.04  # and in the slow one
SETTLED = 30  # steps from the first loss on until the slow average can be a best
RESIDUALS = 50  # differences that the noise is estimated from
FEW = 8  # fewer differences than that: the largest counts, not the median
NORMAL = 1.4826 / math.sqrt(2.0)  # of a median |deviation| to the standard deviation of a loss
FLOOR = 1e-3  # least noise, as a share of the average: a loss without any is not infinitely sure


@dataclass(frozen=True, slots=True)
class _Point:
    step: int
    loss: float
    average: float
    slow: float
    best: float
    rate: float


class LossTrack:
    """A fast and a slow exponential average of a loss, the slow one's best, and the recent past.

    The averages' rates are per optimizer step, so that a loss given every tenth step is smoothed
    over the same time as one given at every step.

    A loss that is not finite counts as infinitely bad until the next one is given, and leaves
    the averages and the best as they are: one bad batch must not blind the track for ever.

    Attributes:
        first: step and value of the first finite loss.
    """

    def __init__(self, *, keep: int) -> None:
        self._keep = keep
        self.clear()

    def clear(self) -> None:
        """Forget every loss."""
        self._points: deque[_Point] = deque()
        self.first: tuple[int, float] | None = None
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
            self.first = step, loss
            self._points.append(_Point(step, loss, loss, loss, math.inf, RATE))
            return
        last = self._points[-1]
        steps = max(step - last.step, 1)
        rate, slow_rate = (1.0 - (1.0 - r) ** steps for r in (RATE, SLOW_RATE))
        average = last.average + rate * (loss - last.average)
        slow = last.slow + slow_rate * (loss - last.slow)
        settled = self.first is None or step - self.first[0] >= SETTLED
        best = min(last.best, slow) if settled else last.best
        self._points.append(_Point(step, loss, average, slow, best, rate))
        while len(self._points) > RESIDUALS + 2 and self._points[1].step < step - self._keep:
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
    def slow(self) -> float | None:
        """The slowly averaged loss; None without any."""
        return self._points[-1].slow if self._points else None

    @property
    def excess(self) -> float | None:
        """How far the averaged loss is above its best, in the loss's own unit.

        None while there is no best yet.
        """
        if self._bad:
            return math.inf
        if not self._points or math.isinf(self._points[-1].best):
            return None
        return self._points[-1].average - self._points[-1].best

    @property
    def z(self) -> float | None:
        """The excess in standard deviations of the averaged loss; None while there is no best."""
        excess = self.excess
        return excess if excess is None or math.isinf(excess) else excess / self.scale

    @property
    def scale(self) -> float:
        """Standard deviation of the fast average by noise alone, from losses before the newest."""
        newest = self._points[-1]
        points = list(self._points)[-RESIDUALS - 2 : -1]
        jumps = [b.loss - a.loss for a, b in pairwise(points)]
        trend = median(jumps) if jumps else 0.0
        residuals = [abs(jump - trend) for jump in jumps]
        noise = (
            max(map(abs, jumps), default=0.0) if len(jumps) < FEW else NORMAL * median(residuals)
        )
        floor = max(FLOOR * abs(newest.average), 1e-9)
        return max(noise * math.sqrt(newest.rate / (2.0 - newest.rate)), floor)

    @property
    def wander(self) -> float:
        """How far the fast average usually is from the slow one, as a standard deviation.

        It holds what the noise of single losses does not: slow waves, such as those of a fixed
        evaluation batch, whose successive losses hardly differ.
        """
        points = list(self._points)[-RESIDUALS - 2 : -1]
        apart = [abs(p.average - p.slow) for p in points]
        return max(1.4826 * median(apart), self.scale) if apart else self.scale

    def past(self, step: int, *, within: int) -> float | None:
        """The averaged loss `within` steps before `step`: the latest then known.

        It is never the newest one: where a loss is given more seldom than that, the newest is
        compared with the one before.
        """
        older = islice(reversed(self._points), 1, None)
        return next((p.average for p in older if p.step <= step - within), None)

    def falling(self, step: int, *, within: int, least: float) -> bool | None:
        """Whether the averaged loss fell within so many steps, by so many standard deviations.

        Returns None while there is no loss that old.
        """
        if self._bad:
            return False
        then = self.past(step, within=within)
        if then is None:
            return None
        return then - self._points[-1].average > least * math.sqrt(2.0) * self.scale
