"""No loss is given, so that no rule can tell harmful growth from useful growth."""

from __future__ import annotations

from dataclasses import dataclass

from stability_probe.alerts.actions import GIVE_LOSS
from stability_probe.alerts.history import History
from stability_probe.alerts.rule import Finding, Verdict, announce
from stability_probe.alerts.trend import BURN_IN
from stability_probe.detect.span import SHORT, Span
from stability_probe.records import Alert, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class LossMissing:
    """Says once that the rules work without a loss, and what that costs.

    Attributes:
        burn_in: steps of the run to wait for a loss.
    """

    name: str = "loss_missing"
    burn_in: int = BURN_IN
    each_layer: bool = False

    @property
    def lookback(self) -> Span:
        """The longest window the rule looks back over."""
        return SHORT

    def evaluate(self, history: History, step: int) -> Verdict:
        """Info once the burn-in is over without any loss; calm from the first loss on."""
        if history.loss_given:
            return {None: None}
        if step - history.first < self.burn_in:
            return {}
        return {None: Finding(severity=Severity.INFO, statistic="loss", since=history.first)}

    def explain(self, history: History, finding: Finding) -> Alert:
        """Say what no longer can be judged."""
        return announce(
            self.name,
            finding,
            history,
            message=(
                f"No loss was given in {history.step - history.first} steps: growing logits are "
                "warned of later, and only non-finite values and float16 overflow are critical."
            ),
            cause="probe.step() was called without loss and without eval_loss.",
            remedies=(GIVE_LOSS,),
        )
