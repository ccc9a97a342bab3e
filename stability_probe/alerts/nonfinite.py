"""A value in attention that is not finite, forward or backward: told from the first step on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stability_probe.alerts import nonfinite_wording as words
from stability_probe.alerts.cause import entropy_change, named_heads
from stability_probe.alerts.evidence import collect
from stability_probe.alerts.history import History
from stability_probe.alerts.nonfinite_layers import BadLayer, bad_backward, bad_forward, count
from stability_probe.alerts.rule import Finding, Verdict, announce
from stability_probe.detect.growth import SHORT_GROWTH, GrowthTest
from stability_probe.detect.span import Span
from stability_probe.records import Alert, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """NaN or infinity in q, k, v, the visible scores, the output, or their gradients.

    From the `nonfinite` counts of measured steps and from the sentinel that watches the steps
    between (`StepScalars.first_bad`). There is no warm-up. Of several bad layers the first one
    of the earliest step is blamed, in the order of the pass; the others follow from it as a rule.

    Forward values are critical; output that rows without any visible key may explain is a
    warning, until it has reached the gradients of an update that was made. Gradients alone are
    info where the update was skipped (a loss scale being searched) and a warning where it was
    not reported so; where the loss itself is not finite they are left to `nonfinite_loss`.

    Attributes:
        window: how far back the entropy of the heads is compared.
    """

    name: str = "nonfinite"
    window: GrowthTest = SHORT_GROWTH
    each_layer: bool = True

    @property
    def lookback(self) -> Span:
        """The longest window the rule looks back over."""
        return self.window.window

    def evaluate(self, history: History, step: int) -> Verdict:
        """Judge every layer that was counted, and those that the sentinel names."""
        if not history.fresh and not history.updates.fresh_bad:
            return {}
        counted = count(history.record.observations, step)
        forward, backward = _bad(history)
        if forward:
            reached = any(not history.updates.was_skipped(bad.step) for bad in backward)
            findings = [_forward(bad, reached=reached) for bad in forward]
        else:
            findings = [_backward(history, bad) for bad in backward]
        found: dict[str | None, Finding | None] = {f.layer: f for f in findings}
        return {**found, **{layer: None for layer in counted if layer not in found}}

    def explain(self, history: History, finding: Finding) -> Alert:
        """Say which tensor, since when, where it came from, and which layers follow."""
        forward, backward = _bad(history)
        bad = forward or backward
        place = next(i for i, b in enumerate(bad) if b.layer == finding.layer)
        blamed, others = bad[place], bad[place + 1 :]
        if not forward:
            return announce(
                self.name,
                finding,
                history,
                message=words.backward_message(history, blamed, others),
                cause=words.backward_cause(history, blamed),
                remedies=words.backward_remedies(history, blamed),
            )
        since = history.window_start(blamed.layer, self.window)
        seen = collect(history, blamed.layer, since=since, heads=blamed.heads)
        about = f"{named_heads(blamed.heads)}; {entropy_change(seen)}"
        return announce(
            self.name,
            finding,
            history,
            message=words.forward_message(blamed, about, others),
            heads=blamed.heads,
            cause=words.forward_cause(history, blamed, reached=bool(backward)),
            remedies=words.forward_remedies(blamed),
        )


def _bad(history: History) -> tuple[list[BadLayer], list[BadLayer]]:
    """Layers whose forward is bad, and those whose gradients are, the first to blame first."""
    counted = count(history.record.observations, history.step)
    backward = bad_backward(history.updates.fresh_bad)
    loss = history.record.scalars.loss
    if backward and loss is not None and not math.isfinite(loss):
        first = backward[0]
        if first.tensors[0] == "grad_output" and first.step == history.step:
            backward = []  # the loss made them
    return bad_forward(counted, history.updates.fresh_bad), backward


def _forward(bad: BadLayer, *, reached: bool) -> Finding:
    mild = bad.explained and not reached
    return Finding(
        severity=Severity.WARNING if mild else Severity.CRITICAL,
        layer=bad.layer,
        layer_index=bad.layer_index,
        statistic="nonfinite",
        value=bad.count,
        limit=0.0,
        since=bad.step,
    )


def _backward(history: History, bad: BadLayer) -> Finding:
    skipped = history.updates.was_skipped(bad.step)
    return Finding(
        severity=Severity.INFO if skipped else Severity.WARNING,
        layer=bad.layer,
        layer_index=bad.layer_index,
        statistic="nonfinite",
        limit=0.0,
        since=bad.step,
    )
