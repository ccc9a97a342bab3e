"""Logits grow through a whole layer while the loss has stopped falling: a warning."""

from __future__ import annotations

from dataclasses import dataclass

from stability_probe.alerts.actions import growth_remedies
from stability_probe.alerts.cause import entropy_change, growth_cause, named_heads
from stability_probe.alerts.evidence import collect
from stability_probe.alerts.history import History
from stability_probe.alerts.rule import Finding, Verdict, announce
from stability_probe.alerts.trend import BURN_IN, trend_verdict
from stability_probe.detect.growth import SHORT_GROWTH, GrowthTest
from stability_probe.detect.series import Span, longest
from stability_probe.records import Alert, Severity

WITHOUT_LOSS = GrowthTest(level=40.0, factor=2.0, window=Span(steps=60))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitGrowth:
    """A layer's median-over-heads largest logit is high and has grown; the loss is not falling.

    The constants were found on 135 recorded runs of small transformers (2 to 4 layers, 4 to 8
    heads, up to 1200 steps); they are directions, not laws. A runaway of few heads among many
    does not move the median and is not seen. Not measured: growth slower than the window.

    Attributes:
        growth: level 30 and 1.5 times within 40 steps.
        without_loss: the stricter test while no loss is ever given: level 40 and twice within
            60 steps, because nothing then tells harmful growth from useful growth.
        loss_drop: the share by which a falling loss falls within `loss_window`.
        loss_window: steps over which the loss is judged.
        burn_in: steps of a phase before the rule judges.
    """

    name: str = "logit_growth"
    growth: GrowthTest = SHORT_GROWTH
    without_loss: GrowthTest = WITHOUT_LOSS
    loss_drop: float = 0.05
    loss_window: int = 40
    burn_in: int = BURN_IN
    each_layer: bool = False

    @property
    def lookback(self) -> Span:
        """The longest window the rule looks back over."""
        return longest((self.growth.window, self.without_loss.window, Span(steps=self.loss_window)))

    def evaluate(self, history: History, step: int) -> Verdict:
        """Judge the newest measured record; nothing before enough samples and losses."""
        if not history.fresh or step - history.start < self.burn_in:
            return {}
        falling = self.loss_falling(history)
        if falling is None:
            return {}
        test = self._test(history)
        growth = history.growth(test)
        return trend_verdict(
            history,
            judged_L=growth.armed_L,
            found_L=growth.grown_L & (not falling),
            badness_L=growth.now_L,
            finding=lambda i: Finding(
                severity=Severity.WARNING,
                layer=history.names[i],
                layer_index=history.indices[i],
                statistic=history.statistic(history.names[i]),
                value=float(growth.now_L[i]),
                limit=float(max(test.level, test.factor * growth.then_L[i])),
                since=int(growth.since_L[i]),
            ),
        )

    def explain(self, history: History, finding: Finding) -> Alert:
        """Name the heads, their entropy, the factor that grew, and what to do."""
        test = self._test(history)
        found = collect(history, finding.layer or "", since=finding.since or 0, factor=test.factor)
        message = (
            f"Attention logits of {finding.layer} grew from {growth_text(history, finding, test)} "
            f"({named_heads(found.heads)}; {entropy_change(found)}) {self._loss_text(history)}."
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

    def _test(self, history: History) -> GrowthTest:
        return self.growth if history.loss_given else self.without_loss

    def loss_falling(self, history: History) -> bool | None:
        """Whether the loss is still falling; None while it does not reach back far enough."""
        if not history.loss_given:
            return False
        track = history.loss(within=self.loss_window)
        return track.falling(history.step, within=self.loss_window, drop=self.loss_drop)

    def _loss_text(self, history: History) -> str:
        if not history.loss_given:
            return "and no loss is given to tell whether it hurts"
        track = history.loss(within=self.loss_window)
        then = track.past(history.step, within=self.loss_window)
        was = "" if then is None else f" (averaged {then:.3g} -> {track.value:.3g})"
        return f"while the loss has stopped falling{was}"


def growth_text(history: History, finding: Finding, test: GrowthTest) -> str:
    """From what to what a layer's logits grew, and in how many steps."""
    growth = history.growth(test)
    then = growth.then_L[history.names.index(finding.layer or "")]
    steps = history.step - (finding.since or 0)
    return f"{then:.3g} to {finding.value:.3g} in {steps} steps"
