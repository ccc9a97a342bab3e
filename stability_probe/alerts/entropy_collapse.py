"""The entropy of many heads falls while their logits grow: what users look for first.

Shape suffixes: L layers, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stability_probe.alerts.actions import growth_remedies
from stability_probe.alerts.cause import growth_cause, named_heads
from stability_probe.alerts.evidence import collect
from stability_probe.alerts.history import History
from stability_probe.alerts.logit_growth import LogitGrowth
from stability_probe.alerts.rule import Finding, Verdict, announce
from stability_probe.alerts.staircase import FALLING, LOSS_WINDOW
from stability_probe.alerts.trend import BURN_IN, HOLDS, RESTS, trend_verdict
from stability_probe.detect.growth import GrowthTest
from stability_probe.detect.median import row_medians
from stability_probe.detect.span import Span, longest
from stability_probe.records import Alert, Severity

Float64 = npt.NDArray[np.float64]

ABOVE_EARLY_LEARNING = GrowthTest(level=20.0, share=0.5)
GROWTH_RULE = LogitGrowth()


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyCollapse:
    """Half of a layer's heads lose entropy and have growing logits; the loss is not falling.

    Low entropy alone is no harm: healthy heads reach an entropy of 0.001, and entropy falls
    fast when useful heads form. So this is info, and a warning while `logit_growth` warns too.
    That falling entropy is the danger, Zhai et al. 2023, arXiv:2303.06296.

    Attributes:
        ratio: a head's entropy ratio ends at this share of its value at the window's start.
        growth: half of the heads, 1.5 times within 40 steps, above 20: early learning takes
            logits from 1 to 20 and lowers the entropy on its way. Its window is the entropy's.
        companion: the rule whose warning makes this a warning.
        burn_in: steps of a phase before the rule judges.
    """

    name: str = "entropy_collapse"
    ratio: float = 0.6
    growth: GrowthTest = ABOVE_EARLY_LEARNING
    companion: LogitGrowth = GROWTH_RULE
    burn_in: int = BURN_IN
    each_layer: bool = False

    @property
    def lookback(self) -> Span:
        """The longest window the rule looks back over."""
        return longest((self.growth.window, self.companion.lookback))

    def evaluate(self, history: History, step: int) -> Verdict:
        """Judge the newest measured record; layers without entropy are not judged."""
        if not history.fresh or step - history.start < self.burn_in:
            return {}
        track = history.loss(within=LOSS_WINDOW) if history.loss_given else None
        falling = track and track.falling(step, within=LOSS_WINDOW, least=FALLING)
        if track and falling is None:
            return {}
        growth = history.growth(self.growth)
        then_LH = history.by_head(history.entropy.reference(self.growth.window).value_C)
        now_LH = history.by_head(history.entropy.newest)
        known_LH = np.isfinite(now_LH) & np.isfinite(then_LH) & np.isfinite(growth.then_LH)
        fell_LH = known_LH & growth.grown_LH & (now_LH <= self.ratio * then_LH)
        found_L = self.growth.enough(fell_LH, known_LH) & (not falling)
        severity = self._severity(history, step) if found_L.any() else Severity.INFO
        return trend_verdict(
            history,
            judged_L=np.asarray(known_LH.any(axis=1)),
            found_L=found_L,
            badness_L=-_median(now_LH, fell_LH),
            finding=lambda i: Finding(
                severity=severity,
                layer=history.names[i],
                layer_index=history.indices[i],
                statistic="entropy_ratio",
                value=float(np.median(now_LH[i][fell_LH[i]])),
                limit=self.ratio * float(np.median(then_LH[i][fell_LH[i]])),
                since=growth.since(i),
                holds=HOLDS,
                rests=RESTS,
            ),
        )

    def _severity(self, history: History, step: int) -> Severity:
        companions = self.companion.evaluate(history, step).values()
        warned = any(f is not None and f.severity is not Severity.INFO for f in companions)
        return Severity.WARNING if warned else Severity.INFO

    def explain(self, history: History, finding: Finding) -> Alert:
        """Name the heads and the logits that drove their entropy down."""
        layer, since = finding.layer or "", finding.since or 0
        row = history.names.index(layer)
        heads = history.growth(self.growth).heads(row)
        found = collect(history, layer, since=since, heads=heads)
        then = (finding.limit or 0.0) / self.ratio
        then_logit, now_logit = found.logit or (np.nan, np.nan)
        message = (
            f"The entropy ratio of {layer} fell from {then:.2g} to {finding.value:.2g} in "
            f"{history.step - since} steps while the largest logits of its "
            f"{named_heads(found.heads)} grew from {then_logit:.3g} to {now_logit:.3g}."
        )
        return announce(
            self.name,
            finding,
            history,
            message=message,
            heads=found.heads,
            cause=growth_cause(found),
            remedies=growth_remedies(found),
        )


def _median(value_LH: Float64, chosen_LH: npt.NDArray[np.bool_]) -> Float64:
    """Median of the chosen heads of each layer, [L]; NaN where none is."""
    return row_medians(np.where(chosen_LH, value_LH, np.nan))
