"""Operators called with keywords: the same scores, whichever argument carries them.

BLOOM calls `alibi.baddbmm(batch1=..., batch2=..., beta=..., alpha=...)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from attending import Attention, assert_agree, dense, random, watch_once
from torch import Tensor

B, H, T, D = 2, 3, 10, 8
SCALE = 1 / math.sqrt(D)
HIDDEN = torch.ones(T, T, dtype=torch.bool).triu(1)
BIAS = random(H, T, T, seed=5)


def flat(x: Tensor) -> Tensor:
    return x.flatten(0, 1)


def plane() -> Tensor:
    return BIAS.repeat(B, 1, 1)


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul(input, other)": lambda q, k: torch.matmul(input=q, other=k.mT) * SCALE + BIAS,
    "q.matmul(tensor2)": lambda q, k: q.matmul(k.mT) * SCALE + BIAS,
    "bmm(mat2)": lambda q, k: torch.bmm(flat(q), mat2=flat(k).mT).view(B, H, T, T) * SCALE + BIAS,
    "q.bmm(mat2)": lambda q, k: flat(q).bmm(mat2=flat(k).mT).view(B, H, T, T) * SCALE + BIAS,
    "bias.baddbmm(batch1, batch2)": lambda q, k: (
        plane().baddbmm(batch1=flat(q), batch2=flat(k).mT, beta=1.0, alpha=SCALE).view(B, H, T, T)
    ),
    "baddbmm(input, batch1, batch2)": lambda q, k: torch.baddbmm(
        input=plane(), batch1=flat(q), batch2=flat(k).mT, alpha=SCALE
    ).view(B, H, T, T),
    "baddbmm(bias, batch1, batch2)": lambda q, k: torch.baddbmm(
        plane(), batch1=flat(q), batch2=flat(k).mT, alpha=SCALE
    ).view(B, H, T, T),
    "baddbmm that ignores its input": lambda q, k: (
        torch.baddbmm(
            torch.full((B * H, T, T), math.nan), flat(q), flat(k).mT, beta=0, alpha=SCALE
        ).view(B, H, T, T)
        + BIAS
    ),
    "mul(other)": lambda q, k: torch.mul(q @ k.mT, other=SCALE).add(other=BIAS),
    "mul(input, other)": lambda q, k: torch.mul(input=q @ k.mT, other=torch.tensor(SCALE)) + BIAS,
    "div(input, other)": lambda q, k: torch.div(input=q @ k.mT, other=D**0.5) + BIAS,
    "add(input, other)": lambda q, k: torch.add(input=q @ k.mT * SCALE, other=BIAS),
    "add(alpha)": lambda q, k: torch.add(q @ k.mT * SCALE, BIAS * 2, alpha=0.5),
    "view(size), transposes": lambda q, k: torch.transpose(
        input=torch.transpose(q @ k.mT * SCALE + BIAS, dim0=0, dim1=1), dim0=0, dim1=1
    ),
}
SOFTMAXES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax(x, dim)": lambda x: torch.softmax(x, dim=-1),
    "softmax(input, dim)": lambda x: torch.softmax(input=x, dim=-1),
    "F.softmax(input, dim, dtype)": lambda x: F.softmax(input=x, dim=-1, dtype=torch.float32),
    "x.softmax(dim)": lambda x: x.softmax(dim=3),
    "masked_fill(mask, value) first": lambda x: x.masked_fill(mask=HIDDEN, value=-1e9).softmax(-1),
    "where(condition, input, other)": lambda x: torch.softmax(
        torch.where(condition=HIDDEN, input=torch.tensor(-math.inf), other=x), -1
    ),
    "aten.softmax.int(self, dim)": lambda x: torch.ops.aten.softmax.int(self=x, dim=-1),
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_product_called_with_keywords(product: str) -> None:
    q, k, v = (random(B, H, T, D, seed=i) for i in range(3))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(PRODUCTS[product](q, k), -1) @ v

    seen = watch_once(Attention(attend, H), q.requires_grad_(), k, v)
    raw = q @ k.mT * SCALE
    assert_agree(seen.values, dense(raw + BIAS, raw_BHQK=raw))
    assert seen.coverage[0].verified == "weights"


@pytest.mark.parametrize("softmax", SOFTMAXES)
def test_a_softmax_called_with_keywords(softmax: str) -> None:
    q, k, v = (random(B, H, T, D, seed=i) for i in range(3))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return SOFTMAXES[softmax](q @ k.mT * SCALE) @ v

    seen = watch_once(Attention(attend, H), q.requires_grad_(), k, v)
    masked = "masked" in softmax or "where" in softmax
    assert_agree(seen.values, dense(q @ k.mT * SCALE, ~HIDDEN if masked else None))


def test_values_weighed_with_keywords() -> None:
    q, k, v = (random(B, H, T, D, seed=i) for i in range(3))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.matmul(input=torch.softmax(q @ k.mT * SCALE, -1), other=v)

    seen = watch_once(Attention(attend, H), q.requires_grad_(), k, v)
    assert_agree(seen.values, dense(q @ k.mT * SCALE))


@pytest.mark.parametrize("given", ["keywords", "positions"])
def test_sdpa_called_with_keywords(given: str) -> None:
    q, k, v = (random(B, H, T, D, seed=i) for i in range(3))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sdpa = F.scaled_dot_product_attention
        if given == "positions":
            return sdpa(q, k, v, None, 0.0, True)
        return sdpa(query=q, key=k, value=v, is_causal=True, dropout_p=0.0)

    seen = watch_once(Attention(attend, H), q.requires_grad_(), k, v)
    assert_agree(seen.values, dense(q @ k.mT * SCALE, ~HIDDEN))
