"""Has a layer's number grown, from its own past, above a level that matters?

Shape suffixes: L layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stability_probe.detect.series import SHORT, Series, Span

Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Growth:
    """Each layer's number now and then; where it is not armed nothing is known."""

    now_L: Float64
    then_L: Float64
    row_L: npt.NDArray[np.int64]  # the reference's row in the series, -1 where none
    since_L: npt.NDArray[np.int64]  # the reference's step
    armed_L: Bool  # enough samples to judge
    grown_L: Bool  # armed, above the level, and grown by the factor


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthTest:
    """Growth by a factor within a span, ending above a level.

    The factor and the span say "now", the level says "and it is not the ordinary growth of
    early learning", in which logits go from 1 to 20. A past value of 0 or less (zero-initialised
    W_q) counts as outgrown.

    Attributes:
        level: the value to end above, in the unit of the series.
        factor: the least ratio of the newest smoothed value to the reference.
        window: how far back the reference lies.
    """

    level: float = 30.0
    factor: float = 1.5
    window: Span = SHORT

    def __call__(self, series: Series) -> Growth:
        """Test every layer at the series' newest sample."""
        now_L = series.smooth[-1]
        row_L = series.reference_rows(self.window)
        then_L = np.where(row_L >= 0, series.smooth[row_L, np.arange(len(row_L))], np.nan)
        armed_L = np.isfinite(now_L) & np.isfinite(then_L)
        grown_L = armed_L & (now_L > self.level) & (now_L >= self.factor * then_L)
        return Growth(now_L, then_L, row_L, series.steps[row_L], armed_L, grown_L)


SHORT_GROWTH = GrowthTest()  # level 30 and 1.5 times within 40 steps, or 8 samples
