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
        heads: heads whose own largest logit grew by the factor; all where none did.
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


def collect(history: History, layer: str, *, since: int, factor: float) -> Evidence:
    """Gather the evidence for a layer between the step `since` and the newest one."""
    ends = (since, history.step)
    statistic = history.statistic(layer) or ""
    logits = _both_ends(history, layer, statistic, ends)
    if logits is None:
        return Evidence((), None, None, {}, None)
    then_H, now_H = logits
    with np.errstate(invalid="ignore"):
        grown_H = now_H >= factor * np.maximum(then_H, 0.0)
    heads_H = np.flatnonzero(grown_H if grown_H.any() else np.ones(len(now_H), dtype=bool))
    entropies = _both_ends(history, layer, "entropy_ratio", ends)
    return Evidence(
        heads=tuple(int(h) for h in heads_H),
        logit=_medians(logits, heads_H),
        entropy_ratio=_medians(entropies, heads_H),
        factors=_factors(history, layer, statistic, ends, heads_H),
        input_growth=_input_growth(history, layer, ends),
    )


def _both_ends(
    history: History, layer: str, statistic: str, ends: tuple[int, int], *, smooth: bool = True
) -> tuple[Float64, Float64] | None:
    """A statistic per head at both ends; None where either is missing."""
    then_H, now_H = (history.heads(layer, statistic, step=end, smooth=smooth) for end in ends)
    return (then_H, now_H) if 0 < len(then_H) == len(now_H) else None


def _medians(
    pair: tuple[Float64, Float64] | None, heads_H: npt.NDArray[np.intp]
) -> tuple[float, float] | None:
    if pair is None or len(pair[0]) <= heads_H.max(initial=0):
        return None
    then, now = (float(row_medians(values_H[None, heads_H])[0]) for values_H in pair)
    return (then, now) if np.isfinite([then, now]).all() else None


def _factors(
    history: History,
    layer: str,
    statistic: str,
    ends: tuple[int, int],
    heads_H: npt.NDArray[np.intp],
) -> dict[str, float]:
    """The split at the largest pair where that was recorded, else by the largest norms.

    The peak's factors belong to one pair of one sample, so they are not smoothed.
    """
    peak = _split(history, layer, PEAK_FACTORS, ends, heads_H, smooth=False)
    if peak:
        return peak
    norms = _split(history, layer, {"logit": statistic, **NORM_FACTORS}, ends, heads_H, smooth=True)
    if not norms:
        return {}
    logit = norms.pop("logit")
    return {**norms, "the rest": logit / float(np.prod(list(norms.values())))}


def _split(
    history: History,
    layer: str,
    statistics: dict[str, str],
    ends: tuple[int, int],
    heads_H: npt.NDArray[np.intp],
    *,
    smooth: bool,
) -> dict[str, float]:
    pairs = {n: _both_ends(history, layer, n, ends, smooth=smooth) for n in statistics.values()}
    then, now = (
        {n: p[end][heads_H] for n, p in pairs.items() if p and len(p[end]) > heads_H.max()}
        for end in (0, 1)
    )
    return growth_factors(then, now, statistics=statistics)


def _input_growth(history: History, layer: str, ends: tuple[int, int]) -> float | None:
    pair = _both_ends(history, layer, "input_rms", ends)
    if pair is None:
        return None
    grown = growth_factors(
        {"input_rms": pair[0]}, {"input_rms": pair[1]}, statistics={"input": "input_rms"}
    )
    return grown.get("input")
