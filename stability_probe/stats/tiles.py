"""How one attention call is cut into tiles, and the products that fill a tile.

Shape suffixes: B batch, G key heads, R query heads per key head (H = G R), Q query positions,
K key positions, D head width; N = batch x key heads within a tile, q and k the tile's share of Q
and K. The R query heads of a key head are folded into the rows of its product, so that grouped
keys are never repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stability_probe.positions import Block
from stability_probe.records import AttentionCall

_CPU_TILE = 2**19  # scores: 2 MB of float32; smaller ones cost more in launches than cache saves
_CPU_CAUSAL_ROWS = 128  # more rows waste more of the square on the diagonal
_CPU_SLAB = 2**13  # keys whose rows are made float32 at a time: 2 MB of width 64
_DEVICE_TILE = 2**24  # elsewhere each launch costs more than the memory: 64 MB
_DEVICE_CAUSAL_ROWS = 512


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of one attention call."""

    B: int
    G: int
    R: int
    Q: int
    K: int

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.G * self.R

    @property
    def empty(self) -> bool:
        """Whether there is no score at all."""
        return 0 in (self.B, self.G, self.R, self.Q, self.K)


@dataclass(frozen=True, slots=True)
class Tile:
    """Some heads, a block of their queries, and every key that the block can see."""

    batch: slice
    group: slice
    query: slice
    shape: tuple[int, int, int, int, int]  # B, G, R, Q, K of the tile
    slab: slice  # of the sequences that come before all others, the tile's among them

    @property
    def keys(self) -> int:
        """Number of keys: all, or those before the block's causal edge."""
        return self.shape[-1]

    def of_rows(self, rows_BGRQ: Tensor) -> Tensor:
        """The tile's part of a tensor with one value per row."""
        return rows_BGRQ[self.batch, self.group, :, self.query]

    def of_pairs(self, pairs_BGRQK: Tensor) -> Tensor:
        """The tile's part of a tensor over pairs whose axes may also be of size 1."""
        cuts = (self.batch, self.group, slice(None), self.query, slice(self.keys))
        whole = slice(None)
        return pairs_BGRQK[
            tuple(whole if n == 1 else cut for n, cut in zip(pairs_BGRQK.shape, cuts, strict=True))
        ]


def block_of(tile: Tile, device: torch.device) -> Block:
    """The positions of a tile, its query heads side by side, for functions of positions."""
    repeats = tile.shape[2]
    heads = slice(tile.group.start * repeats, tile.group.stop * repeats)
    keys = slice(0, tile.keys)
    return Block(
        *(
            torch.arange(s.start, s.stop, device=device)
            for s in (tile.batch, heads, tile.query, keys)
        )
    )


def sizes_of(call: AttentionCall) -> Sizes:
    """The sizes of a call, from its scores where it has no q and k."""
    if call.q_BHQD is not None and call.k_BGKD is not None:
        B, H, Q, _ = call.q_BHQD.shape
        G, K = call.k_BGKD.shape[1:3]
        return Sizes(B, G, H // G, Q, K)
    if call.scores_BHQK is None:
        raise ValueError(f"an attention call of {call.layer!r} has neither q and k nor scores")
    B, H, Q, K = call.scores_BHQK.shape
    return Sizes(B, H, 1, Q, K)


def cut(
    sizes: Sizes, *, causal: bool, device_type: str, most_rows: int | None = None
) -> Iterator[Tile]:
    """Tiles that together hold every row once, each small enough to stay in cache.

    Args:
        sizes: of the call.
        causal: whether keys end at the causal edge of a tile.
        device_type: as `torch.device.type` gives it.
        most_rows: of a tile, over its query heads; None for what is best for whole calls.
    """
    G, R, Q, K = sizes.G, sizes.R, sizes.Q, sizes.K
    cpu = device_type == "cpu"
    budget = _CPU_TILE if cpu else _DEVICE_TILE
    rows = min(Q, max(16, budget // (R * K)))
    if causal and most_rows is None:
        most_rows = _CPU_CAUSAL_ROWS if cpu else _DEVICE_CAUSAL_ROWS
    if most_rows is not None:
        rows = min(rows, max(16, most_rows // R))
    for slab in _runs(slice(0, sizes.B), max(1, _CPU_SLAB // (G * K)) if cpu else sizes.B):
        for query in _runs(slice(0, Q), rows):
            keys = min(query.stop, K) if causal else K
            many = max(1, budget // (R * (query.stop - query.start) * keys))
            for batch, group in _heads(slab, G, many):
                b, g, q = (s.stop - s.start for s in (batch, group, query))
                yield Tile(batch, group, query, (b, g, R, q, keys), slab)


def _runs(whole: slice, many: int) -> Iterator[slice]:
    """Runs of at most `many`."""
    for start in range(whole.start, whole.stop, many):
        yield slice(start, min(start + many, whole.stop))


def _heads(slab: slice, G: int, many: int) -> Iterator[tuple[slice, slice]]:
    """Runs of at most `many` heads that are either whole sequences or parts of one."""
    if many >= G:
        yield from ((batch, slice(0, G)) for batch in _runs(slab, many // G))
        return
    for batch in _runs(slab, 1):
        yield from ((batch, group) for group in _runs(slice(0, G), many))


@dataclass(slots=True, eq=False)
class Products:
    """The products scale x q.k of one call, in float32.

    Keys are made float32 slab by slab, as the tiles come: whole copies of long calls would be
    most of the memory that the statistics take.
    """

    q_BGRQD: Tensor
    k_BGKD: Tensor
    scale: Tensor  # float32, [B or 1, G or 1, R or 1, 1, 1]
    _slab: slice | None = None
    _rows_BGKD: Tensor | None = None  # of that slab: contiguous float32

    def fill(self, tile: Tile, out_BGRQK: Tensor) -> None:
        """Write the tile's products into `out_BGRQK`, which is contiguous."""
        b, g, r, q, n = tile.shape
        q_BGRQD = tile.of_rows(self.q_BGRQD).to(torch.float32) * tile.of_pairs(self.scale)
        first = tile.slab.start
        batch = slice(tile.batch.start - first, tile.batch.stop - first)
        k_NDK = self._rows(tile.slab)[batch, tile.group].flatten(0, 1)[:, :n].transpose(1, 2)
        out = out_BGRQK.view(b * g, r * q, n)
        torch.bmm(q_BGRQD.reshape(b * g, r * q, -1), k_NDK, out=out)

    def _rows(self, slab: slice) -> Tensor:
        if self._rows_BGKD is None or self._slab != slab:
            self._rows_BGKD = None  # before the next ones are made
            k = self.k_BGKD[slab].to(torch.float32, memory_format=torch.contiguous_format)
            self._slab, self._rows_BGKD = slab, k.contiguous()
        return self._rows_BGKD


def products_of(call: AttentionCall, sizes: Sizes) -> Products | None:
    """What fills the tiles of a call; None where q and k are not known."""
    if call.q_BHQD is None or call.k_BGKD is None:
        return None
    return Products(
        q_BGRQD=split_heads(call.q_BHQD.detach(), sizes),
        k_BGKD=call.k_BGKD.detach(),
        scale=scale_of(call, sizes, call.q_BHQD.device),
    )


def scale_of(call: AttentionCall, sizes: Sizes, device: torch.device) -> Tensor:
    """The scale of a call as float32 [B or 1, G or 1, R or 1, 1, 1]."""
    if isinstance(call.scale, Tensor):
        return per_pair(call.scale.detach().to(device, torch.float32), sizes)
    return torch.full((1,) * 5, call.scale, dtype=torch.float32, device=device)


def per_pair(x: Tensor, sizes: Sizes) -> Tensor:
    """A tensor that broadcasts to [B, H, Q, K], as [B, G, R, Q, K] with axes of 1 kept at 1."""
    x_BHQK = x[(None,) * (4 - x.dim())]
    return x_BHQK.unsqueeze(1) if x_BHQK.shape[1] == 1 else split_heads(x_BHQK, sizes)


def split_heads(x_BH: Tensor, sizes: Sizes) -> Tensor:
    """The same values with the head axis split in two: [B, G, R, ...]."""
    return x_BH.view(x_BH.shape[0], sizes.G, sizes.R, *x_BH.shape[2:])
