"""What an attention alert tells beside its number: which heads, their entropy, the cause.

Shape suffixes: H heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stability_probe.alerts.history import History
from stability_probe.detect.median import row_medians
from stability_probe.detect.split import NORM_FACTORS, PEAK_FACTORS, growth_factors

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Evidence:
    """The same heads of one layer at the two ends of a window.

    Attributes:
        heads: the heads looked at.
        logit: their median largest logit, then and now.
        entropy_ratio: their median H / ln n, then and now; None where it is absent.
        factors: growth of each factor of the logit; empty where norms were not recorded.
        input_growth: growth of the RMS of the layer's input; None where not recorded.
    """

    heads: tuple[int, ...]
    logit: tuple[float, float] | None
    entropy_ratio: tuple[float, float] | None
    factors: dict[str, float]
    input_growth: float | None


def collect(history: History, layer: str, *, since: int, heads: tuple[int, ...]) -> Evidence:
    """Gather the evidence for a layer between the step `since` and the newest one.

    Args:
        history: the run so far.
        layer: the layer's name.
        since: the step to compare with.
        heads: the heads to look at; all of the layer where none are given.
    """
    window = _Window(history, layer, (since, history.step))
    statistic = history.statistic(layer) or ""
    heads = heads or _all_heads(window.ends(statistic))
    inputs = window.growth({"input": "input_rms"}, heads=())
    return Evidence(
        heads=heads,
        logit=_medians(window.ends(statistic, heads=heads)),
        entropy_ratio=_medians(window.ends("entropy_ratio", heads=heads)),
        factors=_factors(window, statistic, heads),
        input_growth=inputs.get("input"),
    )


@dataclass(frozen=True, slots=True)
class _Window:
    """One layer between two steps."""

    history: History
    layer: str
    steps: tuple[int, int]

    def ends(
        self, statistic: str, *, heads: tuple[int, ...] = (), smooth: bool = True
    ) -> tuple[Float64, Float64] | None:
        """A statistic of some heads (none given: all) at both ends; None where one is missing."""
        then_H, now_H = (
            self.history.heads(self.layer, statistic, step=step, smooth=smooth)
            for step in self.steps
        )
        if not 0 < len(then_H) == len(now_H) or max(heads, default=0) >= len(now_H):
            return None
        chosen = list(heads or range(len(now_H)))
        return then_H[chosen], now_H[chosen]

    def growth(
        self, statistics: dict[str, str], *, heads: tuple[int, ...], smooth: bool = True
    ) -> dict[str, float]:
        """Growth of each factor over the window."""
        pairs = {n: self.ends(n, heads=heads, smooth=smooth) for n in statistics.values()}
        then, now = ({n: pair[end] for n, pair in pairs.items() if pair} for end in (0, 1))
        return growth_factors(then, now, statistics=statistics)


def _all_heads(logits: tuple[Float64, Float64] | None) -> tuple[int, ...]:
    """Every head of a layer; none where its logits are not known."""
    return () if logits is None else tuple(range(len(logits[0])))


def _medians(pair: tuple[Float64, Float64] | None) -> tuple[float, float] | None:
    """The median over heads at both ends; None where one is absent."""
    if pair is None:
        return None
    then, now = (float(row_medians(values_H[None])[0]) for values_H in pair)
    return (then, now) if np.isfinite([then, now]).all() else None


def _factors(window: _Window, statistic: str, heads: tuple[int, ...]) -> dict[str, float]:
    """The split at the largest pair where that was recorded, else by the largest norms.

    The peak's factors belong to one pair of one sample, so they are not smoothed.
    """
    peak = window.growth(PEAK_FACTORS, heads=heads, smooth=False)
    if peak:
        return peak
    norms = window.growth({"logit": statistic, **NORM_FACTORS}, heads=heads)
    if not norms:
        return {}
    logit = norms.pop("logit")
    return {**norms, "the rest": logit / float(np.prod(list(norms.values())))}
