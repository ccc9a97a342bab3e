"""Which keys of a tile are visible, as float32 factors and addends.

Floats, because on a CPU arithmetic over a tile is ten times faster than `where` and
`masked_fill`. Axes stay at size 1 where the masks broadcast.

Shape suffixes: B batch, G key heads, R query heads per key head, Q query positions, K keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stability_probe.stats.tiles import Sizes, Tile, block_of, per_pair

MASKED_BIAS = -9e3  # an additive mask at or below this drops the key; -1e4 in bfloat16 is -9984
MASKED_SCORE = -6e4  # no score but one under a mask is as low: float16's minimum is -65504
_BELOW_MAXIMUM = 5e3  # how far below its row's maximum a score of MASKED_BIAS is a masked one

_INF = float("inf")


@dataclass(frozen=True, slots=True, eq=False)
class MaskTile:
    """The masks of one tile; None stands for "no such mask"."""

    kept: Tensor | None  # 0 where a bool mask or the causal edge drops the key, else 1
    bias: Tensor | None  # the sum of the additive masks
    unbiased: Tensor | None  # 0 where that sum masks the key, else 1
    visible: Tensor | None  # kept x unbiased
    hidden: Tensor | None  # what to add to a finite score: -inf where not visible
    shield: Tensor | None  # 0 where an additive mask drops the key, else -inf


def mask_tile(
    masks_BGRQK: Sequence[Tensor],
    tile: Tile,
    *,
    causal: bool,
    device: torch.device,
    mask_mod: Callable[..., Tensor] | None = None,
) -> MaskTile:
    """Read the masks of one tile.

    Args:
        masks_BGRQK: as `split_masks` gives them: bool, True where visible, or float, added.
        tile: the tile.
        causal: whether key j is hidden from query i wherever j > i.
        device: of the result.
        mask_mod: a function of positions, True where a key is visible.
    """
    kept = causal_tile(tile, device) if causal else None
    if mask_mod is not None:
        part = _function_tile(mask_mod, tile, device)
        kept = part if kept is None else kept * part
    bias = None
    for mask in masks_BGRQK:
        part = tile.of_pairs(mask).to(torch.float32)
        if mask.dtype == torch.bool:
            kept = part if kept is None else kept * part
        else:
            bias = part if bias is None else bias + part
    unbiased = None if bias is None else torch.gt(bias, MASKED_BIAS).to(torch.float32)
    visible = kept if unbiased is None else unbiased if kept is None else kept * unbiased
    return MaskTile(
        kept,
        bias,
        unbiased,
        visible,
        hidden=None if visible is None else hide(visible),
        shield=None if unbiased is None else hide(1 - unbiased),
    )


def _function_tile(mask_mod: Callable[..., Tensor], tile: Tile, device: torch.device) -> Tensor:
    """1 where a function of positions lets a key be seen, else 0: [B, G, R, Q, K]."""
    seen_BHQK = block_of(tile, device).visible(mask_mod).to(torch.float32)
    B, H, Q, K = seen_BHQK.shape
    G, R = tile.shape[1:3] if H > 1 else (1, 1)
    return seen_BHQK.view(B, G, R, Q, K)


def split_masks(masks: Sequence[Tensor], sizes: Sizes) -> tuple[Tensor, ...]:
    """The masks of a call, each as [B, G, R, Q, K] with broadcast axes kept at 1."""
    return tuple(per_pair(mask.detach(), sizes) for mask in masks)


def causal_tile(tile: Tile, device: torch.device, *, first_key: int = 0) -> Tensor:
    """1 where key j <= query i, else 0: [1, 1, 1, Q, K], K the tile's keys from the first."""
    i_Q = torch.arange(tile.query.start, tile.query.stop, device=device)
    j_K = torch.arange(first_key, tile.keys, device=device)
    return (j_K <= i_Q[:, None]).to(torch.float32)[None, None, None]


def hide(visible: Tensor) -> Tensor:
    """What to add to a finite score: 0 where `visible` is 1, -inf where it is 0."""
    return visible.sub(0.5).mul_(_INF).clamp_max_(0.0)


def guess_masked(scores: Tensor, largest: Tensor) -> Tensor:
    """1 where a score looks like one under an additive mask that is not known, else 0.

    Args:
        scores: [..., K], finite or -inf.
        largest: [..., 1], of each row.
    """
    low = torch.le(scores, MASKED_BIAS).logical_and_(scores < largest - _BELOW_MAXIMUM)
    return low.logical_or_(scores <= MASKED_SCORE).to(torch.float32)
