"""Growth of logits in breadth: many heads a little, some heads well, one head far.

Shape suffix: L layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stability_probe.alerts.history import History
from stability_probe.detect.growth import Growth, GrowthTest
from stability_probe.detect.loss import LossTrack
from stability_probe.detect.span import LONG, Span
from stability_probe.records import Severity

LOSS_WINDOW = 40  # steps over which a falling loss is told from a flat one
FALLING = 3.0  # standard deviations by which it must have fallen in them
UNEASY = 2.0  # standard deviations above its best from which the loss is evidence of a beginning


@dataclass(frozen=True, slots=True, kw_only=True)
class Stair:
    """A breadth of growth, how bad it is, and what the loss must say beside it.

    Attributes:
        test: how many heads must have grown by how much, within which window.
        severity: of what is found.
        least_z: standard deviations that the averaged loss must be above its best; None: it need
            only not be falling, because what falls learns.
    """

    test: GrowthTest
    severity: Severity = Severity.WARNING
    least_z: float | None = None

    def allowed(self, track: LossTrack, step: int) -> bool:
        """Whether the loss lets the growth count."""
        if self.least_z is None:
            return not track.falling(step, within=LOSS_WINDOW, least=FALLING)
        return (track.z or 0.0) >= self.least_z


A_QUARTER = GrowthTest(level=30.0, factor=1.5, share=0.25)
A_QUARTER_TWICE = GrowthTest(level=30.0, factor=2.0, share=0.25)
A_TENTH_TWICE = GrowthTest(level=30.0, factor=2.0, share=0.1)
SLOWLY = GrowthTest(level=50.0, factor=2.0, share=0.25, window=LONG)
SLOWLY_FAR = GrowthTest(level=100.0, factor=4.0, share=0.25, window=LONG)
ONE_HEAD = GrowthTest(level=100.0, factor=2.0, share=0.0, least=1)
WITHOUT_LOSS = GrowthTest(level=40.0, factor=2.0, share=0.25, window=Span(steps=60))

WITH_LOSS_STAIRS = (
    Stair(test=A_QUARTER_TWICE),
    Stair(test=A_TENTH_TWICE, least_z=UNEASY),
    Stair(test=A_QUARTER, least_z=UNEASY),
    Stair(test=SLOWLY, least_z=UNEASY),
    Stair(test=SLOWLY_FAR),
    Stair(test=ONE_HEAD, severity=Severity.INFO),
)
WITHOUT_LOSS_STAIRS = (
    Stair(test=WITHOUT_LOSS),
    Stair(test=SLOWLY_FAR),
    Stair(test=ONE_HEAD, severity=Severity.INFO),
)


@dataclass(frozen=True, slots=True, eq=False)
class Climbed:
    """Which stair each layer stands on.

    Attributes:
        judged_L: layers with enough samples for some stair.
        found_L: layers that stand on one.
        stair_L: its place, -1 where none.
        badness_L: the largest logit of a head that grew.
    """

    judged_L: npt.NDArray[np.bool_]
    found_L: npt.NDArray[np.bool_]
    stair_L: npt.NDArray[np.int64]
    badness_L: npt.NDArray[np.float64]

    def growth(self, history: History, stairs: tuple[Stair, ...], layer: int) -> Growth:
        """The growth that put a layer on its stair."""
        return history.growth(stairs[self.stair_L[layer]].test)


def climb(history: History, stairs: tuple[Stair, ...], track: LossTrack | None) -> Climbed:
    """The first stair of each layer, given in order, the worst first.

    Args:
        history: the run so far, its newest record measured.
        stairs: what to look for.
        track: the loss to judge by; None where none is given: growth alone then counts.
    """
    layers = len(history.names)
    judged_L, stair_L = np.zeros(layers, dtype=bool), np.full(layers, -1, dtype=np.int64)
    badness_L = np.full(layers, -np.inf)
    for place, stair in enumerate(stairs):
        growth = history.growth(stair.test)
        judged_L |= growth.armed_L
        new_L = growth.grown_L & (stair_L < 0)
        if not new_L.any() or not (track is None or stair.allowed(track, history.step)):
            continue
        stair_L[new_L] = place
        badness_L[new_L] = growth.largest[new_L]
    return Climbed(judged_L, stair_L >= 0, stair_L, badness_L)
