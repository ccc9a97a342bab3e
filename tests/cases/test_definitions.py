"""What the numbers mean: scale, sign, bias, soft-cap, and half precision."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from attending import PER_ROW, Attention, assert_agree, dense, random, watch_once
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stability_probe.records import Severity

B, T, D = 2, 10, 8
HIDDEN = torch.ones(T, T, dtype=torch.bool).triu(1)
SDPA = F.scaled_dot_product_attention
UP_TO_A_SCALE = (*PER_ROW, "max_logit", "min_logit", "abs_max_logit", "qk_abs_max_logit")


def qkv(heads: int, *, size: float = 1.0) -> list[Tensor]:
    q, k, v = (random(B, heads, T, D, seed=i) for i in range(3))
    return [(q * size).requires_grad_(), k, v]


# ------------------------------------------------------------------ scale


@pytest.mark.parametrize("scale", [1.0, 0.177, 0.0156, 12.0, -0.5])
@pytest.mark.parametrize("how", ["sdpa", "after", "before", "both", "divided"])
def test_the_scale_is_the_one_that_was_used(scale: float, how: str) -> None:
    """Not 1/sqrt(d): T5 has 1, Granite a multiplier, GPT-2 may divide by the layer's number."""
    q, k, v = qkv(3)
    root = math.copysign(math.sqrt(abs(scale)), 1)
    formulas = {
        "after": lambda q, k: (q @ k.mT) * scale,
        "before": lambda q, k: (q * scale) @ k.mT,
        "both": lambda q, k: (q * root) @ (k * math.copysign(root, scale)).mT,
        "divided": lambda q, k: (q @ k.mT) / torch.tensor(1 / scale),
    }

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if how == "sdpa":
            return SDPA(q, k, v, scale=scale)
        return torch.softmax(formulas[how](q, k), -1) @ v

    seen = watch_once(Attention(attend, 3), q, k, v)
    assert_agree(seen.values, dense(q @ k.mT * scale), UP_TO_A_SCALE)
    if how in ("sdpa", "after", "divided"):
        assert seen.values["scale"].tolist() == pytest.approx([scale] * 3)
        product = (q @ k.mT).abs().amax((0, 2, 3)).double()
        headroom = torch.log2(65504 / product)
        assert_agree(seen.values, {"fp16_headroom_log2": headroom}, ("fp16_headroom_log2",))


@pytest.mark.parametrize("factor", [1e-3, 1.0, 100.0])
def test_the_two_definitions_of_a_largest_logit_are_told_apart(factor: float) -> None:
    """Signed and absolute, with and without the bias, scaled, visible entries alone."""
    q, k, v = qkv(2, size=factor)
    bias = torch.tensor([5.0, -300.0]).view(2, 1, 1).expand(2, T, T).clone()
    mask = bias.masked_fill(HIDDEN, -math.inf)
    seen = watch_once(Attention(SDPA, 2), q, k, v, attn_mask=mask)
    raw = q @ k.mT / math.sqrt(D)
    assert_agree(seen.values, dense(raw + bias, ~HIDDEN, raw_BHQK=raw))


@pytest.mark.parametrize(
    ("how", "level"),
    [
        *((how, level) for how in ("sdpa", "softmax") for level in (-900.0, -120.0, -1e4, 900.0)),
        *((how, -5e4) for how in ("sdpa", "softmax")),
    ],
)  # fmt: skip
def test_a_head_whose_logits_all_have_one_sign(how: str, level: float) -> None:
    """NVIDIA/Megatron-LM#7517: a negative maximum is legal, and -1e4 of q.k is no mask."""
    q, k = torch.ones(1, 2, T, 1), torch.linspace(0.9, 1.1, T).view(1, 1, T, 1) * level
    q, k = q.requires_grad_(), k.expand(1, 2, T, 1)

    def attend(q: Tensor, k: Tensor) -> Tensor:
        return SDPA(q, k, k, scale=1.0) if how == "sdpa" else torch.softmax(q @ k.mT, -1) @ k

    seen = watch_once(Attention(attend, 2), q, k)
    assert_agree(seen.values, dense(q @ k.mT), rtol=1e-4)
    assert seen.values["masked_rows"].tolist() == [0, 0]


# ------------------------------------------------------------------ bias


def alibi(heads: int, steepest: float, t: int = T) -> Tensor:
    slopes = steepest * 2.0 ** -torch.arange(heads).float()
    return slopes.view(heads, 1, 1) * -(torch.arange(t)[:, None] - torch.arange(t)).abs()


@pytest.mark.parametrize("steepest", [0.0625, 8.0, 500.0, 900.0])
@pytest.mark.parametrize("how", ["mask of SDPA", "added", "baddbmm", "added to a fill"])
def test_a_bias_of_any_slope_is_a_bias(steepest: float, how: str) -> None:
    """-500 is neither a mask nor an overflow (facebookresearch/xformers#684)."""
    heads = 3
    q, k, v = qkv(heads)
    bias = alibi(heads, steepest)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = 1 / math.sqrt(D)
        if how == "mask of SDPA":
            return SDPA(q, k, v, attn_mask=bias.masked_fill(HIDDEN, -math.inf))
        if how == "baddbmm":
            flat = [x.flatten(0, 1) for x in (q, k)]
            plane = bias.repeat(B, 1, 1)
            scores = torch.baddbmm(plane, flat[0], flat[1].mT, alpha=scale)
            scores = scores.view(B, heads, T, T).masked_fill(HIDDEN, -1e4)
        elif how == "added":
            scores = (q @ k.mT * scale + bias).masked_fill(HIDDEN, -math.inf)
        else:
            scores = (q @ k.mT * scale).masked_fill(HIDDEN, -math.inf) + bias
        return torch.softmax(scores, -1) @ v

    seen = watch_once(Attention(attend, heads), q, k, v)
    raw = q @ k.mT / math.sqrt(D)
    assert_agree(seen.values, dense(raw + bias, ~HIDDEN, raw_BHQK=raw))
    assert seen.values["fp16_overflow_scaled"].tolist() == [0] * heads
    assert not seen.alerts


def test_a_bias_made_on_the_spot_for_each_query_and_key() -> None:
    """Relative positions by query: a temporary of the scores' own size."""
    q, k, v = qkv(3)
    table = random(D, T, seed=9)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT / math.sqrt(D) + (q @ table) / 2
        return torch.softmax(scores, -1) @ v

    seen = watch_once(Attention(attend, 3), q, k, v)
    raw = q @ k.mT / math.sqrt(D)
    assert_agree(seen.values, dense(raw + (q @ table) / 2, raw_BHQK=raw))


# ------------------------------------------------------------------ soft-cap


@pytest.mark.parametrize("cap", [1.0, 30.0, 50.0])
@pytest.mark.parametrize("size", [0.5, 20.0])
@pytest.mark.parametrize("form", ["operators", "divided twice", "in place", "methods"])
def test_a_soft_cap_bounds_the_scores_and_not_the_product(
    cap: float, size: float, form: str
) -> None:
    """huggingface/transformers#32309: what ran is told, with the cap and without it."""
    q, k, v = qkv(2, size=size)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.mT / math.sqrt(D)
        capped = {
            "operators": lambda: cap * torch.tanh(s / cap),
            "divided twice": lambda: torch.tanh(s * (1 / cap)) / (1 / cap),
            "in place": lambda: s.div_(cap).tanh_().mul_(cap),
            "methods": lambda: s.div(cap).tanh().mul(cap),
        }[form]()
        return torch.softmax(capped.masked_fill(HIDDEN, -math.inf), -1) @ v

    seen = watch_once(Attention(attend, 2), q, k, v)
    raw = q.double() @ k.double().mT / math.sqrt(D)
    assert_agree(seen.values, dense(cap * torch.tanh(raw / cap), ~HIDDEN, raw_BHQK=raw))
    assert (seen.values["abs_max_logit"] <= cap * (1 + 1e-6)).all()


# ------------------------------------------------------------------ half precision


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    dtype=st.sampled_from((torch.float16, torch.bfloat16, torch.float32)),
    gap=st.sampled_from((0.0, 1e-3, 0.1, 1.0, 9.0, 20.0, 100.0, 1000.0, 3e4)),
    keys=st.integers(2, 300),
    how=st.sampled_from(("sdpa", "softmax")),
)
def test_no_gap_between_the_logits_gives_a_nan(
    dtype: torch.dtype, gap: float, keys: int, how: str
) -> None:
    """0 log 0 and log(p + 1e-8), which float16 rounds to log 0, are the usual ways to one."""
    q, k = torch.ones(1, 1, 3, 1, dtype=dtype), torch.zeros(1, 1, keys, 1, dtype=dtype)
    k[..., 0, :] = gap

    def attend(q: Tensor, k: Tensor) -> Tensor:
        return SDPA(q, k, k, scale=1.0) if how == "sdpa" else torch.softmax(q @ k.mT, -1) @ k

    seen = watch_once(Attention(attend, 1), q.requires_grad_(), k)
    names = ("entropy", "entropy_ratio", "softmax_slope", "jacobian_trace", "top_weight")
    assert_agree(seen.values, dense(q @ k.mT), names, rtol=1e-4, atol=1e-6)
    assert not seen.values["nonfinite"].any()
    assert not [a for a in seen.alerts if a.severity is Severity.CRITICAL]


@pytest.mark.parametrize("how", ["product first", "query first", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_product_beyond_float16(dtype: torch.dtype, how: str) -> None:
    """huggingface/transformers#33317: 128 x 900 overflows before its scale, in one place alone."""
    width = 128
    x = torch.full((1, 2, 4, width), 40.0, dtype=dtype)
    x[:, 1] = 1.0

    def attend(q: Tensor, k: Tensor) -> Tensor:
        if how == "sdpa":
            return SDPA(q, k, torch.ones_like(k))
        if how == "query first":
            return torch.softmax((q / math.sqrt(width)) @ k.mT, -1) @ torch.ones_like(k)
        return torch.softmax(q @ k.mT / math.sqrt(width), -1) @ torch.ones_like(k)

    seen = watch_once(Attention(attend, 2), x.clone().requires_grad_(), x)
    overflows = dtype == torch.float16 and how == "product first"
    assert seen.output.isfinite().all() == (not overflows)
    close = 1e-4 if how != "query first" else 1e-2
    logit = seen.values["qk_abs_max_logit"][0].item()
    assert logit == pytest.approx(40 * 40 * width**0.5, rel=close)
    severities = {a.severity for a in seen.alerts}
    nonfinite = [a for a in seen.alerts if a.rule == "nonfinite"]
    if overflows:
        assert nonfinite[0].severity is Severity.CRITICAL
        assert nonfinite[0].heads == (0,)
        assert next(a for a in seen.alerts if a.rule == "fp16_overflow").heads == (0,)
    else:
        assert not nonfinite
        real = dtype == torch.float16 and how == "query first"
        assert severities <= ({Severity.WARNING} if real else {Severity.INFO}), seen.alerts
    if how != "query first":
        headroom = seen.values["fp16_headroom_log2"][0].item()
        assert headroom == pytest.approx(math.log2(65504 / 204800), abs=1e-3)
        assert seen.values["fp16_overflow_unscaled"].tolist() == [16, 0]
