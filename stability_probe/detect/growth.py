"""Have enough of a layer's heads grown, from their own past, above a level that matters?

Shape suffixes: L layers, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stability_probe.detect.past import Past
from stability_probe.detect.span import SHORT, Span

Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Growth:
    """Each head's number now and then; where it is not armed nothing is known.

    Attributes:
        now_LH: the newest smoothed numbers.
        then_LH: the references.
        since_LH: their steps, -1 where none.
        grown_LH: heads that ended above the level and grew by the factor.
        armed_L: layers with a head that can be judged.
        grown_L: layers in which enough heads grew.
    """

    now_LH: Float64
    then_LH: Float64
    since_LH: npt.NDArray[np.int64]
    grown_LH: Bool
    armed_L: Bool
    grown_L: Bool

    @property
    def largest(self) -> Float64:
        """The largest number of any head that grew, [L]; -inf where none did."""
        largest: Float64 = np.where(self.grown_LH, self.now_LH, -np.inf).max(axis=1)
        return largest

    def heads(self, layer: int) -> tuple[int, ...]:
        """The heads of a layer that grew."""
        return tuple(np.flatnonzero(self.grown_LH[layer]).tolist())

    def ends(self, layer: int) -> tuple[float, float]:
        """Median number then and now of the heads that grew; of all that are armed if none did."""
        chosen = self.grown_LH[layer]
        if not chosen.any():
            chosen = np.isfinite(self.now_LH[layer] - self.then_LH[layer])
        if not chosen.any():
            return np.nan, np.nan
        then, now = self.then_LH[layer][chosen], self.now_LH[layer][chosen]
        return float(np.median(then)), float(np.median(now))

    def since(self, layer: int) -> int:
        """The reference's step: the latest of a layer's heads."""
        return int(self.since_LH[layer].max())


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthTest:
    """Growth of enough heads by a factor within a span, ending above a level.

    The factor and the span say "now", the level says "and it is not the ordinary growth of
    early learning", in which logits go from 1 to 20. A past value of 0 or less (zero-initialised
    W_q) counts as outgrown. Breadth is judged layer by layer: a mean or a median over heads hides
    the case where an eighth of them run away (Kimi K2, arXiv:2507.20534).

    Attributes:
        level: the value to end above, in the unit of the series.
        factor: the least ratio of the newest smoothed value to the reference.
        share: the share of a layer's heads that must have grown so.
        least: the least number of them, where the layer has as many.
        window: how far back the reference lies.
    """

    level: float = 30.0
    factor: float = 1.5
    share: float = 0.25
    least: int = 2
    window: Span = SHORT

    def __call__(self, past: Past, *, heads: int = 1) -> Growth:
        """Test every head at the newest sample of columns that are layers times heads."""
        reference = past.reference(self.window)
        now_LH, then_LH = past.newest.reshape(-1, heads), reference.value_C.reshape(-1, heads)
        since_LH = reference.step_C.reshape(-1, heads)
        known_LH = np.isfinite(now_LH) & np.isfinite(then_LH)
        grown_LH = known_LH & (now_LH > self.level) & (now_LH >= self.factor * then_LH)
        armed_L: Bool = np.asarray(known_LH.any(axis=1))
        return Growth(now_LH, then_LH, since_LH, grown_LH, armed_L, self.enough(grown_LH, known_LH))

    def enough(self, bad_LH: Bool, known_LH: Bool) -> Bool:
        """Whether so many heads of each layer are bad, [L]."""
        known_L = np.count_nonzero(known_LH, axis=1)
        needed_L = np.maximum(np.minimum(self.least, known_L), self.share * known_L)
        enough_L: Bool = (known_L > 0) & (np.count_nonzero(bad_LH, axis=1) >= needed_L)
        return enough_L


SHORT_GROWTH = GrowthTest()  # a quarter of the heads, 1.5 times and above 30 within 40 steps
