"""What real runs do to attention, and the numbers that must come out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dense_oracle import statistics

from stability_probe.records import AttentionCall
from stability_probe.stats.accumulate import accumulate
from stability_probe.stats.finish import finish
from stability_probe.stats.measure import measure

MIN = {d: torch.finfo(d).min for d in (torch.float32, torch.bfloat16, torch.float16)}


def both(call: AttentionCall) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return tuple(finish(accumulate(call, full=full), full=full) for full in (False, True))


def of_scores(scores: torch.Tensor, **options) -> dict[str, torch.Tensor]:
    call = AttentionCall(layer="a", scores_BHQK=scores, fused=False, **options)
    return finish(accumulate(call, full=True), full=True)


# ------------------------------------------------------------------ level, sign and shape


def test_a_head_whose_every_logit_is_negative():
    scores = torch.linspace(-1100, -900, 16 * 16).view(1, 1, 16, 16)
    values = of_scores(scores)
    assert values["max_logit"].item() == -900
    assert values["min_logit"].item() == values["abs_max_logit"].item() * -1 == -1100
    assert values["lse_max"].item() < -899
    q, k = torch.zeros(1, 1, 16, 2), torch.zeros(1, 1, 16, 2)
    q[..., 0], k[..., 0] = 1, torch.linspace(-1100, -900, 16)
    values = measure(q, k, scale=1.0)
    assert (values["max_logit"].item(), values["abs_max_logit"].item()) == (-900, 1100)
    assert values["peak_logit"].item() == -1100
    assert values["peak_cosine"].item() == -1


def test_rows_far_below_zero_show_in_the_log_sum_exp_alone():
    T, d = 704, 64
    q, k = torch.zeros(1, 1, T, d), 0.3 * torch.randn(1, 1, T, d)
    q[..., 0] = 1
    k[..., 0] = -120 * math.sqrt(d) + 2 * k[..., 0]
    values = measure(q, k, causal=True)
    assert values["max_logit"].item() < -100
    assert values["lse_max"].item() < -100
    assert values["abs_max_logit"].item() == pytest.approx(120, abs=1)
    assert values["entropy_ratio"].item() > 0.9


def test_causal_uniform_attention_is_uniform():
    values = measure(torch.zeros(64, 8), torch.randn(64, 8), causal=True)
    assert values["entropy_ratio"].item() == pytest.approx(1.0, abs=1e-6)
    assert values["entropy_rows"].item() == 63
    assert values["softmax_slope"].item() == pytest.approx(0.0288, abs=4e-4)


@pytest.mark.parametrize(("T", "slope"), [(16, 0.0586), (128, 0.00775), (1024, 9.8e-4)])
def test_the_mean_slope_shrinks_with_the_keys_and_the_trace_does_not(T: int, slope: float):
    values = measure(torch.zeros(T, 4), torch.randn(T, 4))
    assert values["softmax_slope"].item() == pytest.approx(slope, rel=5e-3)
    assert values["jacobian_trace"].item() == pytest.approx(1 - 1 / T, rel=1e-6)


@pytest.mark.parametrize(
    ("scale", "std", "ratio", "trace"), [(1.0, 16.1, 0.068, 0.18), (1 / 16, 1.0, 0.90, 0.98)]
)
def test_normed_queries_with_scale_one_are_saturated_by_design(scale, std, ratio, trace):
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(4, 128, 256, generator=g), torch.randn(4, 128, 256, generator=g)
    q, k = F.rms_norm(q, (256,)), F.rms_norm(k, (256,))
    values = measure(q, k, scale=scale)
    assert values["logit_std"].mean().item() == pytest.approx(std, rel=0.02)
    assert values["entropy_ratio"].mean().item() == pytest.approx(ratio, abs=0.01)
    assert values["jacobian_trace"].mean().item() == pytest.approx(trace, abs=0.02)
    assert values["q_norm_max"].max().item() == pytest.approx(16, rel=1e-4)


def test_a_shift_of_the_rows_moves_the_maximum_and_not_the_gap():
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(1, 1, 8, 32, generator=g)
    a, b = of_scores(scores), of_scores(scores + 500)
    assert b["max_logit"].item() > 500
    for name in ("logit_gap", "logit_std", "entropy", "softmax_slope"):
        assert a[name].item() == pytest.approx(b[name].item(), rel=2e-4)


# ------------------------------------------------------------------ low precision


def test_scores_that_tie_only_in_the_run_s_dtype():
    scores = torch.tensor([256.0, 257.0]).view(1, 1, 1, 2)
    assert of_scores(scores, dtype=torch.float32)["tied_max_rows"].item() == 0
    assert of_scores(scores, dtype=torch.bfloat16)["tied_max_rows"].item() == 1
    assert of_scores(scores)["entropy"].item() == pytest.approx(0.582203, abs=1e-5)


@pytest.mark.parametrize(
    ("dtype", "gap", "share"),
    [
        (torch.bfloat16, 6.0, 0),
        (torch.bfloat16, 6.5, 1),
        (torch.float16, 8.0, 0),
        (torch.float16, 8.5, 1),
        (torch.float32, 17.0, 0),
        (torch.float32, 17.5, 1),
    ],
)
def test_when_the_largest_weight_rounds_to_one(dtype: torch.dtype, gap: float, share: int):
    scores = torch.tensor([0.0, -gap]).view(1, 1, 1, 2)
    assert of_scores(scores, dtype=dtype)["saturated_rows"].item() == share


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_product_that_float16_cannot_hold(dtype: torch.dtype):
    x = torch.full((1, 1, 3, 128), 40.0, dtype=dtype)  # q.k = 204800, scaled 18102
    values = measure(x, x)
    assert values["qk_abs_max_logit"].item() == pytest.approx(18102, rel=1e-4)
    assert values["fp16_headroom_log2"].item() == pytest.approx(math.log2(65504 / 204800))
    assert values["fp16_overflow_unscaled"].item() == 9
    assert values["fp16_overflow_scaled"].item() == 0
    assert values["nonfinite"].item() == 0


def test_a_query_that_arrives_scaled_has_more_headroom():
    x = torch.full((1, 1, 3, 128), 40.0)
    call = AttentionCall(layer="a", q_BHQD=x / math.sqrt(128), k_BGKD=x, pre_scaled=True)
    for values in both(call):
        assert values["qk_abs_max_logit"].item() == pytest.approx(18102, rel=1e-4)
        assert values["fp16_headroom_log2"].item() == pytest.approx(math.log2(65504 / 18102), 1e-3)


def test_float16_scores_that_overflowed_still_give_the_true_logit():
    x = torch.full((1, 1, 3, 128), 40.0, dtype=torch.float16)
    scores = (x.float() @ x.float().mT).half() / math.sqrt(128)
    assert torch.isinf(scores).all()
    call = AttentionCall(
        layer="a", q_BHQD=x, k_BGKD=x, scores_BHQK=scores, scale=128**-0.5, fused=False
    )
    for values in both(call):
        assert values["nonfinite"].item() == 9
        assert values["qk_abs_max_logit"].item() == pytest.approx(18102, rel=1e-4)
        assert values["fp16_headroom_log2"].item() < -1.6
        assert values["fp16_scores"].item() == 1
        assert math.isnan(values["entropy"].item())
        assert math.isnan(values["abs_max_logit"].item())


def test_finite_queries_and_keys_whose_float32_product_is_not():
    q, k = torch.ones(1, 1, 4, 2), torch.randn(1, 1, 6, 2).clamp(-1, 1)
    q[0, 0, 2] = 1e25
    k[0, 0, 4] = 1e25
    call = AttentionCall(layer="a", q_BHQD=q, k_BGKD=k)
    default, full = both(call)
    assert full["nonfinite_scores"].item() == full["nonfinite"].item() == 1
    assert full["entropy_rows"].item() == 3
    assert default["nonfinite"].item() >= 1
    assert full["entropy"].item() == pytest.approx(default["entropy"].item(), rel=1e-6)
    for values in (default, full):
        assert 1e24 < values["abs_max_logit"].item() < math.inf


# ------------------------------------------------------------------ masks


@pytest.mark.parametrize("dtype", MIN)
@pytest.mark.parametrize("kind", ["bool", "-inf", "min", "min twice", "-1e4"])
def test_rows_without_a_visible_key_are_left_out(kind: str, dtype: torch.dtype):
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 2, 6, 4, generator=g), torch.randn(2, 2, 6, 4, generator=g)
    keep = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    keep[1, :, :, :4] = False  # left padding
    keep &= torch.ones(6, 6, dtype=torch.bool).tril()
    low = {"-inf": -math.inf, "min": MIN[dtype], "min twice": MIN[dtype], "-1e4": -1e4}
    mask = keep
    if kind != "bool":
        mask = torch.zeros(keep.shape, dtype=dtype).masked_fill(~keep, low[kind])
    masks = (mask, mask) if kind == "min twice" else (mask,)
    call = AttentionCall(layer="a", q_BHQD=q.to(dtype), k_BGKD=k.to(dtype), masks=masks)
    want = statistics(q.to(dtype), k.to(dtype), masks=(keep,), dtype=dtype)
    for values in both(call):
        for name in ("abs_max_logit", "qk_abs_max_logit", "entropy", "entropy_ratio"):
            np.testing.assert_allclose(values[name].numpy(), want[name], rtol=1e-5, err_msg=name)
    assert values["masked_rows"].tolist() == [4, 4]
    assert values["nonfinite"].tolist() == [0, 0]
    unbounded = kind == "min twice" and dtype != torch.float16  # the sum is -inf in float32
    tight = kind in ("bool", "-inf") or unbounded
    assert values["mask_leak"].tolist() == ([0, 0] if tight else [4, 4])


@pytest.mark.parametrize("dtype", MIN)
def test_padded_rows_of_an_eager_run_do_not_pass_as_diffuse(dtype: torch.dtype):
    """A row whose every score is finfo.min is uniform: entropy ln T, and logits of -3e38."""
    scores = torch.zeros(1, 1, 2, 8, dtype=dtype)
    scores[0, 0, 0, 0] = 12.0
    scores[0, 0, 1] = MIN[dtype]
    values = of_scores(scores)
    assert values["entropy"].item() < 1e-2
    assert values["abs_max_logit"].item() == 12
    assert (values["masked_rows"].item(), values["mask_leak"].item()) == (1, 1)
    assert values["nonfinite"].item() == 0


def test_a_steep_bias_is_not_a_mask():
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 2, 9, 4, generator=g), torch.randn(1, 2, 9, 4, generator=g)
    slopes = torch.tensor([1.0, 500 / 8]).view(2, 1, 1)
    bias = -slopes * (torch.arange(9)[:, None] - torch.arange(9)).abs()
    values = measure(q, k, mask=bias)
    assert values["abs_max_logit"][1].item() > 490
    assert values["qk_abs_max_logit"][1].item() < 10
    assert values["keys"].tolist() == [9, 9]
    assert values["fp16_overflow_scaled"].tolist() == [0, 0]
    assert values["mask_leak"].tolist() == [0, 0]


def test_a_finite_mask_that_large_logits_get_past():
    scores = torch.zeros(1, 1, 3, 4)
    mask = torch.zeros(3, 4)
    mask[:, 3] = -1e4
    q, k = torch.ones(1, 1, 3, 1), torch.zeros(1, 1, 4, 1)
    k[..., 3, :] = 1e4  # the masked key's score comes back to 0
    values = measure(q, k, mask=mask, scale=1.0)
    assert values["mask_leak"].item() == 3
    assert values["keys"].item() == 3
    assert values["qk_abs_max_logit"].item() == 0
    assert of_scores(scores, masks=(mask,))["mask_leak"].item() == 3
    assert measure(q, k, mask=mask == 0, scale=1.0)["mask_leak"].item() == 0
    dropped_too = AttentionCall(layer="a", q_BHQD=q, k_BGKD=k, masks=(mask, mask == 0))
    assert both(dropped_too)[1]["mask_leak"].item() == 0


@pytest.mark.parametrize(("weight", "leaks"), [(8e-7, 0), (1.3e-6, 1)])
def test_a_leak_is_a_weight_above_a_millionth(weight: float, leaks: int):
    scores = torch.tensor([0.0, math.log(weight), -1e4 + 1]).view(1, 1, 1, 3)
    mask = torch.tensor([0.0, -1e4, -1e4])
    assert of_scores(scores, masks=(mask,))["mask_leak"].item() == leaks


def test_an_infinity_under_an_additive_mask_is_a_fault_and_under_a_bool_mask_is_not():
    scores = torch.zeros(1, 1, 2, 3)
    scores[0, 0, 0, 2] = torch.inf
    additive = torch.tensor([0.0, 0.0, MIN[torch.float32]])
    assert of_scores(scores + additive, masks=(additive,))["nonfinite"].item() == 1
    assert of_scores(scores.masked_fill(additive < 0, -torch.inf))["nonfinite"].item() == 0
    q, k = torch.ones(1, 1, 2, 1), torch.zeros(1, 1, 3, 1)
    k[0, 0, 2] = 3e38
    q[0, 0, 0] = 10
    hidden = measure(q, k, mask=additive == 0, scale=1.0)
    assert (hidden["nonfinite"].item(), hidden["entropy_rows"].item()) == (0, 2)
    shown = measure(q, k, mask=additive, scale=1.0)
    assert (shown["nonfinite"].item(), shown["entropy_rows"].item()) == (1, 1)


def test_what_an_additive_mask_makes_of_infinity_is_counted_once():
    for bad in (torch.nan, torch.inf, -torch.inf):
        k = torch.zeros(1, 1, 3, 1)
        k[0, 0, 2] = bad
        mask = torch.tensor([0.0, 0.0, -torch.inf])
        values = measure(torch.ones(1, 1, 2, 1), k, mask=mask)
        expected = 0 if bad == -torch.inf else 2
        assert values["nonfinite_scores"].item() == expected, bad
        assert values["nonfinite_k"].item() == 1


def test_a_soft_cap_bounds_the_scores_and_not_the_products():
    g = torch.Generator().manual_seed(0)
    q = 100 * torch.randn(1, 2, 9, 4, generator=g)
    k = torch.randn(1, 2, 9, 4, generator=g)
    values = measure(q, k, softcap=30.0)
    assert (values["abs_max_logit"] <= 30).all()
    assert (values["qk_abs_max_logit"] > 100).all()


def test_a_sink_on_the_first_key():
    scores = torch.zeros(1, 1, 5, 6)
    scores[..., 0] = 4.0
    e = math.exp(4)
    assert of_scores(scores)["first_key_mass"].item() == pytest.approx(e / (e + 5))
    scores[..., 0] = -torch.inf
    assert of_scores(scores)["first_key_mass"].item() == 0


# ------------------------------------------------------------------ what is not finite


def test_the_first_cause_wins():
    x = torch.ones(1, 1, 2, 3)
    bad = {"q": 1, "k": 2, "v": 3, "output": 1}

    def spoilt(name: str) -> torch.Tensor:
        y = x.clone()
        y.view(-1)[: bad[name]] = torch.nan
        return y

    fields = {"q": "q_BHQD", "k": "k_BGKD", "v": "v_BGKE", "output": "output_BHQE"}
    tensors = dict.fromkeys(fields.values(), x)
    for name in ("output", "v", "k", "q"):  # from the last cause to the first
        tensors[fields[name]] = spoilt(name)
        for values in both(AttentionCall(layer="a", **tensors)):
            assert values["nonfinite"].item() == bad[name]
    assert [values[f"nonfinite_{n}"].item() for n in bad] == list(bad.values())


@pytest.mark.parametrize("causal", [False, True])
def test_bad_keys_at_the_start(causal: bool):
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 2, 9, 4, generator=g), torch.randn(1, 2, 9, 4, generator=g)
    k[:, :, :2], k[:, 1, 5] = torch.inf, torch.nan
    q[..., 0] = 0  # only the first query has much to do with the third key,
    q[:, :, 0, 0], k[:, :, 2, 0] = 5, 100  # which causal order does not let it see
    want = statistics(q, k, causal=causal)
    for values in both(AttentionCall(layer="a", q_BHQD=q, k_BGKD=k, causal=causal)):
        for name in ("abs_max_logit", "qk_abs_max_logit", "entropy", "nonfinite"):
            np.testing.assert_allclose(values[name].numpy(), want[name], rtol=1e-6, err_msg=name)


def test_bad_output_of_rows_that_see_nothing_is_told_apart():
    x = torch.ones(1, 1, 3, 2)
    output = x.clone()
    output[0, 0, 1] = torch.nan
    keep = torch.tensor([True, False, True]).view(3, 1)
    call = AttentionCall(layer="a", q_BHQD=x, k_BGKD=x, output_BHQE=output, masks=(keep,))
    for values in both(call):
        assert values["nonfinite"].item() == 0
    assert values["nonfinite_masked_output"].item() == 2
    assert values["nonfinite_output"].item() == 0


def test_absent_tensors_are_absent_and_not_zero():
    x = torch.ones(1, 2, 3, 2)
    values = measure(x, x)
    for name in ("nonfinite_v", "nonfinite_output", "nonfinite_masked_output", "input_rms"):
        assert torch.isnan(values[name]).all()
    values = of_scores(torch.zeros(1, 2, 3, 4))
    for name in ("nonfinite_q", "nonfinite_k", "q_norm_mean", "scale", "fp16_overflow_unscaled"):
        assert torch.isnan(values[name]).all()
    assert values["nonfinite"].tolist() == [0, 0]


def test_products_of_nothing_keep_a_finite_headroom():
    values = measure(torch.zeros(3, 4), torch.ones(3, 4))
    assert values["fp16_headroom_log2"].item() > 100
    assert math.isfinite(values["fp16_headroom_log2"].item())
