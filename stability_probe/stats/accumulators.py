"""What is kept of attention calls so that they merge exactly: maxima, minima, sums and the peak.

Shape suffix: H query heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from stability_probe.stats.catalogue import HISTOGRAM_BINS

INF = float("inf")

MAXIMA = (
    "largest",
    "raw_largest",
    "low",  # bounds on the largest score: -inf, +inf where they are not known
    "high",
    "lse",
    "top_weight",
    "product",  # |q.k| before the scale
    "keys",
    "q_norm",
    "k_norm",
    "fp16_scores",
)
MINIMA = ("smallest", "raw_smallest", "lse")
ROW_SUMS = (  # sums over the rows that count for means
    "entropy_rows",
    "entries",
    "entropy",
    "entropy_ratio",
    "trace",
    "gap",
)
FULL_ROW_SUMS = (
    "top_weight",
    "first",
    "deviation",
    "tied",
    "saturated",
    *(f"bin_{i}" for i in range(HISTOGRAM_BINS)),
)
TENSORS = ("q", "k", "v", "output")  # counted: values, and values that are not finite
SUMS = (
    *ROW_SUMS,
    *FULL_ROW_SUMS,
    *("rows", "masked_rows", "leaking", "product_rows", "unscaled", "scaled", "scores"),
    *("sink", "sink_rows"),
    *("q_norm", "q_rows", "k_norm", "k_rows", "input_square", "input_rows"),
    *(f"{name}_values" for name in TENSORS),
    *TENSORS,
    "masked_output",
)
PEAK = ("peak_logit", "peak_q_norm", "peak_k_norm", "peak_cosine", "scale")


@dataclass(frozen=True, slots=True, eq=False)
class Accumulators:
    """What calls of the same heads merge by.

    Where nothing was seen a maximum is -inf, a minimum +inf, a sum 0, a peak NaN.

    Attributes:
        maxima: [len(MAXIMA), H] float32.
        minima: [len(MINIMA), H] float32.
        sums: [len(SUMS), H] float64; float32 on devices that have no float64.
        peak: [len(PEAK), H] float32, kept together: of the call whose |peak_logit| is largest.
    """

    maxima: Tensor
    minima: Tensor
    sums: Tensor
    peak: Tensor


def pack(
    maxima: Mapping[str, Tensor],
    minima: Mapping[str, Tensor],
    sums: Mapping[str, Tensor],
    peak: Tensor,
) -> Accumulators:
    """Accumulators from values [H] by name; a name that is missing has seen nothing."""
    return Accumulators(
        _stack(MAXIMA, maxima, peak.new_full(peak.shape[1:], -INF)),
        _stack(MINIMA, minima, peak.new_full(peak.shape[1:], INF)),
        _stack(SUMS, sums, peak.new_zeros(peak.shape[1:], dtype=sum_dtype(peak.device))),
        peak,
    )


def sum_dtype(device: torch.device) -> torch.dtype:
    """In what sums are kept: float64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def merging(low_H: Tensor, high_H: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds on a maximum so that they merge by maximum: not known (NaN) is -inf, and +inf."""
    return (
        torch.nan_to_num(low_H, nan=-INF, posinf=INF, neginf=-INF),
        torch.nan_to_num(high_H, nan=INF, posinf=INF, neginf=-INF),
    )


def _stack(names: Sequence[str], values: Mapping[str, Tensor], absent: Tensor) -> Tensor:
    return torch.stack([values[n].to(absent.dtype) if n in values else absent for n in names])


def merge(a: Accumulators, b: Accumulators) -> Accumulators:
    """Two accumulators of the same heads, both full or both not, as one."""
    take_b = (b.peak[0].abs() > a.peak[0].abs()) | torch.isnan(a.peak[0])
    return Accumulators(
        torch.maximum(a.maxima, b.maxima),
        torch.minimum(a.minima, b.minima),
        a.sums + b.sums,
        torch.where(take_b, b.peak, a.peak),
    )


def concatenate(parts: Sequence[Accumulators]) -> Accumulators:
    """Many layers side by side along the heads axis, to be finished at once."""
    return Accumulators(
        *(torch.cat([getattr(part, f.name) for part in parts], -1) for f in fields(Accumulators))
    )
