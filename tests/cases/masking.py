"""Which keys a query sees, in which pattern, and the ways to write that down."""

from __future__ import annotations

import math

import torch
from attending import random
from torch import Tensor

B, H, T, D = 2, 3, 12, 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# ------------------------------------------------------------------ patterns: True is visible


def causal(t: int = T) -> Tensor:
    return torch.ones(t, t, dtype=torch.bool).tril()


def padded_keys(*lengths: int, left: bool = False) -> Tensor:
    """[B, 1, 1, T]: each sequence's real tokens."""
    j = torch.arange(T)
    rows = [(j >= T - n) if left else (j < n) for n in lengths]
    return torch.stack(rows)[:, None, None]


def packed() -> Tensor:
    document = torch.tensor([0] * 5 + [1] * 1 + [2] * 6)
    return (document[:, None] == document) & causal()


PATTERNS = {
    "all visible": torch.ones(1, 1, T, T, dtype=torch.bool),
    "causal": causal()[None, None],
    "right padding": padded_keys(T, 5) & causal(),
    "left padding": padded_keys(T, 4, left=True) & causal(),
    "left padding, not causal": padded_keys(T, 4, left=True),
    "one sample all padding": padded_keys(T, 0),
    "padded queries too": padded_keys(9, 4) & padded_keys(9, 4).mT,
    "a window": (causal() & ~causal().tril(-4))[None, None],
    "a window narrower than the padding": padded_keys(T, 4) & causal() & ~causal().tril(-3),
    "packed documents": packed()[None, None],
    "holes": (random(B, 1, T, T, seed=4) > 0),
    "by head": (random(1, H, T, T, seed=5) > 0.3),
    "one key a row": torch.eye(T, dtype=torch.bool)[None, None],
}

# ------------------------------------------------------------------ spellings of a dropped key


def lowest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).min


def plane(keep: Tensor, value: float, dtype: torch.dtype) -> Tensor:
    return torch.zeros(keep.shape, dtype=dtype).masked_fill(~keep, value)


SPELLINGS = {
    "fill -inf": lambda s, m: s.masked_fill(~m, -math.inf),
    "fill finfo.min": lambda s, m: s.masked_fill(~m, lowest(s.dtype)),
    "fill -1e4": lambda s, m: s.masked_fill(m.logical_not(), -1e4),
    "fill in place": lambda s, m: s.masked_fill_(~m, -math.inf),
    "where finfo.min": lambda s, m: torch.where(m, s, torch.full([], lowest(s.dtype)).to(s)),
    "where tensor of -1e4": lambda s, m: torch.where(~m, torch.tensor(-1e4, dtype=s.dtype), s),
    "add -inf": lambda s, m: s + plane(m, -math.inf, s.dtype),
    "add finfo.min": lambda s, m: s + plane(m, lowest(s.dtype), s.dtype),
    "add (1 - m) * -1e4": lambda s, m: s + (1.0 - m.to(s.dtype)) * -10000.0,
    "add two planes": lambda s, m: s + plane(m, lowest(s.dtype), s.dtype)
    + plane(m, lowest(s.dtype), s.dtype),
    "add a sum of planes": lambda s, m: s
    + (plane(m, lowest(s.dtype), s.dtype) + plane(m, lowest(s.dtype), s.dtype)),
    "+=": lambda s, m: s.__iadd__(plane(m, lowest(s.dtype), s.dtype)),
}  # fmt: skip


def eager(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, spelling: str, got: list) -> Tensor:
    scores = (q @ k.mT) * (1 / math.sqrt(D))
    got.append(scores.detach().clone())
    scores = SPELLINGS[spelling](scores, keep)
    return torch.softmax(scores, -1) @ v


MASKS_OF_SDPA = {
    "bool": lambda m, d: m,
    "-inf": lambda m, d: plane(m, -math.inf, d),
    "finfo.min": lambda m, d: plane(m, lowest(d), d),
    "finfo.min twice": lambda m, d: plane(m, lowest(d), d) + plane(m, lowest(d), d),
    "-1e4": lambda m, d: plane(m, -1e4, d),
    "-65504": lambda m, d: plane(m, -65504.0, d),
    "-1e9, which float16 holds as -inf": lambda m, d: plane(m, -1e9, torch.float32).to(d),
}
