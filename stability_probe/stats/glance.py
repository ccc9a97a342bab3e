"""What the steps between measured ones get: bounds for every head, one head's maximum exactly.

Shape suffixes: B batch, G key heads, H query heads, R query heads per key head, Q query
positions, K key positions, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stability_probe.records import AttentionCall
from stability_probe.stats.accumulators import INF, merging
from stability_probe.stats.bounds import bracket
from stability_probe.stats.catalogue import BETWEEN_SET
from stability_probe.stats.masks import mask_tile, split_masks
from stability_probe.stats.part import head_of
from stability_probe.stats.precision import full_float32
from stability_probe.stats.tiles import Products, Sizes, cut, products_of, sizes_of

GLANCE = ("max_logit_low", "max_logit_high", "rotating_max_logit")
assert set(GLANCE) == set(BETWEEN_SET)
_CAUSAL_ROWS = 256  # for one head fewer, larger tiles are cheaper than less of the square


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
        bounds = bracket(call)
        low_H, high_H = merging(bounds.low_H, bounds.high_H)
        rotating_H = torch.full_like(low_H, -INF)
        part, heads = head_of(call, turn)
        largest_R = largest_product(part)
        if largest_R is not None:
            rotating_H[heads] = largest_R
    return torch.stack((low_H, high_H, rotating_H))


def glanced(table: Tensor) -> dict[str, Tensor]:
    """The statistics of merged glances [3, H]; NaN is absent."""
    return dict(zip(GLANCE, torch.where(torch.isfinite(table), table, float("nan")), strict=True))


def largest_product(call: AttentionCall) -> Tensor | None:
    """The largest |scale q.k| over visible pairs, per head [H]; None where q and k are not known.

    As `qk_abs_max_logit`, but rows with a product that is not finite are left out whole. -inf
    where nothing is visible. None too where a function of positions makes the scores, since it
    may hide keys.
    """
    sizes = sizes_of(call)
    products = products_of(call, sizes)
    if products is None or sizes.empty or call.score_mod is not None:
        return None
    masked = bool(call.masks) or call.mask_mod is not None
    rows_BGRQ = _masked(call, products, sizes) if masked else _plain(call, products, sizes)
    rows_BGRQ.masked_fill_(~torch.isfinite(rows_BGRQ), -INF)
    return rows_BGRQ.amax((0, 3)).flatten()


def _plain(call: AttentionCall, products: Products, sizes: Sizes) -> Tensor:
    """Row by row where nothing but the causal edge hides a key: a hidden product becomes 0."""
    rows_BGRQ = products.q_BGRQD.new_empty(
        (sizes.B, sizes.G, sizes.R, sizes.Q), dtype=torch.float32
    )
    for tile in cut(
        sizes, causal=call.causal, device_type=rows_BGRQ.device.type, causal_rows=_CAUSAL_ROWS
    ):
        S = rows_BGRQ.new_empty(tile.shape)
        products.fill(tile, S)
        if call.causal:
            S.tril_(tile.query.start)
        torch.linalg.vector_norm(S, INF, dim=-1, out=tile.of_rows(rows_BGRQ))
    return rows_BGRQ


def _masked(call: AttentionCall, products: Products, sizes: Sizes) -> Tensor:
    masks, device = split_masks(call.masks, sizes), products.k_BGKD.device
    rows_BGRQ = torch.full((sizes.B, sizes.G, sizes.R, sizes.Q), -INF, device=device)
    for tile in cut(sizes, causal=call.causal, device_type=device.type, causal_rows=_CAUSAL_ROWS):
        S = rows_BGRQ.new_empty(tile.shape)
        products.fill(tile, S)
        mask = mask_tile(masks, tile, causal=call.causal, device=device, mask_mod=call.mask_mod)
        S.abs_()
        if mask.hidden is not None:
            S.add_(mask.hidden)
        torch.amax(S, -1, out=tile.of_rows(rows_BGRQ))
    return rows_BGRQ
