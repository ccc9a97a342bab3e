"""The entropy of a whole layer falls while its logits grow: what users look for first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stability_probe.alerts.actions import growth_remedies
from stability_probe.alerts.cause import growth_cause, named_heads
from stability_probe.alerts.evidence import collect
from stability_probe.alerts.history import History
from stability_probe.alerts.logit_growth import LogitGrowth
from stability_probe.alerts.rule import Finding, Verdict, announce
from stability_probe.alerts.trend import BURN_IN, trend_verdict
from stability_probe.detect.growth import GrowthTest
from stability_probe.detect.series import Span, longest
from stability_probe.records import Alert, Severity

ABOVE_EARLY_LEARNING = GrowthTest(level=20.0)
GROWTH_RULE = LogitGrowth()


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyCollapse:
    """A layer's median entropy ratio falls and its logits grow; the loss is not falling.

    Low entropy alone is no harm: healthy heads reach an entropy of 0.001, and entropy falls
    fast when useful heads form. So this is info, and a warning while `logit_growth` finds
    something too.

    Attributes:
        ratio: the entropy ratio ends at this share of its value at the window's start or lower.
        growth: 1.5 times within 40 steps, above 20: early learning takes logits from 1 to 20
            and lowers the entropy on its way. Its window is the entropy's window.
        companion: the rule whose finding makes this a warning, and whose loss gate applies.
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
        falling = self.companion.loss_falling(history)
        if falling is None:
            return {}
        growth = history.growth(self.growth)
        smooth_NL = history.entropy.smooth
        now_L, then_L = smooth_NL[-1], smooth_NL[growth.row_L, np.arange(len(growth.row_L))]
        judged_L = growth.armed_L & np.isfinite(now_L) & np.isfinite(then_L)
        found_L = judged_L & growth.grown_L & (now_L <= self.ratio * then_L) & (not falling)
        if not found_L.any():
            severity = Severity.INFO
        else:
            grown = any(self.companion.evaluate(history, step).values())
            severity = Severity.WARNING if grown else Severity.INFO
        return trend_verdict(
            history,
            judged_L=judged_L,
            found_L=found_L,
            badness_L=-now_L,
            finding=lambda i: Finding(
                severity=severity,
                layer=history.names[i],
                layer_index=history.indices[i],
                statistic="entropy_ratio",
                value=float(now_L[i]),
                limit=float(self.ratio * then_L[i]),
                since=int(growth.since_L[i]),
            ),
        )

    def explain(self, history: History, finding: Finding) -> Alert:
        """Name the heads and the logits that drove their entropy down."""
        layer, since = finding.layer or "", finding.since or 0
        found = collect(history, layer, since=since, factor=self.growth.factor)
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
