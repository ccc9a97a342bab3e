"""The backend in PyTorch: any call on any device, by the row pass of `tiled.py`.

Shape suffixes: B batch, H query heads, G key heads, Q query positions, K key positions.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from stability_probe.records import AttentionCall
from stability_probe.stats.accumulators import FULL_ROW_SUMS, INF, ROW_SUMS, sum_dtype
from stability_probe.stats.catalogue import HISTOGRAM_BINS
from stability_probe.stats.peak import peak_of
from stability_probe.stats.precision import rounds_to_one
from stability_probe.stats.rowmaths import RowMaths, row_maths
from stability_probe.stats.scored import (
    LEAK_WEIGHT,
    Scored,
    largest,
    largest_product,
    no_peak,
    score_dtype,
)
from stability_probe.stats.tiled import row_pass


def torch_scores(
    call: AttentionCall, bad: Mapping[str, Tensor], *, full: bool, rows: bool
) -> Scored:
    """What the scores of one call give. Call it inside `precision.full_float32`.

    Args:
        call: the attention call.
        bad: values that are not finite along the last axis of "k" [B, G, K] and "output"
            [B, H, Q], where the call has them.
        full: all that the catalogue asks for, else what its default set needs.
        rows: also the entropy of every row.

    Raises:
        ValueError: the call has neither q and k nor scores.
    """
    table = row_pass(call, bad.get("k"), full=full)
    rows_BHQ = table.per_head()
    maths = row_maths(rows_BHQ)
    maxima = {name: largest(rows_BHQ[name]) for name in ("largest", "raw_largest")}
    minima = {name: -largest(-rows_BHQ[name]) for name in ("smallest", "raw_smallest")}
    maxima["keys"] = largest(rows_BHQ["visible"])
    sums = _sum_rows(call, rows_BHQ, maths, full=full)
    if call.q_BHQD is not None and call.k_BGKD is not None:
        strength_BHQ = torch.maximum(rows_BHQ["raw_largest"], -rows_BHQ["raw_smallest"])
        maxima["product"] = largest_product(call, strength_BHQ)
    if "output" in bad:
        seen_BHQ = rows_BHQ["visible"] > 0
        sums["output"] = _sum(bad["output"] * seen_BHQ)
        sums["masked_output"] = _sum(bad["output"] * ~seen_BHQ)
    peak = no_peak(maxima["keys"])
    if full:
        peak = peak_of(call, table)
        maxima["lse"] = largest(torch.where(maths.sound, maths.lse, -INF))
        minima["lse"] = -largest(torch.where(maths.sound, -maths.lse, -INF))
        maxima["top_weight"] = largest(torch.where(maths.counts, maths.top, -INF))
        _add_sink(call, maths, sums)
    entropy = torch.where(maths.counts, maths.entropy, float("nan")) if rows else None
    return Scored(maxima, minima, sums, peak, entropy)


def _sum_rows(
    call: AttentionCall, rows_BHQ: Mapping[str, Tensor], maths: RowMaths, *, full: bool
) -> dict[str, Tensor]:
    n = rows_BHQ["visible"]
    means = {
        "entropy_rows": torch.ones_like(n),
        "entries": n,
        "entropy": maths.entropy,
        "entropy_ratio": maths.entropy_ratio,
        "trace": maths.trace,
        "gap": rows_BHQ["gap"] / n,
    }
    others = {"masked_rows": n == 0, "scores": rows_BHQ["trouble"]}
    if full:
        bins = (maths.entropy_ratio * HISTOGRAM_BINS).floor().clamp_max(HISTOGRAM_BINS - 1)
        saturated = maths.rest <= rounds_to_one(score_dtype(call))
        means |= {
            "top_weight": maths.top,
            "first": rows_BHQ["first"] * maths.top,
            "deviation": rows_BHQ["deviation"],
            "tied": rows_BHQ["ties"] >= 2,
            "saturated": saturated,
            **{f"bin_{i}": bins == i for i in range(HISTOGRAM_BINS)},
        }
        others["leaking"] = rows_BHQ["leak"] > LEAK_WEIGHT
        others |= {name: rows_BHQ[name] for name in ("unscaled", "scaled")}
    names = (*ROW_SUMS, *(FULL_ROW_SUMS if full else ()))
    counted = torch.where(maths.counts, torch.stack([means[x].to(n.dtype) for x in names]), 0.0)
    extra = torch.stack([x.to(n.dtype) for x in others.values()])
    total = torch.cat((counted, extra)).sum((1, 3), dtype=sum_dtype(n.device))
    return dict(zip((*names, *others), total, strict=True))


def _add_sink(call: AttentionCall, maths: RowMaths, sums: dict[str, Tensor]) -> None:
    """The weight that a key without a value takes from the real ones."""
    if call.sink_BHQ1 is None:
        return
    sink = call.sink_BHQ1.detach().to(torch.float32).squeeze(-1)
    mass_BHQ = torch.sigmoid(sink - maths.lse)  # e^sink / (e^sink + e^lse)
    known_BHQ = maths.counts & ~torch.isnan(mass_BHQ)
    sums["sink"] = _sum(torch.where(known_BHQ, mass_BHQ, 0.0))
    sums["sink_rows"] = _sum(known_BHQ)


def _sum(x_BHQ: Tensor) -> Tensor:
    return x_BHQ.sum((0, 2), dtype=sum_dtype(x_BHQ.device))
