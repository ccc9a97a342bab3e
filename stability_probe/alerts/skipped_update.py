"""Updates that the optimizer did not make, with their running count."""

from __future__ import annotations

from dataclasses import dataclass

from stability_probe.alerts.actions import GRAD_SCALER, UPDATE_CALLS
from stability_probe.alerts.history import History
from stability_probe.alerts.rule import Finding, Verdict, announce
from stability_probe.detect.span import SHORT, Span
from stability_probe.records import Alert, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedUpdate:
    """Info at the first of a row of skipped updates; the row ends after 50 steps without any.

    A GradScaler skips a few at the start and one now and then; what it costs is seen from the
    count, over the whole run so far. The console repeats it at the end.
    """

    name: str = "skipped_update"
    each_layer: bool = False

    @property
    def lookback(self) -> Span:
        """The longest window the rule looks back over."""
        return SHORT

    def evaluate(self, history: History, step: int) -> Verdict:
        """Judge the newest record; one that was skipped is a finding."""
        if not history.record.scalars.skipped:
            return {None: None}
        return {None: Finding(severity=Severity.INFO, value=float(history.updates.skips))}

    def explain(self, history: History, finding: Finding) -> Alert:
        """Say how many there were."""
        counted = "update" if history.updates.count == 1 else "updates"
        return announce(
            self.name,
            finding,
            history,
            message=(
                f"The update of step {history.step} was skipped: {history.updates.skips} of "
                f"{history.updates.count} {counted} skipped so far."
            ),
            cause="A scaled gradient was not finite, or optimizer.step() was not called.",
            remedies=(GRAD_SCALER, UPDATE_CALLS),
        )
