"""The loss diverges and attention is calm: look elsewhere."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from stability_probe.alerts.actions import FROM_CHECKPOINT, LOOK_ELSEWHERE
from stability_probe.alerts.history import History
from stability_probe.alerts.rule import Finding, Verdict, announce
from stability_probe.alerts.staircase import A_QUARTER, A_TENTH_TWICE, LOSS_WINDOW, SLOWLY
from stability_probe.alerts.trend import BURN_IN, RESTS
from stability_probe.detect.growth import Growth, GrowthTest
from stability_probe.detect.loss import LossTrack
from stability_probe.detect.span import Span, longest
from stability_probe.records import Alert, Severity

STAYS = 5  # samples in a row: a bad batch lifts the average for less


@dataclass(frozen=True, slots=True, kw_only=True)
class LossDivergenceElsewhere:
    """The averaged loss is far above its best while no layer's logits grow in breadth.

    Recovering spikes, repeated or mislabelled data, a learning rate of the output layer: in
    recorded runs with such faults the attention statistics stayed flat. Info, because most such
    spikes pass, and a warning once the loss is as far above its best as the divergences were.

    Attributes:
        calm: growth that is not calm, over any of its windows.
        high: a largest logit that is not calm either, in as many heads, however long it stays.
        least_z: standard deviations above its best, of its noise and of its slow waves.
        far_z: the same, for a warning.
        burn_in: steps of a phase before the rule judges.
    """

    name: str = "loss_divergence_elsewhere"
    calm: tuple[GrowthTest, ...] = (A_QUARTER, A_TENTH_TWICE, SLOWLY)
    high: float = 100.0
    least_z: float = 8.0
    far_z: float = 12.0
    burn_in: int = BURN_IN
    each_layer: bool = False

    @property
    def lookback(self) -> Span:
        """The longest window the rule looks back over."""
        return longest((*(test.window for test in self.calm), Span(steps=LOSS_WINDOW)))

    def evaluate(self, history: History, step: int) -> Verdict:
        """Judge the newest measured record; nothing without a loss or before enough samples."""
        if not history.fresh or step - history.start < self.burn_in:
            return {}
        z = _sureness(history)
        growths = [history.growth(test) for test in self.calm]
        if z is None or not any(growth.armed_L.any() for growth in growths):
            return {}
        if z < self.least_z or self._stirred(history, growths):
            return {None: None}
        return {
            None: Finding(
                severity=Severity.WARNING if z >= self.far_z else Severity.INFO,
                statistic="loss",
                value=history.loss(within=LOSS_WINDOW).value,
                holds=STAYS,
                rests=RESTS,
            )
        }

    def explain(self, history: History, finding: Finding) -> Alert:
        """Say how far the loss went, and that attention is calm."""
        track = history.loss(within=LOSS_WINDOW)
        sure = _sureness(history)
        largest = float(np.nanmax(history.logits.newest))
        return announce(
            self.name,
            finding,
            history,
            message=(
                f"The loss is {track.excess or 0.0:.2g} above its best ({sure or 0.0:.2g} times "
                f"its usual waves) while attention is calm (largest logit {largest:.3g}, no "
                "layer's heads growing)."
            ),
            cause="Attention is not the cause as far as seen.",
            remedies=(LOOK_ELSEWHERE, FROM_CHECKPOINT),
        )

    def _stirred(self, history: History, growths: list[Growth]) -> bool:
        """Whether attention may have a part in it."""
        now_LH = growths[0].now_LH
        high_L = self.calm[0].enough(now_LH > self.high, np.isfinite(now_LH))
        return bool(high_L.any() or any(growth.grown_L.any() for growth in growths))


def _sureness(history: History) -> float | None:
    """The excess of the loss in units of its noise or of its slow waves, whichever is larger.

    Where both losses are given it is the lesser: a fixed evaluation batch has so little noise that
    it leaves its best behind in every long run, and a training loss alone meets bad batches.
    """
    tracks = [track for track in history.losses if track.excess is not None]
    return min((_excess(track) for track in tracks), default=None)


def _excess(track: LossTrack) -> float:
    excess = track.excess or 0.0
    return excess if math.isinf(excess) else excess / track.wander
