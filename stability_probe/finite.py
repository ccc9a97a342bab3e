"""Whether tensors are finite, where a look costs no wait: on a CPU.

The one place where values decide what runs next. On a device nothing is ever looked at.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)


def known_finite(*tensors: Tensor | None) -> bool:
    """Whether all are known to be finite without waiting: on a CPU, and nowhere else.

    One sum each. False means "count", not "not finite": a sum beyond float32 is not finite
    either, and what lies on a device, or is more than a plain tensor, is not looked at.
    """
    for given in tensors:
        if (tensor := local(given)) is None:
            continue
        if not tensor.is_cpu or type(tensor) not in _PLAIN:
            return False
        # No wait: `numpy` gives the memory that the sum was written to before it returned.
        if not math.isfinite(_total(tensor).numpy()):
            return False
    return True


def known_at_most(x: Tensor, limit: float) -> bool:
    """Whether all values are known to be at most `limit`, as `known_finite` knows."""
    return x.is_cpu and type(x) in _PLAIN and bool(x.detach().amax().float().numpy() <= limit)


def local(tensor: Tensor | None) -> Tensor | None:
    """The part of a tensor that lies on this rank; None of nothing."""
    to_local = getattr(tensor, "to_local", None)
    tensor = tensor if to_local is None else to_local()
    return None if tensor is None or tensor.numel() == 0 else tensor


def _total(x: Tensor) -> Tensor:
    """Sum, 0-dim float32, in the order of memory.

    A view into a fused projection is read fastest row by row of memory, into a sum for each
    column of its heads.
    """
    x = x.detach()
    if x.dtype == torch.float16:  # its own range would overflow
        return x.sum(dtype=torch.float32)
    fused = x.dim() == 4 and x.numel() * x.itemsize < x.untyped_storage().nbytes()
    return (x.sum((0, 2)) if fused else x).sum().float()
