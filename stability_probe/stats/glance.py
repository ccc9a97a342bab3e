"""What the steps between measured ones get: bounds for every head, one head's maximum exactly.

Shape suffixes: B batch, G key heads, H query heads, R query heads per key head, Q query
positions, K key positions, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stability_probe.records import AttentionCall
from stability_probe.stats.accumulators import INF, merging
from stability_probe.stats.bounds import bracket, reach
from stability_probe.stats.catalogue import BETWEEN_SET
from stability_probe.stats.masks import mask_tile, split_masks
from stability_probe.stats.part import head_of
from stability_probe.stats.precision import full_float32
from stability_probe.stats.tiles import Tile, cut, products_of, sizes_of

GLANCE = ("max_logit_low", "max_logit_high", "rotating_max_logit")
assert set(GLANCE) == set(BETWEEN_SET)
SHARE = 64  # of a call's scores about one in so many is formed
_CPU_ROWS = 128  # of a tile: so few that even one head of a small batch can be shared out


def glance(call: AttentionCall, turn: int) -> Tensor:
    """A call's numbers by `GLANCE`, which merge by maximum: float32 [3, H].

    Where nothing is known a lower bound and a maximum are -inf, an upper bound is +inf. Runs
    without gradients and autocast, and waits for nothing.

    Args:
        call: the call as softmax received it.
        turn: any number that counts up, as the step does.
    """
    given = call.q_BHQD if call.scores_BHQK is None else call.scores_BHQK
    with full_float32("cpu" if given is None else given.device.type):
        low_H, high_H = merging(*_bounds(call))
        rotating_H = torch.full_like(low_H, -INF)
        part, heads, blocks = _part(call, turn)
        largest_R = _largest_product(part, *blocks)
        if largest_R is not None:
            rotating_H[heads] = largest_R
    return torch.stack((low_H, high_H, rotating_H))


def glanced(table: Tensor) -> dict[str, Tensor]:
    """The statistics of merged glances [3, H]; NaN is absent."""
    return dict(zip(GLANCE, torch.where(torch.isfinite(table), table, float("nan")), strict=True))


def _bounds(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Both ends from what is there; from q and k, which must be read, only what their norms say."""
    free = call.lse_BHQ is not None or call.scores_BHQK is not None
    additive = any(mask.dtype != torch.bool for mask in call.masks)
    if free or additive or call.score_mod is not None:
        ends = bracket(call)
        return ends.low_H, ends.high_H
    high_H = reach(call)
    return torch.full_like(high_H, -INF), high_H


def _part(call: AttentionCall, turn: int) -> tuple[AttentionCall, slice, tuple[int, int]]:
    """Whose turn it is: a sequence's key head, its query heads, and which of how many blocks."""
    sizes = sizes_of(call)
    pairs = max(1, sizes.B * sizes.G)
    part, heads = head_of(call, turn)
    return part, heads, (turn // pairs, -(-SHARE // pairs))


def _largest_product(call: AttentionCall, turn: int, blocks: int) -> Tensor | None:
    """The largest |scale q.k| over visible pairs, per head [H]; None where q and k are not known.

    As `qk_abs_max_logit`, but of every `blocks`-th tile of rows only, and rows with a product that
    is not finite are left out whole. -inf where nothing is visible. None too where a function of
    positions makes the scores, since it may hide keys.
    """
    sizes = sizes_of(call)
    products = products_of(call, sizes)
    if products is None or sizes.empty or call.score_mod is not None:
        return None
    device = products.k_BGKD.device
    rows = _CPU_ROWS if device.type == "cpu" else None
    tiles = list(cut(sizes, causal=call.causal, device_type=device.type, most_rows=rows))
    masks = split_masks(call.masks, sizes)
    plain = not masks and call.mask_mod is None
    largest_BGR = torch.full((sizes.B, sizes.G, sizes.R), -INF, device=device)
    for tile in tiles[turn % min(blocks, len(tiles)) :: blocks]:
        S = torch.empty(tile.shape, device=device)
        products.fill(tile, S)
        if plain:
            rows_BGRQ = _of_rows(S, tile, causal=call.causal)
        else:
            rows_BGRQ = _of_masked_rows(S, tile, call, masks)
        known_BGRQ = torch.where(torch.isfinite(rows_BGRQ), rows_BGRQ, -INF)
        place = largest_BGR[tile.batch, tile.group]
        torch.maximum(place, known_BGRQ.amax(-1), out=place)
    return largest_BGR.amax(0).flatten()


def _of_rows(S: Tensor, tile: Tile, *, causal: bool) -> Tensor:
    """Largest absolute product of each row; one that the causal edge hides becomes 0."""
    if causal:
        S.tril_(tile.query.start)
    # two extrema cost a tenth of an infinity norm, which is not vectorised on a CPU
    return torch.maximum(S.amax(-1), S.amin(-1).neg_())


def _of_masked_rows(
    S: Tensor, tile: Tile, call: AttentionCall, masks: tuple[Tensor, ...]
) -> Tensor:
    mask = mask_tile(masks, tile, causal=call.causal, device=S.device, mask_mod=call.mask_mod)
    S.abs_()
    if mask.hidden is not None:
        S.add_(mask.hidden)
    return S.amax(-1)
