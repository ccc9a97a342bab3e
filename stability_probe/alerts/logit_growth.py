"""Logits grow in a layer's heads while the loss has stopped falling: a warning."""

from __future__ import annotations

from dataclasses import dataclass

from stability_probe.alerts.actions import growth_remedies
from stability_probe.alerts.cause import entropy_change, growth_cause, named_heads
from stability_probe.alerts.evidence import collect
from stability_probe.alerts.history import History
from stability_probe.alerts.rule import Finding, Verdict, announce
from stability_probe.alerts.staircase import (
    LOSS_WINDOW,
    WITH_LOSS_STAIRS,
    WITHOUT_LOSS_STAIRS,
    Climbed,
    Stair,
    climb,
)
from stability_probe.alerts.trend import BURN_IN, HOLDS, RESTS, trend_verdict
from stability_probe.detect.growth import Growth
from stability_probe.detect.span import Span, longest
from stability_probe.records import Alert, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitGrowth:
    """Heads of a layer have a largest logit that is high and has grown; the loss is not falling.

    Breadth decides: a quarter of the heads doubling within 40 steps is a warning by itself; less
    growth, fewer heads, or the slow growth of 200 steps and more warn once the loss is above its
    best; one head far up is info, because single heads at 1e5 to 1e12 hurt nothing in recorded
    runs. Small layers need two heads for breadth. The constants were found on 135 recorded runs
    of small transformers (2 to 4 layers, 4 to 8 heads); they are directions, not laws.

    Attributes:
        stairs: what is looked for, the worst first.
        without_loss: what is looked for while no loss is ever given: nothing then tells harmful
            growth from useful growth, so a quarter must double within 60 steps and pass 40.
        burn_in: steps of a phase before the rule judges.
    """

    name: str = "logit_growth"
    stairs: tuple[Stair, ...] = WITH_LOSS_STAIRS
    without_loss: tuple[Stair, ...] = WITHOUT_LOSS_STAIRS
    burn_in: int = BURN_IN
    each_layer: bool = False

    @property
    def lookback(self) -> Span:
        """The longest window the rule looks back over."""
        windows = [s.test.window for s in (*self.stairs, *self.without_loss)]
        return longest((*windows, Span(steps=LOSS_WINDOW)))

    def evaluate(self, history: History, step: int) -> Verdict:
        """Judge the newest measured record; nothing before enough samples and losses."""
        if not history.fresh or step - history.start < self.burn_in:
            return {}
        if (
            history.loss_given
            and history.loss(within=LOSS_WINDOW).past(step, within=LOSS_WINDOW) is None
        ):
            return {}
        climbed = self.climb(history)
        return trend_verdict(
            history,
            judged_L=climbed.judged_L,
            found_L=climbed.found_L,
            badness_L=climbed.badness_L,
            finding=lambda i: self._finding(history, climbed, i),
        )

    def climb(self, history: History) -> Climbed:
        """Where each layer stands."""
        track = history.loss(within=LOSS_WINDOW) if history.loss_given else None
        return climb(history, self._stairs(history), track)

    def explain(self, history: History, finding: Finding) -> Alert:
        """Name the heads, their entropy, the factor that grew, and what to do."""
        climbed = self.climb(history)
        row = history.names.index(finding.layer or "")
        growth = climbed.growth(history, self._stairs(history), row)
        found = collect(
            history, finding.layer or "", since=finding.since or 0, heads=growth.heads(row)
        )
        message = (
            f"Attention logits of {finding.layer} grew from {growth_text(history, growth, row)} "
            f"({named_heads(found.heads)}; {entropy_change(found)}) {self._loss_text(history)}."
        )
        if finding.severity is Severity.INFO:
            message += " A single head far above the others often hurts nothing."
        return announce(
            self.name,
            finding,
            history,
            message=message,
            heads=found.heads,
            cause=growth_cause(found),
            remedies=growth_remedies(found),
        )

    def _stairs(self, history: History) -> tuple[Stair, ...]:
        return self.stairs if history.loss_given else self.without_loss

    def _finding(self, history: History, climbed: Climbed, row: int) -> Finding:
        stairs = self._stairs(history)
        return growth_finding(
            history,
            stairs[climbed.stair_L[row]],
            row,
            severity=stairs[climbed.stair_L[row]].severity,
        )

    def _loss_text(self, history: History) -> str:
        if not history.loss_given:
            return "and no loss is given to tell whether it hurts"
        track = history.loss(within=LOSS_WINDOW)
        then = track.past(history.step, within=LOSS_WINDOW)
        was = "" if then is None else f" (averaged {then:.3g} -> {track.value:.3g})"
        return f"while the loss has stopped falling{was}"


def growth_finding(history: History, stair: Stair, row: int, *, severity: Severity) -> Finding:
    """The finding that says a layer's growth."""
    growth = history.growth(stair.test)
    then, now = growth.ends(row)
    return Finding(
        severity=severity,
        layer=history.names[row],
        layer_index=history.indices[row],
        statistic=history.statistic(history.names[row]),
        value=now,
        limit=max(stair.test.level, stair.test.factor * then),
        since=growth.since(row),
        holds=HOLDS,
        rests=RESTS,
    )


def growth_text(history: History, growth: Growth, row: int) -> str:
    """From what to what a layer's logits grew, and in how many steps."""
    then, now = growth.ends(row)
    return f"{then:.3g} to {now:.3g} in {history.step - growth.since(row)} steps"
