"""Rules about heads that look at one key alone or at all keys alike.

Either end is common in healthy models: previous-token heads and sinks sit at an entropy of 0,
unused heads at ln n. So these are info; saturation warns while the loss is above its best too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stability_probe.alerts.actions import (
    CHECK_SCALE,
    HALF_NORMS,
    LOWER_RATE,
    QK_NORM,
    RAISE_SIGNAL,
)
from stability_probe.alerts.cause import named_heads
from stability_probe.alerts.extremes import SATURATED, UNIFORM, Extreme, extreme
from stability_probe.alerts.history import History
from stability_probe.alerts.rule import Finding, Verdict, announce
from stability_probe.alerts.staircase import LOSS_WINDOW
from stability_probe.alerts.trend import BURN_IN, HOLDS, RESTS, trend_verdict
from stability_probe.detect.limit import Limit
from stability_probe.detect.span import SHORT, Span
from stability_probe.records import Alert, Severity

HURT = 3.0  # standard deviations above its best at which the loss says that it matters


@dataclass(frozen=True, slots=True, kw_only=True)
class _Extreme:
    """Half of a layer's heads came to one end of the entropy within a window.

    Attributes:
        limit: the end, with hysteresis.
        away: the entropy ratio that such a head had at the start of the window, or farther off.
        share: of a layer's heads.
        hurt: z of the loss from which on it is a warning; None: never.
        burn_in: steps of a phase before the rule judges.
    """

    limit: Limit
    away: float
    name: str
    share: float = 0.5
    hurt: float | None = HURT
    burn_in: int = BURN_IN
    each_layer: bool = False

    @property
    def lookback(self) -> Span:
        """The longest window the rule looks back over."""
        return SHORT

    def evaluate(self, history: History, step: int) -> Verdict:
        """Judge the newest measured record; layers without entropy are not judged."""
        if not history.fresh or step - history.start < self.burn_in:
            return {}
        seen = extreme(history, self.limit, away=self.away)
        z = history.loss(within=LOSS_WINDOW).z or 0.0
        hurt = self.hurt is not None and z >= self.hurt
        severity = Severity.WARNING if hurt else Severity.INFO
        return trend_verdict(
            history,
            judged_L=np.asarray(seen.known_LH.any(axis=1)),
            found_L=seen.broad(seen.came_LH, self.share),
            badness_L=np.count_nonzero(seen.came_LH, axis=1).astype(np.float64),
            finding=lambda i: _finding(history, self, seen, i, severity),
        )

    def heads(self, history: History, finding: Finding) -> tuple[int, ...]:
        """The heads that came to the end."""
        seen = extreme(history, self.limit, away=self.away)
        return tuple(np.flatnonzero(seen.came_LH[history.names.index(finding.layer or "")]))


def _finding(
    history: History, rule: _Extreme, seen: Extreme, row: int, severity: Severity
) -> Finding:
    return Finding(
        severity=severity,
        layer=history.names[row],
        layer_index=history.indices[row],
        statistic="entropy_ratio",
        value=float(np.median(seen.now_LH[row][seen.came_LH[row]])),
        limit=rule.limit.enter,
        holds=HOLDS,
        rests=RESTS,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxSaturation(_Extreme):
    """Half of a layer's heads have come to look at one key alone: no gradient passes them.

    The softmax Jacobian of a one-hot row is zero (Zhai et al. 2023, arXiv:2303.06296).
    """

    name: str = "softmax_saturation"
    limit: Limit = SATURATED
    away: float = 0.1

    def explain(self, history: History, finding: Finding) -> Alert:
        """Name the heads."""
        heads = self.heads(history, finding)
        return announce(
            self.name,
            finding,
            history,
            message=(
                f"Softmax is saturated in {named_heads(heads)} of {finding.layer}: entropy ratio "
                f"{finding.value:.2g}, where it was above {self.away:g}; little gradient reaches "
                "their queries and keys."
            ),
            heads=heads,
            cause="Rows have become one-hot.",
            remedies=(QK_NORM, LOWER_RATE),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionUniform(_Extreme):
    """Half of a layer's heads have come to look at all keys alike: they choose nothing any more.

    With q and k normalised in float16, a norm that overflows gives q = 0, logits 0 and exactly
    this, without any NaN. Info only: heads of healthy recorded runs come to it too.
    """

    name: str = "attention_uniform"
    limit: Limit = UNIFORM
    away: float = 0.9
    hurt: float | None = None

    def explain(self, history: History, finding: Finding) -> Alert:
        """Name the heads."""
        heads = self.heads(history, finding)
        return announce(
            self.name,
            finding,
            history,
            message=(
                f"Attention is uniform in {named_heads(heads)} of {finding.layer}: entropy ratio "
                f"{finding.value:.4g}, where it was below {self.away:g}."
            ),
            heads=heads,
            cause="Queries or keys have become zero or constant.",
            remedies=(HALF_NORMS, RAISE_SIGNAL),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SaturatedSinceStart:
    """Half of a layer's heads look at one key alone in the run's first samples.

    That is a constant of the design, such as a missing scale or a large initialisation, and no
    drift: it is told once, as info, and trend rules say nothing of it.

    Attributes:
        samples: how many of the run's first samples must all show it.
        within: steps in which they must lie.
        share: of a layer's heads.
    """

    name: str = "saturated_since_start"
    samples: int = 8
    within: int = 100
    share: float = 0.5
    each_layer: bool = False

    @property
    def lookback(self) -> Span:
        """The longest window the rule looks back over."""
        return SHORT

    def evaluate(self, history: History, step: int) -> Verdict:
        """Judge once, at the last of the first samples; what is found is never over."""
        near = history.entropy.near
        if not history.fresh or len(near.steps) != self.samples or history.start != history.first:
            return {}
        if step - history.first > self.within or near.steps[0] > history.first + self.within:
            return {}
        seen = extreme(history, SATURATED, away=1.0)
        always_LH = _always_saturated(history)
        return trend_verdict(
            history,
            judged_L=np.asarray(seen.known_LH.any(axis=1)),
            found_L=seen.broad(always_LH, self.share),
            badness_L=np.count_nonzero(always_LH, axis=1).astype(np.float64),
            finding=lambda i: Finding(
                severity=Severity.INFO,
                layer=history.names[i],
                layer_index=history.indices[i],
                statistic="entropy_ratio",
                value=float(np.median(seen.now_LH[i][always_LH[i]])),
                limit=SATURATED.leave,
                since=history.first,
            ),
        )

    def explain(self, history: History, finding: Finding) -> Alert:
        """Name the heads."""
        always_LH = _always_saturated(history)
        row = history.names.index(finding.layer or "")
        heads = tuple(np.flatnonzero(always_LH[row]).tolist())
        return announce(
            self.name,
            finding,
            history,
            message=(
                f"Softmax of {finding.layer} ({named_heads(heads)}) has been saturated since the "
                f"start: entropy ratio {finding.value:.2g} in each of the first {self.samples} "
                "samples. A constant of the design, not a drift."
            ),
            heads=heads,
            cause="The logits are large from the first step on.",
            remedies=(CHECK_SCALE, QK_NORM),
        )


def _always_saturated(history: History) -> npt.NDArray[np.bool_]:
    """Heads that were saturated in every sample so far, [L, H]."""
    below_NC = history.entropy.near.raw < SATURATED.leave
    return np.asarray(below_NC.all(axis=0)).reshape(-1, history.width)
