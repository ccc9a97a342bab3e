"""A part of an attention call as a call: some sequences, some key heads and their query heads.

Shape suffixes: as in `stability_probe.records`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from stability_probe.records import AttentionCall
from stability_probe.stats.tiles import sizes_of


def sequence_of(call: AttentionCall, turn: int) -> AttentionCall:
    """The sequence whose turn it is, with all heads; the whole call where that holds but one."""
    sizes = sizes_of(call)
    b = turn % max(sizes.B, 1)
    return part_of(call, slice(b, b + 1), slice(0, sizes.G))


def head_of(call: AttentionCall, turn: int) -> tuple[AttentionCall, slice]:
    """The sequence and key head whose turn it is, and which query heads of the call these are.

    Turns go through the key heads first, so that each has one as often as there are key heads.
    """
    sizes = sizes_of(call)
    g, b = turn % max(sizes.G, 1), turn // max(sizes.G, 1) % max(sizes.B, 1)
    part = part_of(call, slice(b, b + 1), slice(g, g + 1))
    return part, slice(g * sizes.R, (g + 1) * sizes.R)


def part_of(call: AttentionCall, batch: slice, group: slice) -> AttentionCall:
    """The call of these sequences and key heads alone; views, nothing is copied.

    The kernel's own log-sum-exp, the output and functions of positions go with it. A packed
    sequence is one sequence here, and its number of sequences is kept.
    """
    sizes = sizes_of(call)
    if sizes.empty:
        return call
    heads = slice(group.start * sizes.R, group.stop * sizes.R)

    def by_head(x: Tensor | None) -> Tensor | None:
        return None if x is None else _cut(x, batch, heads)

    def by_group(x: Tensor | None) -> Tensor | None:
        return None if x is None else _cut(x, batch, group)

    packed = call.sequences is not None and sizes.B == 1
    return replace(
        call,
        q_BHQD=by_head(call.q_BHQD),
        k_BGKD=by_group(call.k_BGKD),
        v_BGKE=by_group(call.v_BGKE),
        scores_BHQK=by_head(call.scores_BHQK),
        masks=tuple(_cut(mask, batch, heads) for mask in call.masks),
        scale=_cut(call.scale, batch, heads) if isinstance(call.scale, Tensor) else call.scale,
        score_mod=_moved(call.score_mod, batch.start, heads.start, scores=1),
        mask_mod=_moved(call.mask_mod, batch.start, heads.start, scores=0),
        sink_BHQ1=by_head(call.sink_BHQ1),
        lse_BHQ=None if call.lse_BHQ is None else call.lse_BHQ[batch, heads],
        output_BHQE=by_head(call.output_BHQE),
        sequences=call.sequences if packed or call.sequences == 0 else None,
    )


def _cut(x: Tensor, batch: slice, heads: slice) -> Tensor:
    """Of a tensor over [B, H, ...] whose axes may be missing in front, or of size 1."""
    if x.dim() < 3:
        return x
    if x.dim() == 3 and x.shape[0] == 1:
        return x
    if x.dim() == 3:
        return x[heads]
    x = x if x.shape[0] == 1 else x[batch]
    return x if x.shape[1] == 1 else x[:, heads]


def _moved(
    function: Callable[..., Tensor] | None, batch: int, head: int, *, scores: int
) -> Callable[..., Tensor] | None:
    """A function of positions, told the positions in the whole call."""
    if function is None or batch == head == 0:
        return function

    def moved(*given: Tensor) -> Tensor:
        before, (b, h, *rest) = given[:scores], given[scores:]
        return function(*before, b + batch, h + head, *rest)

    return moved
