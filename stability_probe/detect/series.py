"""A bounded series of one number per layer, and how far to look back in it.

Shape suffixes: N samples, L layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stability_probe.detect.median import row_medians

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

SMOOTHING = 10  # steps; a single spike of one batch must not count as growth


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """How far back a comparison goes: at least so many steps and at least so many samples.

    A run measured every step is compared over `steps`; a run measured rarely over the
    `samples` newest samples, both ends included, however many steps these take.
    """

    steps: int = 40
    samples: int = 8

    def __post_init__(self) -> None:
        if self.steps < 1 or self.samples < 2:
            raise ValueError(
                f"Span(steps={self.steps}, samples={self.samples}) cannot hold a comparison; "
                "give at least 1 step and at least 2 samples."
            )


SHORT = Span()  # the span of the stock rules


def longest(spans: Iterable[Span]) -> Span:
    """The span that holds all of them; the stock span where there is none."""
    found = list(spans) or [SHORT]
    return Span(steps=max(s.steps for s in found), samples=max(s.samples for s in found))


class Series:
    """The newest samples of one number per layer, raw and smoothed.

    Attributes:
        steps: the optimizer step of each sample, [N], rising.
        raw: the samples, [N, L]; NaN is a missing one.
        smooth: the median of the raw samples of the last 10 steps, [N, L].
    """

    def __init__(self, *, keep: Span) -> None:
        self._keep = keep
        self._references: dict[Span, Int64] = {}
        self.clear()

    def clear(self) -> None:
        """Forget every sample."""
        self._references.clear()
        self.steps: Int64 = np.empty(0, dtype=np.int64)
        self.raw: Float64 = np.empty((0, 0))
        self.smooth: Float64 = np.empty((0, 0))

    def append(self, step: int, values_L: Float64) -> None:
        """Add one sample per layer; a longer row than before brings new layers.

        Samples older than twice the kept span are dropped, so memory is bounded.
        """
        self._references.clear()
        values_L = np.where(np.isfinite(values_L), values_L, np.nan)
        new_layers = len(values_L) - self.raw.shape[1]
        oldest = step - 2 * self._keep.steps - SMOOTHING
        first = int(np.searchsorted(self.steps, oldest))
        first = max(min(first, len(self.steps) - 2 * self._keep.samples), 0)
        self.steps = np.append(self.steps[first:], step)
        self.raw = np.vstack([_widened(self.raw[first:], new_layers), values_L])
        recent = int(np.searchsorted(self.steps, step - SMOOTHING, side="right"))
        smooth_L = row_medians(self.raw[recent:].T)
        self.smooth = np.vstack([_widened(self.smooth[first:], new_layers), smooth_L])

    def rewind(self, step: int) -> None:
        """Forget the samples from `step` on, which the run is about to do again."""
        self._references.clear()
        last = int(np.searchsorted(self.steps, step))
        self.steps, self.raw, self.smooth = self.steps[:last], self.raw[:last], self.smooth[:last]

    def forget(self, layer: int) -> None:
        """Forget one layer's samples: what comes next is not comparable with them."""
        self._references.clear()
        if layer < self.raw.shape[1]:
            self.raw[:, layer] = np.nan
            self.smooth[:, layer] = np.nan

    def reference_rows(self, span: Span) -> Int64:
        """The row that each layer's newest sample is to be compared with, [L].

        It is the latest known one that is `span.steps` or more before the newest and has at
        least `span.samples` known samples from it on, itself included; -1 where there is
        none yet. Missing samples are not counted, so a gap only reaches further back.
        """
        if span not in self._references:
            self._references[span] = self._find_references(span)
        return self._references[span]

    def _find_references(self, span: Span) -> Int64:
        old = int(np.searchsorted(self.steps, self.steps[-1] - span.steps, side="right"))
        missing_NL = np.isnan(self.raw)
        if not missing_NL.any():  # then all layers have the same
            row = min(old - 1, len(self.steps) - span.samples)
            return np.full(self.raw.shape[1], max(row, -1), dtype=np.int64)
        since_NL = np.cumsum(~missing_NL[::-1], axis=0)[::-1]
        usable_NL = (since_NL >= span.samples) & ~np.isnan(self.smooth)
        usable_NL[old:] = False
        latest_L = len(self.steps) - 1 - np.argmax(usable_NL[::-1], axis=0)
        return np.where(usable_NL.any(axis=0), latest_L, -1).astype(np.int64)


def _widened(rows_NL: Float64, extra: int) -> Float64:
    """The same rows with `extra` missing layers on the right."""
    return np.pad(rows_NL, ((0, 0), (0, extra)), constant_values=np.nan) if extra > 0 else rows_NL
