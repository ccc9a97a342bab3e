"""The near and the far past of many numbers: what a newest sample is compared with.

Shape suffix: C columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stability_probe.detect.ladder import Ladder
from stability_probe.detect.series import Series
from stability_probe.detect.span import LONG, Span

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """Each column's earlier value, and the step it is of; NaN and -1 where there is none."""

    value_C: Float64
    step_C: npt.NDArray[np.int64]


class Past:
    """Smoothed samples: every one of the near past, a few of the far past.

    Attributes:
        near: all samples of the near past.
        far: samples of the far past; spans that have a share are looked up there.
    """

    def __init__(self, *, keep: Span, far: Span = LONG) -> None:
        """Remember `keep` sample by sample, and `far` at a few steps."""
        self.near, self.far = Series(keep=keep), Ladder(span=far)
        self._references: dict[Span, Reference] = {}

    @property
    def newest(self) -> Float64:
        """The newest smoothed samples, [C]."""
        newest: Float64 = self.near.smooth[-1]
        return newest

    def append(self, step: int, values_C: Float64) -> None:
        """Add one sample per column; a longer row than before brings new columns."""
        self._references.clear()
        self.near.append(step, values_C)
        self.far.append(step, self.newest, ~np.isnan(self.near.raw[-1]))

    def clear(self) -> None:
        """Forget every sample."""
        self._references.clear()
        self.near.clear()
        self.far.clear()

    def rewind(self, step: int) -> None:
        """Forget the samples from `step` on, which the run is about to do again."""
        self._references.clear()
        self.near.rewind(step)
        self.far.rewind(step)

    def forget(self, columns: slice) -> None:
        """Forget some columns' samples: what comes next is not comparable with them."""
        self._references.clear()
        self.near.forget(columns)
        self.far.forget(columns)

    def spread(self, places_C: npt.NDArray[np.intp], width: int) -> None:
        """Move each column to its new place among `width`; the others are missing so far."""
        self._references.clear()
        self.near.spread(places_C, width)
        self.far.spread(places_C, width)

    def reference(self, span: Span) -> Reference:
        """What the newest samples are to be compared with over a span."""
        if span not in self._references:
            self._references[span] = self._look_up(span)
        return self._references[span]

    def _look_up(self, span: Span) -> Reference:
        if span.share:
            return Reference(*self.far.reference(int(self.near.steps[-1])))
        row_C = self.near.reference_rows(span)
        value_C = self.near.smooth[row_C, np.arange(len(row_C))]
        known_C = row_C >= 0
        return Reference(
            np.where(known_C, value_C, np.nan), np.where(known_C, self.near.steps[row_C], -1)
        )
