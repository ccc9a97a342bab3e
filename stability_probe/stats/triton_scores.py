"""The backend in Triton, for CUDA: one pass over q and k, reduced on the way.

What leaves the kernel is a few numbers per block of queries and head; nothing per row unless the
rows' entropy is asked for. Masks are read through their own strides and never expanded.

Shape suffixes: B batch, H query heads, G key heads, R query heads per key head, Q query positions,
K key positions, N blocks of queries, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from stability_probe.records import AttentionCall
from stability_probe.stats.accumulators import INF
from stability_probe.stats.catalogue import HISTOGRAM_BINS
from stability_probe.stats.peak import peak_at
from stability_probe.stats.precision import rounds_to_one
from stability_probe.stats.scored import Scored, largest_product, no_peak, score_dtype
from stability_probe.stats.tiles import scale_of, sizes_of

_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_OLDEST = 8  # compute capability: before it bfloat16 and copies in flight are missing


@dataclass(frozen=True, slots=True)
class Blocks:
    """How the work is cut."""

    queries: int  # of a program
    keys: int  # read at a time
    width: int  # of q and k multiplied at a time
    warps: int
    stages: int  # of loads in flight


def triton_refuses(call: AttentionCall) -> str | None:
    """Why the kernel cannot read a call, and what to do; None where it can."""
    q, k = call.q_BHQD, call.k_BGKD
    if call.scores_BHQK is not None or q is None or k is None:
        return "it has scores of its own; expected q and k alone."
    for name in ("score_mod", "mask_mod"):
        if getattr(call, name) is not None:
            return f"it has a {name}; expected masks and numbers only. Give it as a mask."
    for dtype in (q.dtype, k.dtype, score_dtype(call)):
        if dtype not in _DTYPES:
            return f"it is in {dtype}; expected float32, float16 or bfloat16. Convert it."
    module = _kernel_module()
    if isinstance(module, str):
        return f"the package triton cannot be imported ({module}). Install it: pip install triton."
    if module.INTERPRETED:
        return None
    if q.device.type != "cuda":
        return f"it is on {q.device}; expected a CUDA device. Move it to one."
    major, minor = torch.cuda.get_device_capability(q.device)
    if torch.version.hip is None and major < _OLDEST:
        return f"{q.device} has compute capability {major}.{minor}; expected {_OLDEST}.0 or more."
    return None


@cache
def _kernel_module() -> Any:
    """The kernel's module, or why there is none; importing Triton takes a second."""
    try:
        from stability_probe.stats import triton_kernel
    except Exception as error:  # a broken installation raises all sorts
        return f"{type(error).__name__}: {error}"
    return triton_kernel


def blocks_of(call: AttentionCall, *, full: bool) -> Blocks:
    """How to cut a call: the largest blocks whose numbers stay in registers.

    As the assembler reports it for compute capability 8.0, widths 64 and 128: none spilled, at
    most 30 bytes with masks and every statistic. Not tuned on a device.
    """
    assert call.q_BHQD is not None
    assert call.k_BGKD is not None
    width = max(16, 1 << (call.q_BHQD.shape[-1] - 1).bit_length())  # the least that is multiplied
    if call.q_BHQD.dtype == call.k_BGKD.dtype != torch.float32:
        width = width if width <= 128 else 64
        return Blocks(queries=128, keys=32 if full else 64, width=width, warps=8, stages=2)
    return Blocks(queries=64, keys=32, width=min(width, 32), warps=8, stages=2)


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """What the kernel fills in: values of every block of queries."""

    maxima: Tensor  # float32 [len(maxima_names), B, H, N]
    sums: Tensor  # float64 [len(sum_names), B, H, N]
    peaks_BHN: Tensor  # float32: scale q.k where it is largest in size
    peak_rows_BHN: Tensor  # int32: its query
    row_entropy_BHQ: Tensor | None  # float32


def maxima_names(*, full: bool) -> tuple[str, ...]:
    """What each row of `maxima` is the largest of; "-" stands before what is kept negated."""
    names = ("largest", "-smallest", "raw_largest", "-raw_smallest", "keys")
    return (*names, "lse", "-lse", "top_weight") if full else names


def sum_names(*, full: bool, output: bool, sink: bool) -> tuple[str, ...]:
    """What each row of `sums` is the sum of.

    Args:
        full: all that the catalogue asks for.
        output: whether the kernel is given `bad_output`.
        sink: whether it is given `sink`.
    """
    names = ["entropy_rows", "entries", "entropy", "entropy_ratio", "trace", "gap"]
    names += ["masked_rows", "scores"]
    if output:
        names += ["output", "masked_output"]
    if full:
        names += ["top_weight", "first", "deviation", "tied", "saturated"]
        names += ["leaking", "unscaled", "scaled"]
        names += ["sink", "sink_rows"] if sink else []
        names += [f"bin_{i}" for i in range(HISTOGRAM_BINS)]
    return tuple(names)


def triton_scores(
    call: AttentionCall, bad: Mapping[str, Tensor], *, full: bool, rows: bool
) -> Scored:
    """What the scores of one call give; arguments as `torch_scores` takes them.

    Only for calls that `triton_refuses` has nothing against, and that are not empty.
    """
    output = bad.get("output")
    table = _launch(call, output, full=full, rows=rows)
    per_sequence = dict(zip(maxima_names(full=full), table.maxima.amax(-1), strict=True))
    extrema = {name: x_BH.amax(0) for name, x_BH in per_sequence.items()}
    maxima = {name: x_H for name, x_H in extrema.items() if not name.startswith("-")}
    minima = {name[1:]: -x_H for name, x_H in extrema.items() if name.startswith("-")}
    strength_BH = torch.maximum(per_sequence["raw_largest"], per_sequence["-raw_smallest"])
    maxima["product"] = largest_product(call, strength_BH.unsqueeze(-1))
    names = sum_names(full=full, output=output is not None, sink=call.sink_BHQ1 is not None)
    sums = dict(zip(names, table.sums.sum((1, 3)), strict=True))
    peak = _peak(call, table) if full else no_peak(maxima["keys"])
    return Scored(maxima, minima, sums, peak, table.row_entropy_BHQ)


def _launch(
    call: AttentionCall, bad_output_BHQ: Tensor | None, *, full: bool, rows: bool
) -> _Table:
    """Start the kernel; what it fills is there when the device gets to it."""
    assert call.q_BHQD is not None
    assert call.k_BGKD is not None
    q, k, sizes = call.q_BHQD.detach(), call.k_BGKD.detach(), sizes_of(call)
    blocks = blocks_of(call, full=full)
    pairs = (sizes.B, sizes.heads, sizes.Q, sizes.K)
    masks = tuple(mask.detach().expand(pairs) for mask in call.masks)
    added = tuple(mask.dtype != torch.bool for mask in masks)
    scale = scale_of(call, sizes, q.device).expand(sizes.B, sizes.G, sizes.R, 1, 1)
    sink = None
    if full and call.sink_BHQ1 is not None:
        sink = call.sink_BHQ1.detach().expand(*pairs[:3], 1).squeeze(-1)
    names = sum_names(full=full, output=bad_output_BHQ is not None, sink=sink is not None)
    columns = (sizes.B, sizes.heads, -(-sizes.Q // blocks.queries))
    table = _empty_table(columns, q.device, full=full, sums=len(names), rows=rows and sizes.Q)
    module = _kernel_module()
    # Triton starts kernels on the current device, which need not be that of the tensors
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        module.attention_kernel[(math.prod(columns),)](
            q, k, masks, scale.reshape(sizes.B, sizes.heads).contiguous(), sink, bad_output_BHQ,
            table.maxima, table.sums, table.peaks_BHN, table.peak_rows_BHN, table.row_entropy_BHQ,
            sizes.Q, sizes.K, sizes.heads, sizes.R, columns[-1],
            call.softcap or 0.0, rounds_to_one(score_dtype(call)),
            q.stride(), k.stride(), tuple(mask.stride() for mask in masks),
            () if sink is None else sink.stride(),
            ADDED=added, BIASED=any(added), CAUSAL=call.causal, CAPPED=call.softcap is not None,
            FULL=full, DTYPE=getattr(module.tl, _DTYPES[score_dtype(call)]),
            D=q.shape[-1], BLOCK_D=blocks.width, BLOCK_M=blocks.queries, BLOCK_N=blocks.keys,
            num_warps=blocks.warps, num_stages=blocks.stages, enable_fp_fusion=False,
        )  # fmt: skip
    return table


def _empty_table(
    columns: tuple[int, int, int], device: torch.device, *, full: bool, sums: int, rows: int
) -> _Table:
    """Room for what the kernel fills in; `rows` queries per head have their entropy stored."""
    maxima = len(maxima_names(full=full))
    return _Table(
        maxima=torch.empty((maxima, *columns), dtype=torch.float32, device=device),
        sums=torch.empty((sums, *columns), dtype=torch.float64, device=device),
        peaks_BHN=torch.empty(columns, dtype=torch.float32, device=device),
        peak_rows_BHN=torch.empty(columns, dtype=torch.int32, device=device),
        row_entropy_BHQ=torch.empty((*columns[:2], rows), dtype=torch.float32, device=device)
        if rows
        else None,
    )


def _peak(call: AttentionCall, table: _Table) -> Tensor:
    """The pair behind the largest logit of each head: the best of its blocks, taken apart."""
    peaks_HN = table.peaks_BHN.transpose(0, 1).flatten(1)
    rows_HN = table.peak_rows_BHN.transpose(0, 1).flatten(1)
    best_H1 = torch.where(peaks_HN == -INF, -INF, peaks_HN.abs()).argmax(-1, keepdim=True)
    sequence_H = best_H1.squeeze(-1) // table.peaks_BHN.shape[-1]
    row_H = rows_HN.gather(-1, best_H1).squeeze(-1).to(torch.int64)
    return peak_at(call, sequence_H, row_H, peaks_HN.gather(-1, best_H1).squeeze(-1))
