"""Logits grow in many heads and the loss is far above its best: critical."""

from __future__ import annotations

from dataclasses import dataclass

from stability_probe.alerts.actions import FROM_CHECKPOINT, growth_remedies
from stability_probe.alerts.cause import entropy_change, growth_cause, named_heads
from stability_probe.alerts.evidence import collect
from stability_probe.alerts.history import History
from stability_probe.alerts.logit_growth import growth_finding, growth_text
from stability_probe.alerts.rule import Finding, Verdict, announce
from stability_probe.alerts.staircase import (
    A_QUARTER,
    A_TENTH_TWICE,
    LOSS_WINDOW,
    SLOWLY,
    Stair,
    climb,
)
from stability_probe.alerts.trend import BURN_IN, trend_verdict
from stability_probe.detect.span import Span, longest
from stability_probe.records import Alert, Severity

CRITICAL_Z = 3.0
STAIRS = tuple(
    Stair(test=test, severity=Severity.CRITICAL, least_z=CRITICAL_Z)
    for test in (A_QUARTER, A_TENTH_TWICE, SLOWLY)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionDivergence:
    """The broad growth of `LogitGrowth`, and the averaged loss has left its best behind.

    How far is counted in standard deviations of the averaged loss, never in nats: the noise of
    the loss, of any size and unit, sets the margin. Without any loss it judges nothing: growth
    alone is no divergence. The loss of a fixed evaluation batch is used instead of the training
    loss where the run gives one.

    Attributes:
        stairs: the breadths of growth, and the z that the loss must reach beside them.
        burn_in: steps of a phase before the rule judges.
    """

    name: str = "attention_divergence"
    stairs: tuple[Stair, ...] = STAIRS
    burn_in: int = BURN_IN
    each_layer: bool = False

    @property
    def lookback(self) -> Span:
        """The longest window the rule looks back over."""
        return longest((*(s.test.window for s in self.stairs), Span(steps=LOSS_WINDOW)))

    def evaluate(self, history: History, step: int) -> Verdict:
        """Judge the newest measured record; nothing before enough samples or without a loss."""
        if not history.fresh or step - history.start < self.burn_in:
            return {}
        track = history.loss(within=LOSS_WINDOW)
        if track.z is None:
            return {}
        climbed = climb(history, self.stairs, track)
        return trend_verdict(
            history,
            judged_L=climbed.judged_L,
            found_L=climbed.found_L,
            badness_L=climbed.badness_L,
            finding=lambda i: growth_finding(
                history, self.stairs[climbed.stair_L[i]], i, severity=Severity.CRITICAL
            ),
        )

    def explain(self, history: History, finding: Finding) -> Alert:
        """Name the heads, their entropy, the factor that grew, and what to do."""
        layer, track = finding.layer or "", history.loss(within=LOSS_WINDOW)
        row = history.names.index(layer)
        growth = climb(history, self.stairs, track).growth(history, self.stairs, row)
        found = collect(history, layer, since=finding.since or 0, heads=growth.heads(row))
        message = (
            f"The loss is {track.excess or 0.0:.2g} above its best ({track.z or 0.0:.2g} times its "
            f"noise) and attention is the likely cause: logits of {layer} grew from "
            f"{growth_text(history, growth, row)} ({named_heads(found.heads)}; "
            f"{entropy_change(found)})."
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
