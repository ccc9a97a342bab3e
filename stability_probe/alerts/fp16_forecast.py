"""Float16 scores are on their way to overflow: in about how many steps.

Shape suffixes: O layers in the newest record, L layers, H heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stability_probe.alerts.actions import FP32_LOGITS, SCALE_FIRST
from stability_probe.alerts.cause import named_heads
from stability_probe.alerts.fp16_overflow import FP16_MAX
from stability_probe.alerts.history import History
from stability_probe.alerts.rule import Finding, Verdict, announce
from stability_probe.alerts.trend import BURN_IN, HOLDS, RESTS
from stability_probe.detect.forecast import Slopes, log_slopes, steps_left
from stability_probe.detect.span import SHORT, Span
from stability_probe.records import Alert, Severity

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp16Forecast:
    """A layer that forms float16 scores would reach 65504 soon if its logits grow on as they do.

    Steps left are headroom / growth rate of the logarithm of a head's largest logit: q.k before
    the scale grows at the same rate. Only growth that is sure, two standard errors above zero,
    is extrapolated.

    Attributes:
        within: steps; farther overflows are not told.
        window: how far back the growth is fitted, at least.
        burn_in: steps of a phase before the rule judges.
    """

    name: str = "fp16_overflow_forecast"
    within: int = 500
    window: Span = SHORT
    burn_in: int = BURN_IN
    each_layer: bool = False

    @property
    def lookback(self) -> Span:
        """The longest window the rule looks back over."""
        return self.window

    def evaluate(self, history: History, step: int) -> Verdict:
        """Judge the layers of the newest record that form float16 scores."""
        if not history.fresh or step - history.start < self.burn_in:
            return {}
        real_O = (history.now("fp16_scores") == 1).any(axis=1)
        if not real_O.any():
            return {}
        left_OH = self._left(history)
        verdict: dict[str | None, Finding | None] = {}
        soonest_O = np.fmin.reduce(left_OH, axis=1, initial=np.inf)
        for i in np.flatnonzero(real_O)[np.argsort(soonest_O[real_O], kind="stable")].tolist():
            seen, left = history.record.observations[i], float(soonest_O[i])
            verdict[seen.layer] = None
            if 0 < left <= self.within:
                verdict[seen.layer] = Finding(
                    severity=Severity.WARNING,
                    layer=seen.layer,
                    layer_index=seen.layer_index,
                    statistic="fp16_headroom_log2",
                    value=float(np.nanmin(history.now("fp16_headroom_log2")[i])),
                    limit=0.0,
                    holds=HOLDS,
                    rests=RESTS,
                )
        return verdict

    def explain(self, history: History, finding: Finding) -> Alert:
        """Say in how many steps, with the interval, and for which heads."""
        layer = finding.layer or ""
        place = [o.layer for o in history.record.observations].index(layer)
        left_H = self._left(history)[place]
        head = int(np.nanargmin(left_H))
        slopes = self._slopes(history)
        column = history.names.index(layer) * history.width + head
        distance = _distance(history)[place, head]
        low, high = (steps_left(distance, s[column]) for s in (slopes.high, slopes.low))
        heads = tuple(np.flatnonzero(left_H <= self.within).tolist())
        return announce(
            self.name,
            finding,
            history,
            message=(
                f"The largest q.k of {layer} ({named_heads(heads)}) reaches {FP16_MAX:.0f}, the "
                f"largest float16, in about {left_H[head]:.0f} steps ({low:.0f} to {high:.0f}) if "
                "it grows on as it does, and this run forms float16 scores."
            ),
            heads=heads,
            cause="The logits grow at a steady rate.",
            remedies=(FP32_LOGITS, SCALE_FIRST),
        )

    def _slopes(self, history: History) -> Slopes:
        near = history.logits.near
        first = int(np.searchsorted(near.steps, history.step - self.window.steps))
        first = max(min(first, len(near.steps) - self.window.samples), 0)
        return log_slopes(near.steps[first:], near.raw[first:])

    def _left(self, history: History) -> Float64:
        """Steps until each head's overflow, [O, H]; infinite where its growth is not sure."""
        slopes = self._slopes(history)
        rows_O = [history.names.index(o.layer) for o in history.record.observations]
        sure_C = np.where(slopes.low > 0, slopes.middle, np.nan)
        distance_OH = _distance(history)
        left_OH = distance_OH / history.by_head(sure_C)[rows_O, : distance_OH.shape[1]]
        return np.where(np.isfinite(left_OH), left_OH, np.inf)


def _distance(history: History) -> Float64:
    """The natural logarithm of how many times q.k may still grow, [O, H]."""
    return math.log(2.0) * history.now("fp16_headroom_log2")
