"""Logits grow through a whole layer and the loss is above its best: critical."""

from __future__ import annotations

from dataclasses import dataclass

from stability_probe.alerts.actions import FROM_CHECKPOINT, growth_remedies
from stability_probe.alerts.cause import entropy_change, growth_cause, named_heads
from stability_probe.alerts.evidence import collect
from stability_probe.alerts.history import History
from stability_probe.alerts.logit_growth import growth_text
from stability_probe.alerts.rule import Finding, Verdict, announce
from stability_probe.alerts.trend import BURN_IN, trend_verdict
from stability_probe.detect.growth import SHORT_GROWTH, GrowthTest
from stability_probe.detect.series import Span, longest
from stability_probe.records import Alert, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionDivergence:
    """The growth of `LogitGrowth`, and the averaged loss has left its best behind.

    Without any loss it judges nothing: growth alone is no divergence. The loss of a fixed
    evaluation batch is used instead of the training loss where the run gives one.

    Attributes:
        growth: level 30 and 1.5 times within 40 steps.
        loss_margin: how far above its best the averaged loss must be, in the loss's unit. 0.1
            nat was found on small runs whose losses end between 0.2 and 2.5 nats; a loss of
            another size or unit needs another margin.
        loss_window: steps that the evaluation loss must reach back before it is used.
        burn_in: steps of a phase before the rule judges.
    """

    name: str = "attention_divergence"
    growth: GrowthTest = SHORT_GROWTH
    loss_margin: float = 0.1
    loss_window: int = 40
    burn_in: int = BURN_IN
    each_layer: bool = False

    @property
    def lookback(self) -> Span:
        """The longest window the rule looks back over."""
        return longest((self.growth.window, Span(steps=self.loss_window)))

    def evaluate(self, history: History, step: int) -> Verdict:
        """Judge the newest measured record; nothing before enough samples or without a loss."""
        if not history.fresh or step - history.start < self.burn_in:
            return {}
        excess = history.loss(within=self.loss_window).excess
        if excess is None:
            return {}
        growth = history.growth(self.growth)
        return trend_verdict(
            history,
            judged_L=growth.armed_L,
            found_L=growth.grown_L & (excess > self.loss_margin),
            badness_L=growth.now_L,
            finding=lambda i: Finding(
                severity=Severity.CRITICAL,
                layer=history.names[i],
                layer_index=history.indices[i],
                statistic=history.statistic(history.names[i]),
                value=float(growth.now_L[i]),
                limit=float(max(self.growth.level, self.growth.factor * growth.then_L[i])),
                since=int(growth.since_L[i]),
            ),
        )

    def explain(self, history: History, finding: Finding) -> Alert:
        """Name the heads, their entropy, the factor that grew, and what to do."""
        layer, since = finding.layer or "", finding.since or 0
        found = collect(history, layer, since=since, factor=self.growth.factor)
        excess = history.loss(within=self.loss_window).excess or 0.0
        message = (
            f"The loss is {excess:.2g} above its best and attention is the likely cause: logits "
            f"of {layer} grew from {growth_text(history, finding, self.growth)} "
            f"({named_heads(found.heads)}; {entropy_change(found)})."
        )
        return announce(
            self.name,
            finding,
            history,
            message=message,
            heads=found.heads,
            cause=growth_cause(found),
            remedies=(FROM_CHECKPOINT, *growth_remedies(found)),
        )
