"""The far past of many numbers, kept at a few steps only.

Shape suffix: C columns.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stability_probe.detect.series import spread
from stability_probe.detect.span import Span

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

RUNGS = 16  # within the span: the comparison reaches at most a 16th too far


@dataclass(slots=True)
class _Rung:
    step: int
    value_C: Float64
    count_C: Float64  # known samples up to here


class Ladder:
    """Samples some way apart, the distance growing with the span: memory stays the same."""

    def __init__(self, *, span: Span) -> None:
        """Hold what `span` needs."""
        self._span = span
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._rungs: deque[_Rung] = deque()
        self._count_C: Float64 = np.zeros(0)
        self._start: int | None = None

    @property
    def steps(self) -> set[int]:
        """The steps whose samples are kept."""
        return {rung.step for rung in self._rungs}

    def append(self, step: int, value_C: Float64, known_C: npt.NDArray[np.bool_]) -> None:
        """Take the smoothed values of a step, and which columns had a sample at it."""
        self._start = step if self._start is None else self._start
        if len(value_C) > len(self._count_C):
            self.spread(np.arange(len(self._count_C)), len(value_C))
        self._count_C += known_C
        reach = self._span.reach(step - self._start)
        if not self._rungs or step - self._rungs[-1].step >= reach / RUNGS:
            self._rungs.append(_Rung(step, value_C.copy(), self._count_C.copy()))
        while len(self._rungs) > 3 and self._rungs[2].step <= step - reach:
            self._rungs.popleft()

    def rewind(self, step: int) -> None:
        """Forget the rungs from `step` on, which the run is about to do again."""
        while self._rungs and self._rungs[-1].step >= step:
            self._rungs.pop()
        if self._rungs:
            self._count_C = self._rungs[-1].count_C.copy()
        else:
            self._count_C = np.zeros_like(self._count_C)
        if self._start is not None and step <= self._start:
            self.clear()

    def forget(self, columns: slice) -> None:
        """Forget some columns' samples: what comes next is not comparable with them."""
        for rung in self._rungs:
            rung.value_C[columns] = np.nan

    def spread(self, places_C: npt.NDArray[np.intp], width: int) -> None:
        """Move each column to its new place among `width`; the others are missing so far."""
        for rung in self._rungs:
            rung.value_C = spread(rung.value_C[None], places_C, width)[0]
            rung.count_C = np.nan_to_num(spread(rung.count_C[None], places_C, width)[0])
        self._count_C = np.nan_to_num(spread(self._count_C[None], places_C, width)[0])

    def reference(self, step: int) -> tuple[Float64, Int64]:
        """Value and step to compare the sample of `step` with, [C]; NaN and -1 where none is.

        It is the latest known one that lies the span back and has enough samples since; none
        while the phase is younger than the span asks for.
        """
        value_C, step_C = np.full(len(self._count_C), np.nan), np.full(len(self._count_C), -1)
        age = step - (step if self._start is None else self._start)
        reach = self._span.reach(age)
        for rung in reversed(self._rungs):
            if rung.step > step - reach or step - rung.step > age / max(self._span.age, 1.0):
                continue
            enough_C = self._count_C - rung.count_C + 1 >= self._span.samples
            found_C = np.isnan(value_C) & enough_C & ~np.isnan(rung.value_C)
            value_C[found_C], step_C[found_C] = rung.value_C[found_C], rung.step
            if not np.isnan(value_C).any():
                break
        return value_C, step_C.astype(np.int64)
