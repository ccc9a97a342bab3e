"""Heads at the two ends of attention: one key alone, or all keys alike.

Shape suffixes: L layers, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stability_probe.alerts.history import History
from stability_probe.detect.limit import Limit
from stability_probe.detect.span import LONG, SHORT

Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

SATURATED = Limit(enter=0.02, leave=0.05)  # of the entropy ratio
UNIFORM = Limit(enter=0.995, leave=0.98)


@dataclass(frozen=True, slots=True, eq=False)
class Extreme:
    """Where heads are at an end.

    Attributes:
        now_LH: the entropy ratio.
        there_LH: heads at the end.
        came_LH: those of them that were away from it at the start of a window.
        known_LH: heads with an entropy.
    """

    now_LH: Float64
    there_LH: Bool
    came_LH: Bool
    known_LH: Bool

    def broad(self, bad_LH: Bool, share: float) -> Bool:
        """Layers in which such a share of the heads, two at least if there are two, is bad, [L]."""
        known_L = np.count_nonzero(self.known_LH, axis=1)
        needed_L = np.maximum(share * known_L, np.minimum(2, known_L))
        wide: Bool = (known_L > 0) & (np.count_nonzero(bad_LH, axis=1) >= needed_L)
        return wide


def extreme(history: History, limit: Limit, *, away: float) -> Extreme:
    """Which heads are beyond a limit of their entropy ratio.

    Args:
        history: the run so far, its newest record measured.
        limit: the end.
        away: an entropy ratio on the other side of `limit.leave`: a head that had it at the start
            of the short or the long window has come to the end since.
    """
    past = history.entropy
    now_LH = history.by_head(past.newest)
    there_LH = history.beyond(limit)
    came_LH = np.zeros_like(there_LH)
    for span in (SHORT, LONG) if there_LH.any() else ():
        then_LH = history.by_head(past.reference(span).value_C)
        came_LH |= there_LH & ((then_LH > away) if away > limit.leave else (then_LH < away))
    return Extreme(now_LH, there_LH, came_LH, np.isfinite(now_LH))
