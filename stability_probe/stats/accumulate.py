"""One attention call as accumulators: the only place that starts T x T work.

Shape suffixes: B batch, H query heads, G key heads, Q query positions, K key positions, D head
width, E value width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from stability_probe.finite import known_finite
from stability_probe.records import AttentionCall
from stability_probe.stats.accumulators import INF, Accumulators, merging, pack, sum_dtype
from stability_probe.stats.backend import Backend, score
from stability_probe.stats.bounds import around, bracket
from stability_probe.stats.precision import count_nonfinite, full_float32, row_norms
from stability_probe.stats.scored import Scored, largest, score_dtype
from stability_probe.stats.tiles import scale_of, sizes_of


def accumulate(call: AttentionCall, *, full: bool, backend: Backend = "auto") -> Accumulators:
    """The accumulators of one attention call.

    Runs without gradients and autocast and in whole float32, draws no random number, never waits
    for the device, and keeps no reference to the call's tensors.

    Args:
        call: the call as softmax received it.
        full: all that the catalogue asks for, else what its default set needs. Accumulators of
            the two kinds do not merge.
        backend: what reads the scores; see `backend.score`. Accumulators of all backends merge.

    Raises:
        ValueError: the call has neither q and k nor scores.
        BackendError: the backend asked for cannot read the call.
    """
    return read(call, full=full, rows=False, backend=backend)[0]


def read(
    call: AttentionCall, *, full: bool, rows: bool, backend: Backend = "auto"
) -> tuple[Accumulators, Tensor | None]:
    """The accumulators of one call, and with `rows` its rows' entropy [B, H, Q], else None."""
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
        scored = score(call, bad, full=full, rows=rows, backend=backend)
        return _complete(call, scored, bad), scored.row_entropy_BHQ


def _complete(call: AttentionCall, scored: Scored, bad: Mapping[str, Tensor]) -> Accumulators:
    """Add what needs no scores."""
    sizes = sizes_of(call)
    maxima, sums = dict(scored.maxima), dict(scored.sums)
    one_H = torch.ones_like(maxima["keys"])
    maxima["fp16_scores"] = one_H * (not call.fused and score_dtype(call) == torch.float16)
    sums["rows"] = one_H * (sizes.B * sizes.Q)
    if "product" in maxima:
        sums["product_rows"] = sums["rows"]
    _add_norms(call, maxima, sums)
    _add_bounds(call, maxima)
    _add_values(call, bad, sums)
    _add_input(call, sums)
    return pack(maxima, scored.minima, sums, scored.peak)


def _add_norms(call: AttentionCall, maxima: dict[str, Tensor], sums: dict[str, Tensor]) -> None:
    """Norms of the rows of q and k; a row whose norm is not finite is left out."""
    for name, x in (("q", call.q_BHQD), ("k", call.k_BGKD)):
        if x is None:
            continue
        norm = row_norms(x.detach())
        known = torch.isfinite(norm)
        maxima[f"{name}_norm"] = _per_head(call, largest(torch.where(known, norm, -INF)))
        sums[f"{name}_norm"] = _per_head(call, _sum(torch.where(known, norm, 0.0)))
        sums[f"{name}_rows"] = _per_head(call, _sum(known))


def _add_bounds(call: AttentionCall, maxima: dict[str, Tensor]) -> None:
    """The bracket of the largest score: of the log-sum-exp, else about what was measured."""
    reach_H = None
    if call.q_BHQD is not None and call.k_BGKD is not None:
        sizes = sizes_of(call)
        scale = scale_of(call, sizes, call.q_BHQD.device).abs().amax(0, keepdim=True)
        scale_H = scale.expand(1, sizes.G, sizes.R, 1, 1).flatten()
        reach_H = scale_H * maxima["q_norm"] * maxima["k_norm"]
    if call.lse_BHQ is None:
        ends = around(call, maxima["largest"], reach_H)
    else:
        ends = bracket(call, reach_H=reach_H)
    maxima["low"], maxima["high"] = merging(ends.low_H, ends.high_H)


def _add_values(call: AttentionCall, bad: Mapping[str, Tensor], sums: dict[str, Tensor]) -> None:
    """How many values of each tensor there are, and how many of q, k and v are not finite."""
    for name, x in (("q", call.q_BHQD), ("k", call.k_BGKD), ("v", call.v_BGKE)):
        if x is not None:
            sums[f"{name}_values"] = torch.full_like(sums["rows"], x.numel() // x.shape[1])
        if name in bad:
            sums[name] = _per_head(call, _sum(bad[name]))
    if call.output_BHQE is not None:
        sums["output_values"] = sums["rows"] * call.output_BHQE.shape[-1]


def _add_input(call: AttentionCall, sums: dict[str, Tensor]) -> None:
    if call.input_rms is not None:
        rms = call.input_rms.detach().to(torch.float32)
        known = torch.isfinite(rms)
        sums["input_square"] = sums["rows"] * torch.where(known, rms, 0.0).square()
        sums["input_rows"] = sums["rows"] * known


def _sum(x_BHN: Tensor) -> Tensor:
    return x_BHN.sum((0, 2), dtype=sum_dtype(x_BHN.device))


def _per_head(call: AttentionCall, x_G: Tensor) -> Tensor:
    """Values per key head as values per query head."""
    return x_G.repeat_interleave(sizes_of(call).heads // len(x_G))
