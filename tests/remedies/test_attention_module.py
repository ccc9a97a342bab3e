"""The reference attention module and its QK norm."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stability_probe.errors import ShapeError
from stability_probe.remedies import Attention, RMSQKNorm


def dense(module: Attention, x: Tensor) -> Tensor:
    """The module's formula in float64, head by head."""
    x = x.double()
    out = []
    width = x.shape[-1] // module.num_heads
    for h in range(module.num_heads):
        rows = slice(h * width, (h + 1) * width)
        q, k, v = (x @ w.weight[rows].double().T for w in (module.w_q, module.w_k, module.w_v))
        if module.qk_control is not None:
            gains = module.qk_control.q_norm.weight, module.qk_control.k_norm.weight
            q, k = (
                z / z.square().mean(-1, keepdim=True).add(1e-6).sqrt() * g.double()
                for z, g in zip((q, k), gains, strict=True)
            )
        scores = q @ k.mT / math.sqrt(width)
        if module.causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
        out.append(torch.softmax(scores, -1) @ v)
    return torch.cat(out, -1) @ module.w_o.weight.double().T


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_both_paths_are_the_formula(eager: bool, causal: bool, norm: bool) -> None:
    torch.manual_seed(0)
    control = RMSQKNorm(6) if norm else None
    module = Attention(24, 4, causal=causal, qk_control=control, eager=eager)
    if control is not None:
        torch.nn.init.uniform_(control.q_norm.weight, 0.5, 2.0)
        torch.nn.init.uniform_(control.k_norm.weight, 0.5, 2.0)
    x = torch.randn(2, 7, 24)
    torch.testing.assert_close(module(x).double(), dense(module, x), rtol=1e-5, atol=1e-6)


def test_dropout_acts_in_training_only() -> None:
    torch.manual_seed(0)
    module = Attention(24, 4, dropout=0.5, eager=True)
    x = torch.randn(2, 7, 24)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))


def test_w_q_and_w_k_are_their_own_parameters() -> None:
    names = [name for name, _ in Attention(24, 4, qk_control=RMSQKNorm(6)).named_parameters()]
    assert names == [
        "w_q.weight",
        "w_k.weight",
        "w_v.weight",
        "w_o.weight",
        "qk_control.q_norm.weight",
        "qk_control.k_norm.weight",
    ]


def test_a_width_that_does_not_split() -> None:
    with pytest.raises(
        ShapeError, match=r"got width 10 for 4 heads; expected a multiple\. Take 8 or 12"
    ):
        Attention(10, 4)


@settings(deadline=None, max_examples=50)
@given(
    scale=st.floats(1e-3, 1e4), gain=st.floats(0.1, 30.0), width=st.integers(1, 40),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_no_logit_ever_leaves_the_bound(scale: float, gain: float, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    norm = RMSQKNorm(width)
    torch.nn.init.uniform_(norm.q_norm.weight, -gain, gain, generator=generator)
    q, k = (scale * torch.randn(1, 2, 9, width, generator=generator) for _ in range(2))
    with torch.no_grad():
        q, k = norm(q, k)
    logits = q @ k.mT / math.sqrt(width)
    assert logits.abs().max() <= norm.bound() * (1 + 1e-5)


def test_the_bound_is_reached_where_q_and_k_point_the_same_way() -> None:
    norm = RMSQKNorm(16)
    q = torch.ones(1, 1, 1, 16)
    q, k = norm(q, q)
    assert ((q @ k.mT) / 4).item() == pytest.approx(float(norm.bound()), rel=1e-5)
