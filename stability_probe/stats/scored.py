"""What a backend makes of the scores of one call: the part of its accumulators that needs them.

Shape suffixes: B batch, H query heads, Q query positions; N any number of values of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stability_probe.records import AttentionCall
from stability_probe.stats.accumulators import INF, PEAK
from stability_probe.stats.tiles import scale_of, sizes_of

LEAK_WEIGHT = 1e-6  # a masked key that keeps more weight than this is seen after all


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """Values [H] by the names of `accumulators.MAXIMA`, `MINIMA` and `SUMS`.

    Every backend gives the same names; a name that is missing has seen nothing. Rows with a score
    that is not finite and rows with fewer than two visible keys are in no mean.
    """

    maxima: dict[str, Tensor]
    minima: dict[str, Tensor]
    sums: dict[str, Tensor]
    peak: Tensor  # [len(PEAK), H]; NaN unless every statistic is asked for
    row_entropy_BHQ: Tensor | None  # nats, NaN where a row does not count; None: not asked for


def score_dtype(call: AttentionCall) -> torch.dtype:
    """In what the run forms its scores."""
    given = call.q_BHQD if call.scores_BHQK is None else call.scores_BHQK
    assert given is not None
    return call.dtype or given.dtype


def no_peak(values_H: Tensor) -> Tensor:
    """The peak where there is none, for heads and a device like those of `values_H`."""
    return values_H.new_full((len(PEAK), len(values_H)), float("nan"))


def largest_product(call: AttentionCall, strength_BHN: Tensor) -> Tensor:
    """The largest |q.k| before the scale, [H], from values of |scale q.k|."""
    sizes = sizes_of(call)
    scale = scale_of(call, sizes, strength_BHN.device).expand(sizes.B, sizes.G, sizes.R, 1, 1)
    product_BHN = strength_BHN / scale.reshape(sizes.B, sizes.heads, 1).abs()
    return largest(torch.nan_to_num(product_BHN, nan=-INF, posinf=-INF, neginf=-INF))


def largest(x_BHN: Tensor) -> Tensor:
    """The largest value of each head; -inf where there is none."""
    B, H, N = x_BHN.shape
    return x_BHN.new_full((H,), -INF) if B * N == 0 else x_BHN.amax((0, 2))
