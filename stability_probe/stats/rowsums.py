"""What one read of a row of scores leaves behind.

A row's scores S are shifted by their maximum m and read once: e = exp(S - m). Two tricks carry
the accuracy and the speed:

- S - m is held at -43 or above. e^2 then stays a normal float32 (denormals cost forty times as
  much, exactly when heads collapse), and a row gains at most 2e-19 of false mass per key.
- e is 1 exactly at a row's maximum, and only there or a rounding away. `frac_` turns 1 into 0, so
  what is summed is the mass *off* the maximum, which in a nearly one-hot row is all there is to
  know and would drown in 1 + 1e-9. A masked key is given the score m for the same reason: it then
  vanishes from every sum, and from the minimum.

Shape suffixes: B batch, G key heads, R query heads per key head, Q query positions, K keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stability_probe.stats.tiles import Sizes, Tile, cut

INF = float("inf")
FLOOR = -43.0
_LOG2_E = math.log2(math.e)

DEFAULT_ROWS = (
    "largest",  # max of S over visible, finite entries; -inf: there is none
    "smallest",  # min likewise; +inf: there is none
    "raw_largest",  # the same of scale x q.k, before soft-cap and bias
    "raw_smallest",
    "gap",  # sum of (largest - S)
    "ones",  # number of entries at the maximum
    "off",  # sum of e over the others
    "off_square",  # sum of e^2 over the others
    "moment",  # sum of e (S - largest)
    "visible",  # n, the number of visible keys
    "trouble",  # number of scores that are not finite
)
FULL_ROWS = (
    *DEFAULT_ROWS,
    "deviation",  # standard deviation of S
    "ties",  # entries equal to the largest after rounding to the run's dtype
    "first",  # e of the first key
    "leak",  # largest weight of a key under a finite mask
    "unscaled",  # finite entries with |q.k| above float16's range
    "scaled",  # finite entries with |S| above it
)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Row numbers by name, each float32 [..., B, G, R, Q] or any part of it."""

    names: tuple[str, ...]
    table: Tensor  # [len(names), B, G, R, Q]

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> Tensor:
        return self.table[self.names.index(name)]

    def within(self, tile: Tile) -> dict[str, Tensor]:
        """The tile's part of every row number, to write into."""
        part = self.table[:, tile.batch, tile.group, :, tile.query]
        return dict(zip(self.names, part.unbind(0), strict=True))

    def per_head(self) -> dict[str, Tensor]:
        """Every row number as [B, H, Q]."""
        return dict(zip(self.names, self.table.flatten(2, 3).unbind(0), strict=True))


def empty_rows(sizes: Sizes, device: torch.device, *, full: bool) -> Rows:
    """Row numbers with nothing seen."""
    names = FULL_ROWS if full else DEFAULT_ROWS
    shape = (len(names), sizes.B, sizes.G, sizes.R, sizes.Q)
    rows = Rows(names, torch.zeros(shape, dtype=torch.float32, device=device))
    for name, absent in (("largest", -INF), ("smallest", INF)):
        rows[name].fill_(absent)
        rows["raw_" + name].fill_(absent)
    return rows


def buffers(
    sizes: Sizes, device: torch.device, *, causal: bool, count: int
) -> Iterator[tuple[Tile, list[Tensor]]]:
    """Every tile with `count` float32 buffers of its shape, used again for the next tile."""
    tiles = list(cut(sizes, causal=causal, device_type=device.type))
    most = max(torch.Size(t.shape).numel() for t in tiles)
    store = [torch.empty(most, dtype=torch.float32, device=device) for _ in range(count)]
    for tile in tiles:
        n = torch.Size(tile.shape).numel()
        yield tile, [buffer[:n].view(tile.shape) for buffer in store]


def count_ties(dtype: torch.dtype, S: Tensor, scratch: Tensor, out: dict[str, Tensor]) -> None:
    """How many entries of a row equal its largest, as the run's dtype holds them."""
    if dtype == torch.float32:
        torch.eq(S, out["largest"].unsqueeze(-1), out=scratch)
    else:
        scratch.copy_(S.to(dtype)).eq_(out["largest"].to(dtype).to(torch.float32).unsqueeze(-1))
    torch.sum(scratch, -1, out=out["ties"])


def sum_rows(shifted: Tensor, scratch: Tensor, out: dict[str, Tensor]) -> None:
    """Read S - largest, 0 where masked, into `out`; both tensors are used up.

    `ones` still lacks the number of visible keys, `gap` its sign and `off_square` its square:
    `finish_rows` sees to all rows at once.
    """
    torch.amin(shifted, -1, out=out["smallest"])
    torch.sum(shifted, -1, out=out["gap"])
    shifted.clamp_min_(FLOOR)
    e = torch.mul(shifted, _LOG2_E, out=scratch).exp2_()  # three times as fast as exp on a CPU
    torch.sum(e, -1, out=out["ones"])
    e.frac_()
    torch.sum(e, -1, out=out["off"])
    out["ones"].sub_(out["off"]).sub_(float(shifted.shape[-1]))
    torch.linalg.vector_norm(e, dim=-1, out=out["off_square"])
    torch.sum(shifted.mul_(e), -1, out=out["moment"])


def finish_rows(rows: Rows) -> None:
    """Complete what `sum_rows` left open, in place, once `visible` is known."""
    rows["smallest"].add_(rows["largest"])
    rows["gap"].neg_()
    rows["ones"].add_(rows["visible"]).round_()
    rows["off_square"].square_()
