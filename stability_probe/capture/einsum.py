"""Reads a score matrix out of an einsum: which operand holds the queries, which the keys."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def einsum_operands(
    args: tuple[Any, ...],
) -> tuple[Tensor, Tensor, tuple[int, int], tuple[Tensor, Tensor]] | None:
    """q [..., Q, D], k [..., K, D], the axes of an einsum that contracts one index, its factors.

    The operand that owns an output letter later in the equation's result holds the keys.
    """
    if not args or not isinstance(args[0], str) or "->" not in args[0] or "." in args[0]:
        return None
    operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    left, right = args[0].replace(" ", "").split("->")
    names = left.split(",")
    if len(names) != 2 or len(operands) != 2:
        return None
    contracted = [c for c in names[0] if c in names[1] and c not in right]
    own = [[c for c in right if c in a and c not in b] for a, b in (names, reversed(names))]
    if len(contracted) != 1 or not own[0] or not own[1]:
        return None
    (width,), first, second = contracted, own[0][-1], own[1][-1]  # others are groups of heads
    pairs = [(operands[0], names[0], first), (operands[1], names[1], second)]
    pairs.sort(key=lambda pair: right.index(pair[2]))
    batch = [c for c in right if c not in (first, second)]
    q, k = (_laid_out(tensor, letters, [*batch, row, width]) for tensor, letters, row in pairs)
    axes = (right.index(pairs[0][2]) - len(right), right.index(pairs[1][2]) - len(right))
    return q, k, axes, (pairs[0][0], pairs[1][0])


def _laid_out(tensor: Tensor, letters: str, wanted: list[str]) -> Tensor:
    """A view of the tensor with its axes in the wanted order, missing ones of size one."""
    present = [c for c in wanted if c in letters]
    view = tensor.permute([letters.index(c) for c in present])
    for i, c in enumerate(wanted):
        if c not in letters:
            view = view.unsqueeze(i)
    return view
