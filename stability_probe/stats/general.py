"""The row pass over any call: masks, bias, soft-cap, functions of positions, given scores.

Whatever is hidden or not finite becomes -inf in its tile, entry by entry, before the row is read.

Shape suffixes: B batch, G key heads, R query heads per key head, Q query positions, K keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stability_probe.records import AttentionCall
from stability_probe.stats.masks import (
    MASKED_BIAS,
    MaskTile,
    guess_masked,
    hide,
    mask_tile,
    split_masks,
)
from stability_probe.stats.precision import FLOAT16_MAX
from stability_probe.stats.rowsums import (
    FLOOR,
    INF,
    Rows,
    buffers,
    count_ties,
    finish_rows,
    sum_rows,
)
from stability_probe.stats.tiles import Products, Sizes, Tile, block_of, per_pair


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """What the tiles of one call share."""

    call: AttentionCall
    products: Products | None
    masks: tuple[Tensor, ...]
    given: Tensor | None  # the scores, masks already in them

    @property
    def raw_is_score(self) -> bool:
        """Whether softmax received scale x q.k itself, apart from keys dropped."""
        bias = any(mask.dtype != torch.bool for mask in self.masks)
        cap = self.call.softcap is not None or self.call.score_mod is not None
        return self.given is None and not cap and not bias


def general_pass(
    call: AttentionCall,
    products: Products | None,
    sizes: Sizes,
    rows: Rows,
    *,
    dtype: torch.dtype,
    full: bool,
) -> None:
    """Fill the row numbers."""
    scores = call.scores_BHQK
    given = None if scores is None else per_pair(scores.detach(), sizes)
    masks = split_masks(call.masks, sizes)
    work = _Work(call, products, masks, given)
    causal, device = call.causal and given is None, rows.table.device
    score_mod, mask_mod = (call.score_mod, call.mask_mod) if given is None else (None, None)
    # one mask for all heads; what a function depends on is known only once it is called
    shared = mask_mod is None and all(mask.shape[1:3] == (1, 1) for mask in masks)
    last, mask = None, None
    both = score_mod is not None or (given is not None and products is not None)
    for tile, (S, scratch, *more) in buffers(sizes, device, causal=causal, count=2 + both):
        out = rows.within(tile)
        place = (tile.batch, tile.query)
        if mask is None or not shared or place != last:
            mask = mask_tile(masks, tile, causal=causal, device=device, mask_mod=mask_mod)
            last = place
        if score_mod is not None:
            _modify_scores(work, tile, mask, (S, scratch, *more), out)
        elif given is None:
            _form_scores(work, tile, mask, S, scratch, out)
        else:
            S.copy_(tile.of_pairs(given))
            raw = None
            if products is not None:
                raw = more[0]
                products.fill(tile, raw)
            hidden = _read_scores(mask, S, scratch, out, raw=raw, capped=call.softcap is not None)
            if products is not None and raw is not None:
                _raw_numbers(products, tile, raw, scratch, hidden, out)
        torch.amax(S, -1, out=out["largest"])
        if full:
            _score_numbers(dtype, S, scratch, out)
        _shift(S, scratch, out)
        sum_rows(S, scratch, out)
    finish_rows(rows)
    rows["smallest"].copy_(torch.where(rows["largest"] == -INF, INF, rows["smallest"]))
    if work.raw_is_score:
        for name in ("largest", "smallest"):
            rows["raw_" + name].copy_(rows[name])


def _form_scores(
    work: _Work, tile: Tile, mask: MaskTile, S: Tensor, scratch: Tensor, out: dict[str, Tensor]
) -> None:
    """S = softcap(scale q.k) + bias, but -inf where hidden or not finite."""
    products, softcap = work.products, work.call.softcap
    assert products is not None
    products.fill(tile, S)
    if not work.raw_is_score or "unscaled" in out:
        _raw_numbers(products, tile, S, scratch, mask.hidden, out)
    if softcap is not None:
        S.div_(softcap).tanh_().mul_(softcap)
    if mask.bias is not None:
        S.add_(mask.bias)
    # -inf under an additive mask is the mask at work; NaN and +inf are faults it cannot hide
    checked = S
    if mask.shield is not None:
        checked = torch.maximum(S, mask.shield, out=scratch)
    torch.sub(checked, checked, out=scratch).ne_(0)
    if mask.kept is not None:
        scratch.mul_(mask.kept)
    torch.sum(scratch, -1, out=out["trouble"])
    S.nan_to_num_(nan=-INF, posinf=-INF, neginf=-INF)
    if "leak" in out and mask.unbiased is not None:
        _leak(S, scratch, mask.unbiased, mask.kept, out)
    if mask.visible is None or mask.hidden is None:
        out["visible"].fill_(float(tile.keys))
        return
    S.add_(mask.hidden)
    seen = mask.visible.expand(*mask.visible.shape[:-1], tile.keys).sum(-1)
    out["visible"].copy_(seen)


def _modify_scores(
    work: _Work, tile: Tile, mask: MaskTile, buffers: tuple[Tensor, ...], out: dict[str, Tensor]
) -> None:
    """S = score_mod(scale q.k) + bias, but -inf where hidden or not finite.

    A function may hide a key by a score of -inf, or one so low that only a mask gives it.
    """
    S, scratch, raw = buffers
    products, score_mod = work.products, work.call.score_mod
    assert products is not None
    assert score_mod is not None
    products.fill(tile, raw)
    block = block_of(tile, raw.device)
    modified_BHQK = block.modified(score_mod, raw.flatten(1, 2))
    S.copy_(modified_BHQK.view(tile.shape))
    if mask.bias is not None:
        S.add_(mask.bias)
    torch.clamp_min(S, 0.0, out=scratch)
    scratch.sub_(scratch).ne_(0)  # NaN and +inf, which hide nothing
    if mask.kept is not None:
        scratch.mul_(mask.kept)
    torch.sum(scratch, -1, out=out["trouble"])
    finite = torch.nan_to_num(S, nan=-INF, posinf=-INF, neginf=-INF, out=scratch)
    if mask.kept is not None:
        finite.add_(hide(mask.kept))
    unbiased = 1 - guess_masked(finite, finite.amax(-1, keepdim=True))
    if mask.unbiased is not None:
        unbiased.mul_(mask.unbiased)
    S.copy_(finite)
    if "leak" in out:
        _leak(S, scratch, unbiased, mask.kept, out)
    hidden = hide(torch.ne(S, -INF).to(torch.float32).mul_(unbiased))
    S.add_(hidden)
    torch.gt(S, -INF, out=scratch)
    torch.sum(scratch, -1, out=out["visible"])
    out["visible"].add_(out["trouble"])
    _raw_numbers(products, tile, raw, scratch, hidden, out)


def _read_scores(
    mask: MaskTile,
    S: Tensor,
    scratch: Tensor,
    out: dict[str, Tensor],
    *,
    raw: Tensor | None,
    capped: bool,
) -> Tensor:
    """Put -inf into given scores where hidden or not finite; returns what hides an entry.

    Where no mask is known, what was added to the products (`raw`) tells a mask, unless a soft-cap
    came between; without the products it is guessed from the scores alone.
    """
    torch.clamp_min(S, 0.0, out=scratch)
    scratch.sub_(scratch).ne_(0)
    torch.sum(scratch, -1, out=out["trouble"])  # NaN and +inf, wherever softmax got them
    allowed, unbiased = mask.visible, mask.unbiased
    if allowed is None and raw is None:
        finite = torch.nan_to_num(S, nan=-INF, posinf=-INF, neginf=-INF, out=scratch)
        allowed = unbiased = 1 - guess_masked(S, finite.amax(-1, keepdim=True))
    elif allowed is None and raw is not None and not capped:
        masked = torch.sub(S, raw, out=scratch).le_(MASKED_BIAS)
        allowed = unbiased = 1 - masked
    visible = torch.ne(S, -INF).to(torch.float32)  # NaN and +inf are: as faults
    if allowed is not None:
        visible.mul_(allowed)
    S.nan_to_num_(nan=-INF, posinf=-INF, neginf=-INF)
    if "leak" in out and unbiased is not None:
        _leak(S, scratch, unbiased, mask.kept, out)
    hidden = hide(visible)
    S.add_(hidden)
    torch.gt(S, -INF, out=scratch)
    torch.sum(scratch, -1, out=out["visible"])
    out["visible"].add_(out["trouble"])
    return hidden


def _raw_numbers(
    products: Products,
    tile: Tile,
    raw: Tensor,
    scratch: Tensor,
    hidden: Tensor | None,
    out: dict[str, Tensor],
) -> None:
    """Extrema of scale x q.k over visible, finite entries, and those beyond float16."""
    nothing = raw.new_zeros(()) if hidden is None else hidden
    torch.nan_to_num(raw, nan=-INF, posinf=-INF, neginf=-INF, out=scratch).add_(nothing)
    torch.amax(scratch, -1, out=out["raw_largest"])
    torch.nan_to_num(raw, nan=INF, posinf=INF, neginf=INF, out=scratch).sub_(nothing)
    torch.amin(scratch, -1, out=out["raw_smallest"])
    if "unscaled" in out:
        limit = FLOAT16_MAX * tile.of_pairs(products.scale).abs()
        torch.abs(raw, out=scratch).add_(nothing)
        scratch.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).gt_(limit)
        torch.sum(scratch, -1, out=out["unscaled"])


def _leak(
    S: Tensor, scratch: Tensor, unbiased: Tensor, kept: Tensor | None, out: dict[str, Tensor]
) -> None:
    """The largest weight that the run's softmax gives to a key under a finite additive mask."""
    masked = 1 - unbiased
    if kept is not None:
        masked = masked * kept
    torch.add(S, hide(masked), out=scratch)
    largest = scratch.amax(-1, keepdim=True)
    everything = S if kept is None else torch.add(S, hide(kept), out=scratch)
    top = torch.nan_to_num(everything.amax(-1, keepdim=True), neginf=0.0)
    weights = torch.sub(everything, top, out=scratch).clamp_min_(FLOOR).exp_()
    out["leak"].copy_((largest - top).exp_().div_(weights.sum(-1, keepdim=True)).squeeze(-1))


def _score_numbers(dtype: torch.dtype, S: Tensor, scratch: Tensor, out: dict[str, Tensor]) -> None:
    """What only the full set asks of S, -inf where hidden."""
    torch.nan_to_num(S, neginf=0.0, out=scratch).abs_().gt_(FLOAT16_MAX)
    torch.sum(scratch, -1, out=out["scaled"])
    count_ties(dtype, S, scratch, out)
    out["first"].copy_((S[..., 0] - out["largest"]).exp_())


def _shift(S: Tensor, scratch: Tensor, out: dict[str, Tensor]) -> None:
    """S - largest, and 0 where hidden; its standard deviation if asked for."""
    S.sub_(torch.nan_to_num(out["largest"], neginf=0.0).unsqueeze(-1))
    if "deviation" in out:
        count = out["visible"].clamp_min(1.0)
        mean = torch.nan_to_num(S, neginf=0.0, out=scratch).sum(-1) / count
        torch.sub(S, mean.unsqueeze(-1), out=scratch).nan_to_num_(neginf=0.0)
        torch.linalg.vector_norm(scratch, dim=-1, out=out["deviation"])
        out["deviation"].div_(count.sqrt_())
    S.nan_to_num_(neginf=0.0)
