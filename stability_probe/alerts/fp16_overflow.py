"""The product q.k comes near the end of float16, or would if the run used float16.

Shape suffixes: O layers in the newest record, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stability_probe.alerts.actions import FP32_LOGITS, SCALE_FIRST, growth_remedies
from stability_probe.alerts.cause import entropy_change, growth_cause, named_heads
from stability_probe.alerts.evidence import collect
from stability_probe.alerts.history import History
from stability_probe.alerts.rule import Finding, Verdict, announce
from stability_probe.detect.growth import SHORT_GROWTH, GrowthTest
from stability_probe.detect.span import Span
from stability_probe.records import Alert, Observation, Severity

FP16_MAX = 65504.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp16Overflow:
    """The headroom of float16 scores, log2(65504 / largest |q.k|), is small or gone.

    Where the run itself forms float16 scores this is a hard event, from the first step on: on
    recorded runs |q.k| > 65504 / 4 came 332 to 1637 steps before the first NaN. Where a fused
    kernel accumulates in float32 nothing overflows, and it is info: readiness for float16.

    Attributes:
        warning_headroom: in powers of two; 2 is |q.k| > 65504 / 4.
        critical_headroom: 0 is |q.k| > 65504.
        window: how far back the cause is looked for.
    """

    name: str = "fp16_overflow"
    warning_headroom: float = 2.0
    critical_headroom: float = 0.0
    window: GrowthTest = SHORT_GROWTH
    each_layer: bool = True

    @property
    def lookback(self) -> Span:
        """The longest window the rule looks back over."""
        return self.window.window

    def evaluate(self, history: History, step: int) -> Verdict:
        """Judge the layers of the newest record that have a headroom, the least one first."""
        if not history.fresh:
            return {}
        layers = history.record.observations
        headroom_OH = history.now("fp16_headroom_log2")
        missing_OH = np.isnan(headroom_OH)
        known_O = ~missing_OH.all(axis=1)
        least_O = np.where(missing_OH, np.inf, headroom_OH).min(axis=1)
        calm: dict[str | None, Finding | None] = dict.fromkeys(
            [layers[i].layer for i in np.flatnonzero(known_O).tolist()]
        )
        small = np.flatnonzero(known_O & (least_O <= self._highest_limit()))
        if not small.size:
            return calm
        real_O = (history.now("fp16_scores") == 1).any(axis=1)
        found: dict[str | None, Finding | None] = {}
        for i in sorted(small, key=lambda i: (float(least_O[i]), layers[i].layer_index)):
            finding = self._finding(layers[i], float(least_O[i]), real=bool(real_O[i]))
            if finding:
                found[finding.layer] = finding
        return found | {name: None for name in calm if name not in found}

    def explain(self, history: History, finding: Finding) -> Alert:
        """Say how near the end is, whether it is real, and what made q.k so large."""
        layer = finding.layer or ""
        heads = self._heads(history, finding)
        since = history.window_start(layer, self.window)
        seen = collect(history, layer, since=since, heads=heads)
        times = 2.0 ** -(finding.value or 0.0)
        where = f"the largest q.k of {layer} ({named_heads(heads)}; {entropy_change(seen)})"
        if finding.severity is Severity.INFO:
            message = (
                f"Float16 readiness, potential only: {where} is {times:.3g} times the largest "
                "float16; the run does not form its scores in float16, so nothing overflows."
            )
        else:
            message = (
                f"This run forms float16 scores and {where} is {times:.2g} times the largest "
                f"float16 ({FP16_MAX:.0f})."
            )
        return announce(
            self.name,
            finding,
            history,
            message=message,
            heads=heads,
            cause=growth_cause(seen),
            remedies=(FP32_LOGITS, SCALE_FIRST, *growth_remedies(seen)),
        )

    def _highest_limit(self) -> float:
        return max(self.warning_headroom, self.critical_headroom)

    def _finding(self, seen: Observation, headroom: float, *, real: bool) -> Finding | None:
        """What a layer's least headroom means, given whether an overflow would be real."""
        limit = self._highest_limit() if real else self.critical_headroom
        if headroom > limit:
            return None
        severity = Severity.CRITICAL if headroom <= self.critical_headroom else Severity.WARNING
        return Finding(
            severity=severity if real else Severity.INFO,
            layer=seen.layer,
            layer_index=seen.layer_index,
            statistic="fp16_headroom_log2",
            value=headroom,
            limit=limit,
        )

    def _heads(self, history: History, finding: Finding) -> tuple[int, ...]:
        layers = [o.layer for o in history.record.observations]
        headroom_H: npt.NDArray[np.float64] = history.now("fp16_headroom_log2")[
            layers.index(finding.layer or "")
        ]
        return tuple(int(h) for h in np.flatnonzero(headroom_H <= (finding.limit or 0.0)))
