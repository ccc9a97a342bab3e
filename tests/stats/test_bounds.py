"""No largest logit ever leaves its bracket: float64, the measured one, and the kernel's own."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import calls

from stability_probe.records import AttentionCall
from stability_probe.stats.accumulate import accumulate
from stability_probe.stats.bounds import (
    Bracket,
    bracket,
    entropy_floor,
    lse_bracket,
    purity_bracket,
    reach,
)
from stability_probe.stats.finish import finish

SHAPES = ("random", "one key", "same keys", "negative", "zero q", "zero k", "offset", "spread")


def vectors(kind: str, size: float, shape: tuple, g: torch.Generator) -> tuple:
    """q and k of one kind; `size` is that of their products."""
    B, G, R, Q, K, D = shape
    q, k = torch.randn(B, G * R, Q, D, generator=g), torch.randn(B, G, K, D, generator=g)
    if kind == "one key":
        k[:, :, 0] = 20 * q[:, ::R].mean(2)
    elif kind == "same keys":
        k = k[:, :, :1].expand(B, G, K, D) * 1
    elif kind == "negative":
        q, k = q.abs(), -k.abs()
    elif kind == "zero q":
        q = q * 0
    elif kind == "zero k":
        k = k * 0
    elif kind == "offset":  # large parts that cancel in the product
        q, k = q + 1e3, k - k.mean(-1, keepdim=True)
    elif kind == "spread":
        q = q * 10.0 ** (6 * torch.rand(q.shape[:-1], generator=g) - 3)[..., None]
    return q * math.sqrt(size), k * math.sqrt(size)


@st.composite
def problems(draw: st.DrawFn) -> AttentionCall:
    B, G, R = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    Q, K = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    D = draw(st.sampled_from((1, 3, 16)))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    size = 10.0 ** draw(st.integers(-3, 30))
    q, k = vectors(draw(st.sampled_from(SHAPES)), size, (B, G, R, Q, K, D), g)
    masks = ()
    if draw(st.booleans()):
        masks = (torch.rand((B, 1, Q, K), generator=g) < 0.6,)
    return AttentionCall(
        layer="a",
        q_BHQD=q,
        k_BGKD=k,
        masks=masks,
        causal=draw(st.booleans()),
        scale=draw(st.sampled_from((1.0, 0.25, -0.5))),
        softcap=draw(st.sampled_from((None, None, 30.0))),
    )


def dense(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [B, H, Q, K] in float64, -inf where hidden; and the products before cap and bias."""
    assert call.q_BHQD is not None
    assert call.k_BGKD is not None
    k = call.k_BGKD.double().repeat_interleave(call.q_BHQD.shape[1] // call.k_BGKD.shape[1], 1)
    raw = S = call.q_BHQD.double() @ k.mT * call.scale
    if call.softcap is not None:
        S = call.softcap * torch.tanh(S / call.softcap)
    seen = torch.ones(S.shape[-2:], dtype=torch.bool)
    seen = seen.tril() if call.causal else seen
    for mask in call.masks:
        if mask.dtype == torch.bool:
            seen = seen & mask
        else:
            S = S + mask
            seen = seen & (mask > -9e3)
    return S.masked_fill(~seen, -torch.inf), raw.masked_fill(~seen, 0)


def largest(S: torch.Tensor) -> torch.Tensor:
    """[H], -inf where nothing is visible."""
    return S.amax((0, 2, 3))


def measured(call: AttentionCall) -> dict[str, torch.Tensor]:
    bare = replace(call, lse_BHQ=None)
    return finish(accumulate(bare, full=True), full=True)


def holds(ends: Bracket, *values: torch.Tensor) -> None:
    for value in values:
        low, high, value = ends.low_H.double(), ends.high_H.double(), value.double()
        seen = torch.isfinite(value)
        assert not (low > value)[seen].any(), (low, value)
        assert not (high < value)[seen].any(), (high, value)


@settings(max_examples=150, deadline=None)
@given(problems())
def test_no_value_leaves_the_bracket_of_the_norms(call: AttentionCall) -> None:
    S, raw = dense(call)
    values = measured(call)
    ends = bracket(call)
    holds(ends, largest(S), values["max_logit"])
    arm = reach(call).double()
    assert (arm >= raw.abs().amax((0, 2, 3))).all()
    assert not (arm < values["qk_abs_max_logit"].double()).any()


@settings(max_examples=150, deadline=None)
@given(problems())
def test_no_value_leaves_the_bracket_of_the_log_sum_exp(call: AttentionCall) -> None:
    S, _ = dense(call)
    exact = S.logsumexp(-1)
    ends = bracket(replace(call, lse_BHQ=exact.float()))
    holds(ends, largest(S))  # scores and log-sum-exp formed alike
    wide = bracket(replace(call, lse_BHQ=exact.float()), reach_H=reach(call))
    holds(wide, largest(S), measured(call)["max_logit"])
    alive = torch.isfinite(largest(S).float())
    assert torch.isfinite(ends.high_H[alive]).all()
    # under a mask a log-sum-exp of 0 may be that of a row without any visible key
    told = torch.isfinite(exact) & (exact.float() != 0) if call.masks else torch.isfinite(exact)
    assert torch.isfinite(ends.low_H[alive & told.any(-1).any(0)]).all()
    assert torch.isnan(ends.high_H[largest(S) == -torch.inf]).all()


@settings(max_examples=150, deadline=None)
@given(calls())
def test_any_mask_and_bias(call: AttentionCall) -> None:
    S, _ = dense(call)
    value = measured(call)["max_logit"]
    everything = dense_with_masked(call)
    with_lse = replace(call, lse_BHQ=everything.logsumexp(-1).float())
    holds(bracket(with_lse), largest(S), value)
    holds(bracket(with_lse, reach_H=reach(call)), largest(S), value)
    given_scores = replace(call, scores_BHQK=everything.float())
    holds(bracket(given_scores), largest(S.float()), measured(given_scores)["max_logit"])
    holds(bracket(call), largest(S), value)


def dense_with_masked(call: AttentionCall) -> torch.Tensor:
    """As `dense`, but keys under a finite mask keep their scores, as a kernel leaves them."""
    assert call.q_BHQD is not None
    assert call.k_BGKD is not None
    k = call.k_BGKD.double().repeat_interleave(call.q_BHQD.shape[1] // call.k_BGKD.shape[1], 1)
    S = call.q_BHQD.double() @ k.mT * call.scale
    if call.softcap is not None:
        S = call.softcap * torch.tanh(S / call.softcap)
    for mask in call.masks:
        S = S.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else S + mask
    seen = torch.ones(S.shape[-2:], dtype=torch.bool).tril()
    return S.masked_fill(~seen, -torch.inf) if call.causal else S


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("causal", [False, True])
def test_the_log_sum_exp_of_a_kernel_itself(dtype: torch.dtype, kind: str, causal: bool) -> None:
    for size in (1e-3, 1.0, 30.0, 1e3):
        g = torch.Generator().manual_seed(0)
        q, k = vectors(kind, size, (2, 2, 1, 70, 70, 16), g)
        q, k = (x.to(dtype).requires_grad_() for x in (q, k))
        out = F.scaled_dot_product_attention(q, k, k, is_causal=causal)
        lse = out.grad_fn._saved_logsumexp
        assert lse.dtype == torch.float32
        call = AttentionCall(
            layer="a", q_BHQD=q, k_BGKD=k, lse_BHQ=lse, causal=causal, scale=0.25, dtype=dtype
        )
        S, _ = dense(call)
        holds(bracket(call, reach_H=reach(call)), largest(S), measured(call)["max_logit"])
        if kind != "offset":  # where nothing cancels the kernel's scores are anybody's
            holds(bracket(call), largest(S), measured(call)["max_logit"])
        assert not bracket(call).high_H.requires_grad


@settings(max_examples=100, deadline=None)
@given(problems())
def test_row_by_row(call: AttentionCall) -> None:
    S, _ = dense(call)
    S = S[torch.isfinite(S).any(-1)]
    lse, p, top = S.logsumexp(-1), S.softmax(-1), S.amax(-1)
    slack = 1e-12 * (1 + lse.abs())
    n = torch.isfinite(S).sum(-1).double()
    entropy = torch.special.entr(p).sum(-1)
    for low, high in (
        lse_bracket(lse, n),
        lse_bracket(lse, float(S.shape[-1])),
        (entropy_floor(lse, entropy), lse),
        purity_bracket(lse, p.square().sum(-1)),
    ):
        assert (low - slack <= top).all()
        assert (top <= high + slack).all()
