"""Packed sequences, windows and slopes as functions of positions.

A packed tensor holds many sequences one after another, told apart by their cumulative lengths.
Which key a query sees is then a function of positions over a few vectors as long as the sequence;
nothing here forms a square, and nothing waits for the device.

Shape suffixes: Q query positions, K key positions, N sequences, B batch, H query heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MaskMod = Callable[..., Tensor]
ScoreMod = Callable[..., Tensor]


class UnsupportedCallError(Exception):
    """A call that cannot be read; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where each position of a packed axis lies."""

    sequence: Tensor  # index of its sequence; positions outside of all have one of their own
    position: Tensor  # within the sequence
    lengths_N: Tensor  # of the sequences


def places(
    starts_N1: Tensor, total: int, *, lengths_N: Tensor | None = None, outside: int = -1
) -> Places:
    """The places of `total` packed positions.

    Args:
        starts_N1: where each sequence starts, and where the last one ends: cumulative lengths.
        total: how many positions there are.
        lengths_N: where sequences are shorter than the room between their starts.
        outside: the index given to positions of no sequence; below 0, and another for queries
            than for keys, so that they see nothing.
    """
    starts_N1 = starts_N1.detach().to(torch.int64)
    if lengths_N is None:
        lengths_N = starts_N1.diff()
    count = lengths_N.shape[0]
    index = torch.arange(total, device=starts_N1.device)
    sequence = torch.searchsorted(starts_N1[1:].contiguous(), index, right=True)
    inside = sequence.clamp_max(count - 1)
    position = index - starts_N1[inside]
    real = (sequence < count) & (position < lengths_N[inside])
    return Places(torch.where(real, sequence, outside), position, lengths_N.to(torch.int64))


def between(
    q: Places, k: Places, window: tuple[int, int], *, bottom_right: bool
) -> tuple[MaskMod, Callable[[Tensor, Tensor], Tensor]]:
    """Which key of the same sequence a query sees, and how far it lies.

    Args:
        q: the places of the queries.
        k: the places of the keys.
        window: how far a query sees to the left and to the right; below 0: without limit.
        bottom_right: whether the last query stands at the last key, or the first at the first.

    Returns:
        The mask, and a function (q, k) -> position of the key minus that of the query.
    """
    stand = q.position
    if bottom_right:
        ahead_N = k.lengths_N - q.lengths_N
        stand = stand + ahead_N[q.sequence.clamp_min(0)]

    def distance(i: Tensor, j: Tensor) -> Tensor:
        return k.position[j] - stand[i]

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        same = q.sequence[i] == k.sequence[j]
        return same & _within(distance(i, j), window)

    return mask, distance


def window_mask(window: tuple[int, int], *, ahead: int = 0) -> MaskMod | None:
    """A sliding window over whole sequences; None where it hides nothing.

    Args:
        window: how far a query sees to the left and to the right; below 0: without limit.
        ahead: the key position at which the first query stands: keys minus queries where the
            last ones are aligned.
    """
    if window[0] < 0 and window[1] < 0:
        return None

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return _within(j - i - ahead, window)

    return mask


def _within(distance: Tensor, window: tuple[int, int]) -> Tensor:
    left, right = window
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        seen = seen & (distance >= -left)
    if right >= 0:
        seen = seen & (distance <= right)
    return seen


def with_slopes(
    slopes: Tensor, distance: Callable[[Tensor, Tensor], Tensor], softcap: float | None
) -> ScoreMod:
    """The soft-cap, then ALiBi: -slope x |distance| added to the score.

    Args:
        slopes: [H] or [B, H].
        distance: (q, k) -> position of the key minus that of the query.
        softcap: c of c tanh(s / c), or None.
    """
    slopes_BH = slopes.detach()

    def modified(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        slope = slopes_BH[h] if slopes_BH.dim() == 1 else slopes_BH[b, h]
        capped = s if softcap is None else softcap * torch.tanh(s / softcap)
        return capped - slope * distance(i, j).abs()

    return modified


def both(one: MaskMod | None, other: MaskMod | None) -> MaskMod | None:
    """A key is visible where both masks let it be."""
    if one is None or other is None:
        return one or other
    first, second = one, other
    return lambda b, h, i, j: first(b, h, i, j) & second(b, h, i, j)
