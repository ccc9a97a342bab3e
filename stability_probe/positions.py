"""Score and mask functions of positions, over whole blocks of indices.

FlexAttention's functions take one score and four single indices: ``score_mod(score, b, h, q, k)``
and ``mask_mod(b, h, q, k)``. Here they are vectorised over the four axes, for any block of them.

Shape suffixes: B sequences, H query heads, Q query positions, K key positions of the block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """The indices of a block of scores: integer tensors of one axis each."""

    b_B: Tensor
    h_H: Tensor
    q_Q: Tensor
    k_K: Tensor

    def modified(self, score_mod: Callable[..., Tensor], scores_BHQK: Tensor) -> Tensor:
        """The scores that `score_mod` makes of the block's scaled products [B, H, Q, K]."""
        with _IndexOnDevice():
            made: Tensor = _over_axes(score_mod, scores=True)(
                scores_BHQK, self.b_B, self.h_H, self.q_Q, self.k_K
            )
        return made

    def visible(self, mask_mod: Callable[..., Tensor]) -> Tensor:
        """Where `mask_mod` lets a key be seen: bool [B, H, Q, K].

        An axis on which the function does not depend has size 1.
        """
        with _IndexOnDevice():
            seen: Tensor = _over_axes(mask_mod, scores=False)(
                self.b_B, self.h_H, self.q_Q, self.k_K
            )
        # vmap expands what does not depend on an axis, and an expanded axis has stride 0
        for axis, stride in enumerate(seen.stride()):
            if stride == 0:
                seen = seen.narrow(axis, 0, min(1, seen.shape[axis]))
        return seen


def _over_axes(mod: Callable[..., Tensor], *, scores: bool) -> Callable[..., Tensor]:
    """`mod` of single indices as a function of four index vectors (after the scores, if any)."""
    lead = (0,) if scores else ()
    for axis in (3, 2, 1, 0):
        axes = tuple(0 if i == axis else None for i in range(4))
        mod = torch.vmap(mod, in_dims=(*lead, *axes))
    return mod


class _IndexOnDevice(TorchFunctionMode):
    """Lets ``table[b, q]`` be read with index tensors of one element.

    Plain indexing turns such an index into a Python number, which waits for the device and which
    `torch.vmap` refuses.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            tensors = [i for i in index if isinstance(i, Tensor)]
            if tensors and all(isinstance(i, Tensor | int) for i in index):
                device = tensors[0].device
                whole = [
                    i if isinstance(i, Tensor) else torch.full((), i, device=device) for i in index
                ]
                return torch.ops.aten.index(args[0], whole)
        return func(*args, **(kwargs or {}))
