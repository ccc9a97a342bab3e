"""A bounded series of many numbers side by side, and how far to look back in it.

Shape suffixes: N samples, C columns (one number each: a head of a layer).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stability_probe.detect.median import row_medians
from stability_probe.detect.span import Span

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

SMOOTHING = 10  # steps; a single spike of one batch must not count as growth


class Series:
    """The newest samples of each column, raw and smoothed.

    The rows lie in a buffer twice as long as what is kept, so that appending copies one row.
    """

    def __init__(self, *, keep: Span) -> None:
        """Remember a little more than twice `keep`."""
        self._keep = keep
        self.clear()

    def clear(self) -> None:
        """Forget every sample."""
        self._references: dict[Span, Int64] = {}
        self._first, self._last = 0, 0
        self._steps: Int64 = np.empty(0, dtype=np.int64)
        self._raw: Float64 = np.empty((0, 0))
        self._smooth: Float64 = np.empty((0, 0))

    @property
    def steps(self) -> Int64:
        """The optimizer step of each sample, [N], rising."""
        return self._steps[self._first : self._last]

    @property
    def raw(self) -> Float64:
        """The samples, [N, C]; NaN is a missing one."""
        return self._raw[self._first : self._last]

    @property
    def smooth(self) -> Float64:
        """The median of the raw samples of the last 10 steps, [N, C]."""
        return self._smooth[self._first : self._last]

    def append(self, step: int, values_C: Float64) -> None:
        """Add one sample per column; a longer row than before brings new columns.

        Samples older than twice the kept span are dropped, so memory is bounded.
        """
        self._references.clear()
        if len(values_C) > self._raw.shape[1]:
            self.spread(np.arange(self._raw.shape[1]), len(values_C))
        oldest = int(np.searchsorted(self.steps, step - 2 * self._keep.steps - SMOOTHING))
        kept = max(min(oldest, len(self.steps) - 2 * self._keep.samples), 0)
        self._first += kept
        self._make_room()
        row = self._last
        self._steps[row] = step
        self._raw[row] = np.where(np.isfinite(values_C), values_C, np.nan)
        self._last += 1
        recent = int(np.searchsorted(self.steps, step - SMOOTHING, side="right"))
        self._smooth[row] = row_medians(self.raw[recent:].T)

    def rewind(self, step: int) -> None:
        """Forget the samples from `step` on, which the run is about to do again."""
        self._references.clear()
        self._last = self._first + int(np.searchsorted(self.steps, step))

    def forget(self, columns: slice) -> None:
        """Forget some columns' samples: what comes next is not comparable with them."""
        self._references.clear()
        self.raw[:, columns] = np.nan
        self.smooth[:, columns] = np.nan

    def spread(self, places_C: npt.NDArray[np.intp], width: int) -> None:
        """Move each column to its new place among `width`; the others are missing so far."""
        self._references.clear()
        self._raw, self._smooth = (spread(a, places_C, width) for a in (self._raw, self._smooth))

    def reference_rows(self, span: Span) -> Int64:
        """The row that each column's newest sample is to be compared with, [C].

        It is the latest known one that is `span.steps` or more before the newest and has at
        least `span.samples` known samples from it on, itself included; -1 where there is
        none yet. Missing samples are not counted, so a gap only reaches further back.
        """
        if span not in self._references:
            self._references[span] = self._find_references(span)
        return self._references[span]

    def _find_references(self, span: Span) -> Int64:
        steps, raw_NC = self.steps, self.raw
        old = int(np.searchsorted(steps, steps[-1] - span.steps, side="right"))
        missing_NC = np.isnan(raw_NC)
        if not missing_NC.any():  # then all columns have the same
            row = min(old - 1, len(steps) - span.samples)
            return np.full(raw_NC.shape[1], max(row, -1), dtype=np.int64)
        since_NC = np.cumsum(~missing_NC[::-1], axis=0)[::-1]
        usable_NC = (since_NC >= span.samples) & ~np.isnan(self.smooth)
        usable_NC[old:] = False
        latest_C = len(steps) - 1 - np.argmax(usable_NC[::-1], axis=0)
        return np.where(usable_NC.any(axis=0), latest_C, -1).astype(np.int64)

    def _make_room(self) -> None:
        """Move the kept rows to the front of a buffer that has room for as many again."""
        if self._last < len(self._steps):
            return
        kept = self._last - self._first
        room, width = 2 * kept + 64, self._raw.shape[1]
        steps, raw, smooth = self.steps, self.raw, self.smooth
        self._steps = np.zeros(room, dtype=np.int64)
        self._raw, self._smooth = np.full((room, width), np.nan), np.full((room, width), np.nan)
        self._steps[:kept], self._raw[:kept], self._smooth[:kept] = steps, raw, smooth
        self._first, self._last = 0, kept


def spread(rows_NC: Float64, places_C: npt.NDArray[np.intp], width: int) -> Float64:
    """The same rows with each column at its new place among `width`; the rest is missing."""
    wide = np.full((len(rows_NC), width), np.nan)
    wide[:, places_C] = rows_NC
    return wide
