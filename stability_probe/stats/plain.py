"""The row pass over q and k where nothing but the causal edge hides a key: the fastest one.

Only here are scores never searched for values that are not finite. A bad query spoils its own row
and nothing else, and a bad key is replaced by a copy of one that its rows see anyway.

Shape suffixes: B batch, G key heads, R query heads per key head, Q query positions, K keys,
D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stability_probe.stats.masks import causal_tile, hide
from stability_probe.stats.rowsums import INF, Rows, buffers, count_ties, finish_rows, sum_rows
from stability_probe.stats.tiles import Products, Sizes


def plain_pass(
    products: Products,
    sizes: Sizes,
    rows: Rows,
    bad_BGK: Tensor | None,
    *,
    causal: bool,
    dtype: torch.dtype,
) -> None:
    """Fill the row numbers; entries beyond float16 are left at 0, and nothing leaks.

    Args:
        products: what fills the tiles.
        sizes: of the call.
        rows: to fill.
        bad_BGK: bool, the keys with a value that is not finite; None: there are none.
        causal: whether key j is hidden from query i wherever j > i.
        dtype: in which the run holds its scores.
    """
    _count_visible(rows, sizes, causal=causal)
    if bad_BGK is not None:
        products = _repair_keys(products, ~bad_BGK)
    device = products.k_BGKD.device
    for tile, (S, scratch) in buffers(sizes, device, causal=causal, count=2):
        out = rows.within(tile)
        products.fill(tile, S)
        start = min(tile.query.start, tile.keys) if causal else tile.keys
        corner = S[..., start:]  # the square on the diagonal: only here a key can be hidden
        visible = causal_tile(tile, device, first_key=start) if causal else None
        if visible is not None:
            corner.add_(hide(visible))
        torch.amax(S, -1, out=out["largest"])
        if "ties" in out:
            count_ties(dtype, S, scratch, out)
        S.sub_(out["largest"].unsqueeze(-1))
        if visible is not None:
            torch.maximum(corner, hide(1 - visible), out=corner)
        if "deviation" in out:
            _deviate(S, scratch, visible, out)
        sum_rows(S, scratch, out)
    finish_rows(rows)
    _count_trouble(rows, bad_BGK, causal=causal)
    for name in ("largest", "smallest"):
        rows["raw_" + name].copy_(rows[name])


def _deviate(
    shifted: Tensor, scratch: Tensor, visible: Tensor | None, out: dict[str, Tensor]
) -> None:
    """The standard deviation of S over the visible keys, and e of the first one."""
    n = out["visible"]
    mean = torch.sum(shifted, -1) / n
    torch.sub(shifted, mean.unsqueeze(-1), out=scratch)
    if visible is not None:
        first = scratch.shape[-1] - visible.shape[-1]  # of the keys in the corner
        scratch[..., first:].mul_(visible)
    torch.linalg.vector_norm(scratch, dim=-1, out=out["deviation"])
    out["deviation"].div_(n.sqrt())
    torch.exp(shifted[..., 0], out=out["first"])


def _repair_keys(products: Products, good_BGK: Tensor) -> Products:
    """Replace each key that is not finite by the nearest finite one before it.

    Every row that sees the bad key sees that one too, so the copy moves no maximum and no
    minimum. Leading bad keys become the first good one; rows that see nothing but those are known
    by their count.
    """
    B, G, K, D = products.k_BGKD.shape
    k = products.k_BGKD
    index = torch.arange(K, device=k.device).expand(B, G, K)
    before = torch.where(good_BGK, index, -1).cummax(-1).values
    first = good_BGK.to(torch.int32).argmax(-1, keepdim=True)
    source = torch.where(before < 0, first, before)
    heads = torch.arange(B * G, device=k.device).view(B, G, 1) * K
    repaired = k.reshape(-1, D).index_select(0, (source + heads).flatten())
    return Products(products.q_BGRQD, repaired.view(B, G, K, D), products.scale)


def _count_visible(rows: Rows, sizes: Sizes, *, causal: bool) -> None:
    if not causal:
        rows["visible"].fill_(float(sizes.K))
        return
    seen_Q = torch.arange(1, sizes.Q + 1, device=rows["visible"].device, dtype=torch.float32)
    rows["visible"].copy_(seen_Q.clamp_max_(float(sizes.K)))


def _count_trouble(rows: Rows, bad_BGK: Tensor | None, *, causal: bool) -> None:
    """Fill `trouble`, and take what bad keys and queries spoilt from the extrema.

    A row of scores that are not finite, for its query or for a product beyond float32, is counted
    where it shows: at its extrema.
    """
    lost = rows["trouble"].new_zeros(()) if bad_BGK is None else _lost(rows, bad_BGK, causal)
    alive = lost < rows["visible"]
    extrema = {"largest": -INF, "smallest": INF}
    usable = {name: alive & torch.isfinite(rows[name]) for name in extrema}
    rows["trouble"].copy_(lost + sum((alive & ~ok).to(torch.float32) for ok in usable.values()))
    for name, absent in extrema.items():
        rows[name].copy_(torch.where(usable[name], rows[name], absent))


def _lost(rows: Rows, bad_BGK: Tensor, causal: bool) -> Tensor:
    """How many bad keys each row sees, [B, G, 1, Q or 1]."""
    bad_keys_BGK = bad_BGK.to(torch.int32)
    if not causal:
        return bad_keys_BGK.sum(-1)[:, :, None, None]
    Q, K = rows.table.shape[-1], bad_BGK.shape[-1]
    last_Q = torch.arange(Q, device=bad_BGK.device).clamp_max_(K - 1)
    return bad_keys_BGK.cumsum(-1).index_select(-1, last_Q).unsqueeze(2)
