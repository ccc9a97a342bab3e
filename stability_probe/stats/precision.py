"""Full float32 whatever the model runs in, what float16 can hold, and what is not finite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_CPU_PIECE = 2**18  # values at a time: memory that is used again costs no page faults
FLOAT16_MAX = 65504.0  # the largest finite float16


@contextmanager
def full_float32(device_type: str) -> Iterator[None]:
    """Run a block without gradients, without autocast, and with whole float32 products.

    Autocast would turn even explicit float32 products into half ones, and
    `torch.set_float32_matmul_precision("high")` turns them into TF32 or bfloat16 ones; either
    moves a logit by 4e-3 of its size. The product precision is a setting of the whole process:
    it is changed for the duration of the block, in which no user code runs, and put back even if
    the block raises. A product that another thread starts in that time runs in full float32 too.

    Args:
        device_type: of the tensors in the block, as `torch.device.type` gives it.
    """
    lowered = [(s, s.fp32_precision) for s in _products() if s.fp32_precision not in _WHOLE]
    with torch.no_grad(), torch.autocast(device_type, enabled=False):
        try:
            for setting, _ in lowered:
                setting.fp32_precision = "ieee"
            yield
        finally:
            for setting, value in lowered:
                _restore(setting, value)


_WHOLE = ("ieee", "none")  # "none": nobody has asked for anything else


def _products() -> tuple[Any, ...]:
    backends: Any = torch.backends  # mkldnn.matmul is missing from torch's own type stubs
    return backends.cuda.matmul, backends.mkldnn.matmul


def _restore(setting: Any, value: str) -> None:
    # A value that came from a wider setting is inherited again, not pinned: a user who changes
    # the wider one later expects products to follow.
    setting.fp32_precision = "none"
    if setting.fp32_precision != value:
        setting.fp32_precision = value


def count_nonfinite(x: Tensor) -> Tensor:
    """Number of NaN and infinite values along the last axis of `x`, as float32 [...]."""
    count = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return count.zero_()
    step = max(1, (_CPU_PIECE if x.device.type == "cpu" else x.numel()) // x[0].numel())
    store = torch.empty_like(x[:step])
    for piece, out in zip(torch.split(x, step), torch.split(count, step), strict=True):
        # x - x is 0 where x is finite and NaN elsewhere: several times cheaper than isfinite
        difference = torch.sub(piece, piece, out=store[: len(piece)])
        torch.sum(difference.ne_(0), -1, dtype=torch.float32, out=out)
    return count


def row_norms(x: Tensor) -> Tensor:
    """L2 norms along the last axis of `x`, taken in float32, as float32 [...]."""
    norm = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    whole = x.numel() == 0 or x.device.type != "cpu" or x.dtype == torch.float32
    step = len(x) if whole else max(1, _CPU_PIECE // x[0].numel())
    for piece, out in zip(torch.split(x, step), torch.split(norm, step), strict=True):
        torch.linalg.vector_norm(piece.to(torch.float32), dim=-1, out=out)
    return norm


def rounds_to_one(dtype: torch.dtype) -> float:
    """The largest 1 - p at which p, rounded to a floating `dtype`, is exactly 1."""
    return float(torch.finfo(dtype).eps) / 4  # half the spacing below 1; ties go to even: to 1
