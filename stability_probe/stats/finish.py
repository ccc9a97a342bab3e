"""From accumulators to the statistics of the catalogue."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stability_probe.stats.accumulators import (
    INF,
    MAXIMA,
    MINIMA,
    PEAK,
    SUMS,
    TENSORS,
    Accumulators,
)
from stability_probe.stats.catalogue import DEFAULT_SET, EXACT_SET, HISTOGRAM_BINS
from stability_probe.stats.precision import FLOAT16_MAX

_NAN = float("nan")
_CAUSES = ("q", "k", "scores", "v", "output")  # the earliest first


def finish(acc: Accumulators, *, full: bool) -> dict[str, Tensor]:
    """The statistics by name, in the catalogue's order.

    Args:
        acc: of one layer, or of many side by side.
        full: all that the catalogue says of whole calls, else its default set. Say what
            `accumulate` was told.

    Returns:
        float32 [heads] on the accumulators' device; `entropy_hist` is [heads, 16]. NaN where
        there was nothing to take the statistic of.
    """
    maxima = dict(zip(MAXIMA, torch.where(acc.maxima == -INF, _NAN, acc.maxima), strict=True))
    minima = dict(zip(MINIMA, torch.where(acc.minima == INF, _NAN, acc.minima), strict=True))
    sums = dict(zip(SUMS, acc.sums, strict=True))
    values = _default(maxima, minima, sums)
    if full:
        values |= _more(maxima, minima, sums) | dict(zip(PEAK, acc.peak, strict=True))
    names = EXACT_SET if full else DEFAULT_SET
    return {name: values[name].to(torch.float32) for name in names}


def _default(
    maxima: dict[str, Tensor], minima: dict[str, Tensor], sums: dict[str, Tensor]
) -> dict[str, Tensor]:
    rows = sums["entropy_rows"]
    # a product of 0 has no logarithm; the smallest normal float32 stands in for it
    product = maxima["product"].clamp_min(torch.finfo(torch.float32).tiny)
    return {
        "qk_abs_max_logit": torch.maximum(maxima["raw_largest"], -minima["raw_smallest"]),
        "abs_max_logit": torch.maximum(maxima["largest"], -minima["smallest"]),
        "max_logit_low": maxima["low"],
        "max_logit_high": torch.where(maxima["high"] == INF, _NAN, maxima["high"]),
        "logit_gap": sums["gap"] / rows,
        "entropy": sums["entropy"] / rows,
        "entropy_ratio": sums["entropy_ratio"] / rows,
        "softmax_slope": sums["trace"] / sums["entries"],
        "jacobian_trace": sums["trace"] / rows,
        "q_norm_max": maxima["q_norm"],
        "k_norm_max": maxima["k_norm"],
        "fp16_headroom_log2": math.log2(FLOAT16_MAX) - torch.log2(product),
        "fp16_scores": maxima["fp16_scores"],
        "nonfinite": _first_cause(sums),
    }


def _more(
    maxima: dict[str, Tensor], minima: dict[str, Tensor], sums: dict[str, Tensor]
) -> dict[str, Tensor]:
    rows = sums["entropy_rows"]
    formed = sums["product_rows"] > 0
    return {
        "max_logit": maxima["largest"],
        "min_logit": minima["smallest"],
        "lse_max": maxima["lse"],
        "lse_min": minima["lse"],
        "logit_std": sums["deviation"] / rows,
        "entropy_hist": torch.stack([sums[f"bin_{i}"] for i in range(HISTOGRAM_BINS)], -1),
        "top_weight": sums["top_weight"] / rows,
        "top_weight_max": maxima["top_weight"],
        "first_key_mass": sums["first"] / rows,
        "sink_mass": sums["sink"] / sums["sink_rows"],
        "tied_max_rows": sums["tied"] / rows,
        "saturated_rows": sums["saturated"] / rows,
        "q_norm_mean": sums["q_norm"] / sums["q_rows"],
        "k_norm_mean": sums["k_norm"] / sums["k_rows"],
        "input_rms": (sums["input_square"] / sums["input_rows"]).sqrt(),
        "fp16_overflow_unscaled": torch.where(formed, sums["unscaled"], _NAN),
        "fp16_overflow_scaled": sums["scaled"],
        "nonfinite_scores": sums["scores"],
        **{f"nonfinite_{name}": _present(sums, name) for name in TENSORS},
        "nonfinite_masked_output": torch.where(
            sums["output_values"] > 0, sums["masked_output"], _NAN
        ),
        "masked_rows": sums["masked_rows"],
        "mask_leak": sums["leaking"],
        "rows": sums["rows"],
        "entropy_rows": rows,
        "keys": maxima["keys"],
    }


def _present(sums: dict[str, Tensor], name: str) -> Tensor:
    return torch.where(sums[f"{name}_values"] > 0, sums[name], _NAN)


def _first_cause(sums: dict[str, Tensor]) -> Tensor:
    """The count of the earliest cause that has one."""
    total = torch.zeros_like(sums["rows"])
    for name in reversed(_CAUSES):
        total = torch.where(sums[name] > 0, sums[name], total)
    return total
