"""Masks and padding: every spelling, every dtype, and no average or maximum that they bend.

Reports of what goes wrong: pytorch/pytorch#103749 and #103963 (rows without a visible key),
huggingface/transformers#17306 (two finfo.min planes add up to -inf), huggingface/diffusers#8673.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from attending import Attention, Seen, assert_agree, dense, random, watch_once
from hypothesis import given, settings
from hypothesis import strategies as st
from masking import (
    DTYPES,
    MASKS_OF_SDPA,
    PATTERNS,
    SPELLINGS,
    B,
    D,
    H,
    T,
    causal,
    eager,
    lowest,
    padded_keys,
    plane,
)
from torch import Tensor, nn

from stability_probe.records import Severity


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    spelling=st.sampled_from(list(SPELLINGS)),
    pattern=st.sampled_from(list(PATTERNS)),
    dtype=st.sampled_from(DTYPES),
    size=st.sampled_from((0.1, 1.0, 6.0)),
)
def test_a_softmax_under_any_mask(
    spelling: str, pattern: str, dtype: torch.dtype, size: float
) -> None:
    """Only visible keys count, and rows without one count for nothing, however they are hidden."""
    q, k, v = (random(B, H, T, D, seed=i, dtype=dtype) for i in range(3))
    q, keep, received = (q * size).requires_grad_(), PATTERNS[pattern], []
    seen = watch_once(Attention(eager, H), q, k, v, keep, spelling, received)
    raw = (q.double() @ k.double().mT) / math.sqrt(D)
    close = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-3}[dtype]
    assert_agree(seen.values, dense(received[0], keep, raw_BHQK=raw), rtol=close, atol=close)
    assert not seen.values["nonfinite_scores"].any()
    assert not seen.values["fp16_overflow_unscaled"].any()
    assert not [a for a in seen.alerts if a.severity is Severity.CRITICAL], seen.alerts


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    kind=st.sampled_from(list(MASKS_OF_SDPA)),
    pattern=st.sampled_from(list(PATTERNS)),
    dtype=st.sampled_from(DTYPES),
    size=st.sampled_from((0.1, 1.0, 6.0)),
)
def test_sdpa_under_any_mask(kind: str, pattern: str, dtype: torch.dtype, size: float) -> None:
    q, k, v = (random(B, H, T, D, seed=i, dtype=dtype) for i in range(3))
    q, keep = (q * size).requires_grad_(), PATTERNS[pattern]
    mask = MASKS_OF_SDPA[kind](keep, dtype)
    seen = watch_once(
        Attention(F.scaled_dot_product_attention, H), q, k, v, attn_mask=mask
    )  # fmt: skip
    raw = (q.double() @ k.double().mT) / math.sqrt(D)
    assert_agree(seen.values, dense(raw, keep))
    assert seen.values["nonfinite"].sum() == 0
    assert seen.coverage[0].verified == "output"
    assert not [a for a in seen.alerts if a.severity is Severity.CRITICAL], seen.alerts


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("low", [-math.inf, lowest(torch.float32), lowest(torch.float16), -1e4])
def test_a_float32_mask_under_autocast(autocast: torch.dtype, low: float) -> None:
    """The mask keeps its dtype on the way in: finfo of the other dtype, -inf when it arrives."""
    q, k, v = (random(B, H, T, D, seed=i) for i in range(3))
    keep = PATTERNS["left padding"]
    with torch.autocast("cpu", dtype=autocast):
        seen = watch_once(
            Attention(F.scaled_dot_product_attention, H),
            q.requires_grad_(), k, v, attn_mask=plane(keep, low, torch.float32),
        )  # fmt: skip
    raw = (q.to(autocast).double() @ k.to(autocast).double().mT) / math.sqrt(D)
    assert_agree(seen.values, dense(raw, keep))
    assert seen.values["nonfinite"].sum() == 0


# ------------------------------------------------------------------ -inf, 0 or NaN in a row


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_softmax_over_nothing_is_told_and_is_no_critical_event(dtype: torch.dtype) -> None:
    q, k, v = (random(B, H, T, D, seed=i, dtype=dtype) for i in range(3))
    keep = PATTERNS["one sample all padding"]
    model = Attention(eager, H)
    seen = watch_once(model, q.requires_grad_(), k, v, keep, "fill -inf", [])
    assert seen.output[1].isnan().all()
    assert seen.values["masked_rows"].tolist() == [T] * H
    assert (seen.values["nonfinite"] == 0).all()
    assert not seen.values["entropy"].isnan().any()
    severities = {a.severity for a in seen.alerts if a.rule == "nonfinite"}
    assert severities <= {Severity.WARNING}


# ------------------------------------------------------------------ averages


@pytest.mark.parametrize("t", [2, 16, 64, 200])
@pytest.mark.parametrize("how", ["is_causal", "mask", "softmax"])
def test_uniform_causal_attention_is_uniform(t: int, how: str) -> None:
    """Divided by ln T it would pass for 77 % of uniform at T = 64, with row 0 a collapse."""
    q, k = torch.zeros(1, 1, t, D).requires_grad_(), random(1, 1, t, D)
    if how == "softmax":
        seen = watch_once(Attention(eager), q, k, k, causal(t), "fill -inf", [])
    else:
        options = {"is_causal": True} if how == "is_causal" else {"attn_mask": causal(t)}
        seen = watch_once(Attention(F.scaled_dot_product_attention), q, k, k, **options)
    n = torch.arange(2, t + 1).double()
    want = {
        "entropy": n.log().mean(),
        "entropy_ratio": torch.tensor(1.0),
        "jacobian_trace": (1 - 1 / n).mean(),
        "softmax_slope": (1 - 1 / n).sum() / n.sum(),
        "top_weight": (1 / n).mean(),
        "first_key_mass": (1 / n).mean(),
    }
    assert_agree(seen.values, {k: v.reshape(1) for k, v in want.items()}, tuple(want), rtol=1e-5)


@pytest.mark.parametrize("pads", [1, 4, 9])
@pytest.mark.parametrize("spelling", list(SPELLINGS))
def test_padding_does_not_hide_a_collapse(pads: int, spelling: str) -> None:
    """Uniform pad rows would lift the mean entropy of one-hot heads from 0 to half of ln T."""
    q = torch.stack([40 * torch.eye(T)] * 2)[None]
    k = torch.stack([torch.eye(T)] * 2)[None] * math.sqrt(D)
    keep = (torch.arange(T) >= pads) & causal()
    seen = watch_once(Attention(eager), q.requires_grad_(), k, k, keep[None, None], spelling, [])
    assert (seen.values["entropy"] < 1e-6).all()
    assert (seen.values["jacobian_trace"] < 1e-6).all()
    assert seen.values["masked_rows"].tolist() == [pads] * 2
    assert seen.values["abs_max_logit"].tolist() == pytest.approx([40, 40], rel=1e-4)


@pytest.mark.parametrize("spelling", [s for s in SPELLINGS if s.startswith(("add", "+="))])
def test_a_mask_made_on_the_spot_in_the_scores_own_size(spelling: str) -> None:
    """One sequence and one head: the mask is a temporary that is gone when softmax is called."""
    q, k, v = (random(1, 1, T, D, seed=i) for i in range(3))
    keep = PATTERNS["left padding"][1:]
    seen = watch_once(Attention(eager), q.requires_grad_(), k, v, keep, spelling, [])
    assert_agree(seen.values, dense(q @ k.mT / math.sqrt(D), keep))


# ------------------------------------------------------------------ polarity


def test_each_library_s_boolean_mask_is_read_its_own_way() -> None:
    """True drops a key in nn.MultiheadAttention and keeps it in SDPA (pytorch/pytorch#170415)."""
    torch.manual_seed(0)
    drop = torch.ones(T, T, dtype=torch.bool).triu(1)
    attention = nn.MultiheadAttention(H * D, H, batch_first=True)
    x = random(B, T, H * D)
    seen = watch_once(attention, x, x, x, attn_mask=drop, need_weights=False)
    with torch.no_grad():
        projected = F.linear(x, attention.in_proj_weight, attention.in_proj_bias).double()
    q, k, _ = (z.view(B, T, H, D).transpose(1, 2) for z in projected.chunk(3, -1))
    raw = q @ k.mT / math.sqrt(D)
    assert_agree(seen.values, dense(raw, ~drop))
    kept = watch_once(
        Attention(F.scaled_dot_product_attention, H),
        q.float().requires_grad_(), k.float(), k.float(), attn_mask=drop,
    )  # fmt: skip
    assert_agree(kept.values, dense(raw, drop))
    assert kept.values["masked_rows"].tolist() == [B] * H


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("form", ["bool", "float"])
@pytest.mark.parametrize("both", [True, False])
def test_key_padding_of_multi_head_attention(need_weights: bool, form: str, both: bool) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(H * D, H, batch_first=True)
    x, drop = random(B, T, H * D), ~padded_keys(T, 5)[:, 0, 0]
    padding = drop if form == "bool" else torch.zeros(B, T).masked_fill(drop, -math.inf)
    mask = nn.Transformer.generate_square_subsequent_mask(T) if form == "float" else ~causal()
    seen = watch_once(
        attention, x, x, x, key_padding_mask=padding, need_weights=need_weights,
        attn_mask=mask if both else None,
    )  # fmt: skip
    with torch.no_grad():
        projected = F.linear(x, attention.in_proj_weight, attention.in_proj_bias).double()
    q, k, _ = (z.view(B, T, H, D).transpose(1, 2) for z in projected.chunk(3, -1))
    keep = padded_keys(T, 5) & causal() if both else padded_keys(T, 5)
    assert_agree(seen.values, dense(q @ k.mT / math.sqrt(D), keep.expand(B, 1, T, T)))
    assert seen.coverage[0].verified == ("weights" if need_weights else "output")


# ------------------------------------------------------------------ a mask is not a fault


@pytest.mark.parametrize("how", ["argument", "keyword", "returned"])
def test_a_mask_that_modules_pass_around_is_no_fault(how: str) -> None:
    """huggingface/transformers#11274: a checker of inputs and outputs stops at the first -inf."""

    class MakesMasks(nn.Module):
        def forward(self, t: int) -> Tensor:
            return plane(causal(t), -math.inf, torch.float32)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.masks, self.q = MakesMasks(), nn.Linear(D, D)
            self.attention = Attention(
                lambda q, k, v, m=None: F.scaled_dot_product_attention(q, k, v, attn_mask=m)
            )

        def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            mask = self.masks(x.shape[-2])
            if how == "keyword":
                return self.attention(self.q(x), x, x, m=mask)
            out = self.attention(self.q(x), x, x, mask)
            return (out, mask) if how == "returned" else out

    seen = watch_once(Model(), random(B, H, T, D))
    assert not seen.alerts
    assert seen.values["nonfinite"].sum() == 0
    assert seen.coverage[0].verified == "output"


def real(seen: Seen) -> list[str]:
    return [a.rule for a in seen.alerts if a.severity is Severity.CRITICAL]


@pytest.mark.parametrize("spelling", list(SPELLINGS))
def test_an_overflow_in_masked_pairs_alone(spelling: str) -> None:
    """float16 inf dropped by a fill hurts nothing; with an additive mask it becomes NaN or inf."""
    q, k = torch.ones(1, 2, 4, D), torch.ones(1, 2, 4, D)
    k[..., 3, :] = 30000.0
    keep = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    keep[..., 3] = False
    q, k = q.half().requires_grad_(), k.half()
    seen = watch_once(Attention(eager), q, k, torch.ones_like(k), keep, spelling, [])
    survives = seen.output.isfinite().all()
    assert survives == (spelling.startswith(("fill", "where")))
    assert bool(real(seen)) == (not survives)
    root = math.sqrt(D)
    assert seen.values["qk_abs_max_logit"].tolist() == pytest.approx([root, root], rel=1e-3)
