"""The loss or the gradient norm is not finite although attention is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from stability_probe.alerts.actions import CLIP_GRADIENT, FROM_CHECKPOINT, GRAD_SCALER, SKIP_BATCH
from stability_probe.alerts.history import History
from stability_probe.alerts.nonfinite_layers import attention_is_finite
from stability_probe.alerts.rule import Finding, Verdict, announce
from stability_probe.detect.growth import SHORT_GROWTH, GrowthTest
from stability_probe.detect.span import Span
from stability_probe.records import Alert, Severity, StepScalars


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFiniteLoss:
    """A loss that is NaN or infinite is critical, with word of whether attention is calm.

    A gradient norm that is not finite is info where the update was skipped (a loss scale being
    searched) and a warning where it was not: the update may have put NaN into the weights.
    Steps at which attention itself is known to hold such values are left to `nonfinite`, and so
    is such a norm where a gradient of attention is known to be the cause.

    Attributes:
        growth: what counts as attention that is not calm.
    """

    name: str = "nonfinite_loss"
    growth: GrowthTest = SHORT_GROWTH
    each_layer: bool = False

    @property
    def lookback(self) -> Span:
        """The longest window the rule looks back over."""
        return self.growth.window

    def evaluate(self, history: History, step: int) -> Verdict:
        """Judge the newest record's scalars; nothing where neither number is given."""
        scalars = history.record.scalars
        statistic, value = _worst_scalar(scalars)
        if value is None:
            return {}
        if math.isfinite(value):
            return {None: None}
        if not attention_is_finite(history):
            return {}
        if statistic == "grad_norm" and history.updates.bad_gradient_at == step:
            return {}
        if statistic != "grad_norm":
            severity = Severity.CRITICAL
        else:
            severity = Severity.INFO if scalars.skipped else Severity.WARNING
        return {None: Finding(severity=severity, statistic=statistic, value=value)}

    def explain(self, history: History, finding: Finding) -> Alert:
        """Say what is not finite and whether attention has a part in it."""
        calm, state = self._attention(history)
        subject = {"loss": "loss", "eval_loss": "evaluation loss"}.get(
            finding.statistic or "", "gradient norm"
        )
        if finding.severity is Severity.INFO:
            ending = "the update was skipped, as GradScaler does while it searches its scale"
            remedies: tuple[str, ...] = (GRAD_SCALER,)
        elif finding.severity is Severity.WARNING:
            ending = f"the update was not reported as skipped; {state}"
            remedies = (CLIP_GRADIENT, FROM_CHECKPOINT)
        else:
            ending, remedies = state, (FROM_CHECKPOINT, SKIP_BATCH)
        return announce(
            self.name,
            finding,
            history,
            message=f"The {subject} is {finding.value} at step {history.step}: {ending}.",
            cause="Attention is not the cause as far as seen." if calm else "",
            remedies=remedies,
        )

    def _attention(self, history: History) -> tuple[bool, str]:
        """Whether attention was calm when last measured, and the words for it."""
        if history.measured is None:
            return False, "attention has not been measured yet"
        at = f"at step {history.measured.step}"
        growth = history.growth(self.growth)
        if growth.grown_L.any():
            worst = int(np.argmax(np.where(growth.grown_L, growth.largest, -np.inf)))
            then, now = growth.ends(worst)
            return False, (
                f"attention is not calm: logits of {history.names[worst]} grew from "
                f"{then:.3g} to {now:.3g} {at}"
            )
        if not np.isfinite(growth.now_LH).any():
            return True, f"attention is calm (all values finite {at})"
        largest = float(np.nanmax(growth.now_LH))
        return True, f"attention is calm (finite, largest logit {largest:.3g} {at})"


def _worst_scalar(scalars: StepScalars) -> tuple[str | None, float | None]:
    """The first of loss, evaluation loss and gradient norm that is not finite, else any given."""
    given = [
        (name, value)
        for name in ("loss", "eval_loss", "grad_norm")
        if (value := getattr(scalars, name)) is not None
    ]
    bad = [pair for pair in given if not math.isfinite(pair[1])]
    return next(iter(bad or given), (None, None))
