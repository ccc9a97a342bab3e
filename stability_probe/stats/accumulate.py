"""One attention call as accumulators: the only place that starts T x T work.

Shape suffixes: B batch, H query heads, G key heads, R query heads per key head, Q query
positions, K key positions, D head width, E value width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from stability_probe.finite import known_finite
from stability_probe.records import AttentionCall
from stability_probe.stats.accumulators import (
    FULL_ROW_SUMS,
    INF,
    PEAK,
    ROW_SUMS,
    Accumulators,
    merging,
    pack,
    sum_dtype,
)
from stability_probe.stats.bounds import bracket
from stability_probe.stats.catalogue import HISTOGRAM_BINS
from stability_probe.stats.peak import peak_of
from stability_probe.stats.precision import count_nonfinite, full_float32, rounds_to_one
from stability_probe.stats.rowmaths import RowMaths, row_maths
from stability_probe.stats.rowsums import Rows
from stability_probe.stats.tiled import row_pass
from stability_probe.stats.tiles import scale_of, sizes_of

LEAK_WEIGHT = 1e-6  # a masked key that keeps more weight than this is seen after all


def accumulate(call: AttentionCall, *, full: bool) -> Accumulators:
    """The accumulators of one attention call.

    Runs without gradients and autocast and in whole float32, draws no random number, never waits
    for the device, and keeps no reference to the call's tensors.

    Args:
        call: the call as softmax received it.
        full: all that the catalogue asks for, else what its default set needs. Accumulators of
            the two kinds do not merge.

    Raises:
        ValueError: the call has neither q and k nor scores.
    """
    return read(call, full=full)[1]


def read(call: AttentionCall, *, full: bool) -> tuple[Rows, Accumulators]:
    """The row numbers of one call, and its accumulators; see `accumulate`."""
    given = call.q_BHQD if call.scores_BHQK is None else call.scores_BHQK
    with full_float32("cpu" if given is None else given.device.type):
        tensors = {
            "q": call.q_BHQD,
            "k": call.k_BGKD,
            "v": call.v_BGKE,
            "output": call.output_BHQE,
        }
        bad = {
            name: count_nonfinite(x.detach())
            for name, x in tensors.items()
            if x is not None and not known_finite(x)
        }
        rows = row_pass(call, bad.get("k"), full=full)
        return rows, _reduce(call, rows, bad, full=full)


def _reduce(
    call: AttentionCall, rows: Rows, bad: Mapping[str, Tensor], *, full: bool
) -> Accumulators:
    """Pool the rows over batch and queries, and add what needs no scores."""
    sizes = sizes_of(call)
    rows_BHQ = rows.per_head()
    maths = row_maths(rows_BHQ)
    maxima = {name: _largest(rows_BHQ[name]) for name in ("largest", "raw_largest")}
    minima = {name: -_largest(-rows_BHQ[name]) for name in ("smallest", "raw_smallest")}
    maxima["keys"] = _largest(rows_BHQ["visible"])
    sums = _sum_rows(call, rows_BHQ, maths, full=full)
    one_H = torch.ones_like(maxima["keys"])
    maxima["fp16_scores"] = one_H * (not call.fused and _score_dtype(call) == torch.float16)
    sums["rows"] = one_H * (sizes.B * sizes.Q)
    _add_norms(call, maxima, sums)
    _add_bounds(call, maxima)
    _add_values(call, bad, rows_BHQ["visible"], sums)
    _add_input(call, sums)
    if call.q_BHQD is not None and call.k_BGKD is not None:
        maxima["product"] = _largest_product(call, rows_BHQ)
        sums["product_rows"] = sums["rows"]
    peak = one_H.new_full((len(PEAK), sizes.heads), float("nan"))
    if full:
        peak = peak_of(call, rows)
        maxima["lse"] = _largest(torch.where(maths.sound, maths.lse, -INF))
        minima["lse"] = -_largest(torch.where(maths.sound, -maths.lse, -INF))
        maxima["top_weight"] = _largest(torch.where(maths.counts, maths.top, -INF))
        _add_sink(call, maths, sums)
    return pack(maxima, minima, sums, peak)


def _largest_product(call: AttentionCall, rows_BHQ: Mapping[str, Tensor]) -> Tensor:
    """The largest |q.k| before the scale."""
    sizes = sizes_of(call)
    strength_BHQ = torch.maximum(rows_BHQ["raw_largest"], -rows_BHQ["raw_smallest"])
    scale = scale_of(call, sizes, strength_BHQ.device).expand(sizes.B, sizes.G, sizes.R, 1, 1)
    product_BHQ = strength_BHQ / scale.reshape(sizes.B, sizes.heads, 1).abs()
    return _largest(torch.nan_to_num(product_BHQ, nan=-INF, posinf=-INF, neginf=-INF))


def _score_dtype(call: AttentionCall) -> torch.dtype:
    given = call.q_BHQD if call.scores_BHQK is None else call.scores_BHQK
    assert given is not None
    return call.dtype or given.dtype


def _largest(x_BHQ: Tensor) -> Tensor:
    B, H, Q = x_BHQ.shape
    if B * Q == 0:
        return x_BHQ.new_full((H,), -INF)
    return x_BHQ.amax((0, 2))


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
        saturated = maths.rest <= rounds_to_one(_score_dtype(call))
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


def _add_norms(call: AttentionCall, maxima: dict[str, Tensor], sums: dict[str, Tensor]) -> None:
    """Norms of the rows of q and k; a row whose norm is not finite is left out."""
    for name, x in (("q", call.q_BHQD), ("k", call.k_BGKD)):
        if x is None:
            continue
        norm = torch.linalg.vector_norm(x.detach().to(torch.float32), dim=-1)
        known = torch.isfinite(norm)
        maxima[f"{name}_norm"] = _per_head(call, _largest(torch.where(known, norm, -INF)))
        sums[f"{name}_norm"] = _per_head(call, _sum(torch.where(known, norm, 0.0)))
        sums[f"{name}_rows"] = _per_head(call, _sum(known))


def _add_bounds(call: AttentionCall, maxima: dict[str, Tensor]) -> None:
    """The bracket of the largest score, wide enough for the statistics that are measured here."""
    reach_H = None
    if call.q_BHQD is not None and call.k_BGKD is not None:
        sizes = sizes_of(call)
        scale = scale_of(call, sizes, call.q_BHQD.device).abs().amax(0, keepdim=True)
        scale_H = scale.expand(1, sizes.G, sizes.R, 1, 1).flatten()
        reach_H = scale_H * maxima["q_norm"] * maxima["k_norm"]
    bounds = bracket(call, reach_H=reach_H)
    maxima["low"], maxima["high"] = merging(bounds.low_H, bounds.high_H)


def _add_values(
    call: AttentionCall, bad: Mapping[str, Tensor], visible_BHQ: Tensor, sums: dict[str, Tensor]
) -> None:
    """How many values of each tensor there are, and how many are not finite."""
    for name, x in (("q", call.q_BHQD), ("k", call.k_BGKD), ("v", call.v_BGKE)):
        if x is not None:
            sums[f"{name}_values"] = torch.full_like(sums["rows"], x.numel() // x.shape[1])
        if name in bad:
            sums[name] = _per_head(call, _sum(bad[name]))
    if call.output_BHQE is not None:
        sums["output_values"] = sums["rows"] * call.output_BHQE.shape[-1]
    if "output" in bad:
        seen_BHQ = visible_BHQ > 0
        sums["output"] = _sum(bad["output"] * seen_BHQ)
        sums["masked_output"] = _sum(bad["output"] * ~seen_BHQ)


def _add_sink(call: AttentionCall, maths: RowMaths, sums: dict[str, Tensor]) -> None:
    """The weight that a key without a value takes from the real ones."""
    if call.sink_BHQ1 is None:
        return
    sink = call.sink_BHQ1.detach().to(torch.float32).squeeze(-1)
    mass_BHQ = torch.sigmoid(sink - maths.lse)  # e^sink / (e^sink + e^lse)
    known_BHQ = maths.counts & ~torch.isnan(mass_BHQ)
    sums["sink"] = _sum(torch.where(known_BHQ, mass_BHQ, 0.0))
    sums["sink_rows"] = _sum(known_BHQ)


def _add_input(call: AttentionCall, sums: dict[str, Tensor]) -> None:
    if call.input_rms is not None:
        rms = call.input_rms.detach().to(torch.float32)
        known = torch.isfinite(rms)
        sums["input_square"] = sums["rows"] * torch.where(known, rms, 0.0).square()
        sums["input_rows"] = sums["rows"] * known


def _sum(x_BHQ: Tensor) -> Tensor:
    return x_BHQ.sum((0, 2), dtype=sum_dtype(x_BHQ.device))


def _per_head(call: AttentionCall, x_G: Tensor) -> Tensor:
    """Values per key head as values per query head."""
    return x_G.repeat_interleave(sizes_of(call).heads // len(x_G))
