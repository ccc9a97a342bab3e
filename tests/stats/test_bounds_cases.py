"""Brackets of calls whose answer is known, and of those that have none."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from test_bounds import dense, holds, largest, measured

from stability_probe.records import AttentionCall
from stability_probe.stats.bounds import (
    bracket,
    entropy_floor,
    lse_bracket,
    purity_bracket,
    reach,
)


def test_row_by_row_where_all_is_alike_and_where_one_is_all() -> None:
    lse, n = torch.tensor([math.log(8), 5.0]), torch.tensor([8, 8])
    entropy, purity = torch.tensor([math.log(8), 0.0]), torch.tensor([1 / 8, 1.0])
    top = [pytest.approx(x, abs=1e-6) for x in (0.0, 5.0)]  # equal keys at 0, one key at 5
    assert entropy_floor(lse, entropy).tolist() == top
    assert purity_bracket(lse, purity)[0].tolist() == top
    assert lse_bracket(lse, n)[0].tolist()[0] == top[0]
    assert purity_bracket(lse, purity)[1].tolist()[1] == top[1]


@pytest.mark.parametrize("causal", [False, True])
def test_a_collapsed_head_is_known_within_a_few_percent(causal: bool) -> None:
    g = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 3, 512, 64, generator=g), torch.randn(2, 3, 512, 64, generator=g)
    k[:, :, 0] *= 40  # a key that wins every row it can
    q.requires_grad_()
    lse = F.scaled_dot_product_attention(q, k, k, is_causal=causal).grad_fn._saved_logsumexp
    call = AttentionCall(layer="a", q_BHQD=q, k_BGKD=k, lse_BHQ=lse, causal=causal, scale=0.125)
    ends, top = bracket(call), measured(call)["max_logit"]
    assert (top > 100).all()
    assert ((ends.high_H - ends.low_H) / top < 0.06).all()
    assert ((ends.high_H - top) / top < 1e-5).all()


def test_norms_are_tight_where_one_direction_rules() -> None:
    direction = torch.ones(1, 1, 1, 16)
    g = torch.Generator().manual_seed(1)
    q, k = (5 * direction + 0.01 * torch.randn(1, 1, 40, 16, generator=g) for _ in range(2))
    call = AttentionCall(layer="a", q_BHQD=q, k_BGKD=k)
    ends, top = bracket(call), measured(call)["max_logit"]
    assert ((ends.high_H - ends.low_H) / top < 0.03).all()


def test_centred_keys_know_that_logits_are_negative() -> None:
    q, k = torch.ones(1, 1, 6, 8), -torch.ones(1, 1, 6, 8)
    ends = bracket(AttentionCall(layer="a", q_BHQD=q, k_BGKD=k))
    assert reach(AttentionCall(layer="a", q_BHQD=q, k_BGKD=k)).item() == pytest.approx(8, rel=1e-3)
    assert ends.low_H.item() == pytest.approx(-8, rel=1e-2)
    assert ends.high_H.item() == pytest.approx(-8, rel=1e-2)


Q1 = torch.ones(2, 2, 4, 8)


def with_lse(lse: torch.Tensor, **settings) -> AttentionCall:
    return AttentionCall(layer="a", q_BHQD=Q1, k_BGKD=Q1, lse_BHQ=lse, scale=0.5, **settings)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_without_a_log_sum_exp_spoils_no_lower_end(bad: float) -> None:
    lse = torch.full((2, 2, 4), 4.0 + math.log(4))
    lse[0, 0, 1] = bad
    lse[:, 1] = bad
    ends = bracket(with_lse(lse))
    unknown = bad != -math.inf  # -inf: the row sees no key; else its scores may be anything
    assert torch.isnan(ends.low_H).tolist() == [False, True]
    assert torch.isnan(ends.high_H).tolist() == [unknown, True]
    assert ends.low_H[0].item() == pytest.approx(4, abs=1e-3)


def test_dead_rows_of_a_kernel() -> None:
    mask = torch.ones(2, 1, 4, 4, dtype=torch.bool)
    mask[0, :, 2] = False
    mask[1] = False
    q = Q1.clone().requires_grad_()
    lse = F.scaled_dot_product_attention(q, Q1, Q1, mask, scale=0.5).grad_fn._saved_logsumexp
    ends = bracket(with_lse(lse, masks=(mask,)))
    assert ends.low_H.tolist() == [pytest.approx(4, abs=1e-3)] * 2
    assert ends.high_H.tolist() == [pytest.approx(4 + math.log(4), abs=1e-3)] * 2


def test_the_causal_edge_tells_how_many_keys_there_are() -> None:
    lse = torch.tensor([7.0, 1.0, 1.0, 1.0]).expand(2, 2, 4)
    assert bracket(with_lse(lse, causal=True)).low_H.tolist() == [pytest.approx(7, abs=1e-3)] * 2
    low = bracket(with_lse(lse)).low_H[0].item()
    assert low == pytest.approx(7 - math.log(4), abs=1e-3)


def test_a_masked_key_that_leaks_is_not_taken_for_a_visible_one() -> None:
    k = torch.zeros(1, 1, 2, 1)
    k[0, 0, 1] = 2e4  # under a mask of -1e4 still the largest score
    q, mask = torch.ones(1, 1, 1, 1), torch.tensor([[0.0, -1e4]])
    call = AttentionCall(layer="a", q_BHQD=q, k_BGKD=k, masks=(mask,))
    assert measured(call)["max_logit"].item() == 0.0
    for ends in (
        bracket(replace(call, lse_BHQ=torch.tensor([[[1e4]]]))),
        bracket(replace(call, scores_BHQK=torch.tensor([[[[0.0, 1e4]]]]))),
    ):
        assert torch.isnan(ends.low_H).all()
        assert (ends.high_H >= 0).all()


def test_scores_alone_are_exact() -> None:
    scores = torch.tensor([[[[1.0, -2.0, 3.5], [-math.inf, 0.5, -1e4]]]])
    scores = torch.cat(
        (scores, scores - 5e4, torch.full_like(scores, -math.inf), scores * math.nan), 1
    )
    ends = bracket(AttentionCall(layer="a", scores_BHQK=scores))
    assert ends.low_H[:2].tolist() == ends.high_H[:2].tolist() == [3.5, 3.5 - 5e4]
    assert torch.isnan(torch.stack((ends.low_H, ends.high_H))[:, 2:]).all()


def test_scores_in_which_every_key_is_masked() -> None:
    scores = torch.full((1, 1, 2, 3), torch.finfo(torch.float32).min)
    call = AttentionCall(layer="a", scores_BHQK=scores)
    assert torch.isnan(measured(call)["max_logit"]).all()
    assert torch.isnan(bracket(call).low_H).all()


@pytest.mark.parametrize(
    "changed",
    [{"masks": (torch.zeros(4, 4),)}, {"score_mod": lambda score, b, h, q, k: score}],
    ids=["additive mask", "score_mod"],
)
def test_what_norms_cannot_certify_is_absent(changed: dict) -> None:
    ends = bracket(AttentionCall(layer="a", q_BHQD=Q1, k_BGKD=Q1, **changed))
    assert torch.isnan(torch.cat((ends.low_H, ends.high_H))).all()


def test_a_mask_takes_the_lower_end_only() -> None:
    mask = torch.zeros(4, 4, dtype=torch.bool)
    for changed in ({"masks": (mask,)}, {"mask_mod": lambda b, h, q, k: q < 0}):
        ends = bracket(AttentionCall(layer="a", q_BHQD=Q1, k_BGKD=Q1, **changed))
        assert torch.isnan(ends.low_H).all()
        assert (ends.high_H >= 8).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_spoil_no_other_head(bad: float) -> None:
    q, k = Q1.clone(), Q1.clone()
    q[0, 0, 1, 2] = bad
    k[1, 0, 0, 0] = bad
    call = AttentionCall(layer="a", q_BHQD=q, k_BGKD=k)
    ends, clean = bracket(call), bracket(replace(call, q_BHQD=Q1, k_BGKD=Q1))
    assert ends.low_H[1] == clean.low_H[1]
    assert ends.high_H[1] == clean.high_H[1]
    values = measured(call)["max_logit"]
    holds(ends, values)
    if math.isnan(bad):
        assert torch.isfinite(ends.high_H).all()


def test_a_key_that_is_nan_leaves_an_upper_end_to_the_rest_of_its_sequence() -> None:
    k = Q1[:1].clone()
    k[0, 0, 1, 3] = math.nan
    ends = bracket(AttentionCall(layer="a", q_BHQD=Q1[:1], k_BGKD=k))
    assert ends.high_H.tolist() == [pytest.approx(8, rel=1e-3)] * 2
    assert torch.isnan(ends.low_H).tolist() == [True, False]  # no mean key


def test_keys_behind_the_causal_edge_raise_no_lower_end() -> None:
    q, k = torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8)
    q[:, :, 0], k[:, :, 3] = 10.0, 10.0  # the one query that would see it comes before it
    call = AttentionCall(layer="a", q_BHQD=q, k_BGKD=k, causal=True)
    assert measured(call)["max_logit"].item() == 0.0
    holds(bracket(call), measured(call)["max_logit"])
    assert bracket(replace(call, causal=False)).low_H.item() == pytest.approx(200, rel=1e-2)


def test_components_whose_squares_float32_cannot_hold() -> None:
    q, k = torch.full((1, 1, 3, 4), 1e-24), torch.full((1, 1, 3, 4), 1e24)
    for call in (
        AttentionCall(layer="a", q_BHQD=q, k_BGKD=q / 1e-6),
        AttentionCall(layer="a", q_BHQD=q, k_BGKD=k.clamp_max(1e18)),
    ):
        S, _ = dense(call)
        assert (S > 0).all()
        holds(bracket(call), largest(S), measured(call)["max_logit"])
        assert (reach(call).double() >= largest(S)).all()
    beyond = bracket(AttentionCall(layer="a", q_BHQD=q, k_BGKD=k))
    assert torch.isnan(torch.cat((beyond.low_H, beyond.high_H))).all()  # not a wrong certificate


def test_a_scale_per_head_and_grouped_keys() -> None:
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 6, 5, 8, generator=g), torch.randn(2, 3, 7, 8, generator=g)
    scale = torch.rand(2, 6, 1, 1, generator=g)
    call = AttentionCall(layer="a", q_BHQD=q, k_BGKD=k, scale=scale)
    holds(bracket(call), largest(dense(call)[0]), measured(call)["max_logit"])
    own = scale.double() * q.double().norm(dim=-1, keepdim=True)
    own = own.amax(2) * k.double().norm(dim=-1).amax(-1).repeat_interleave(2, 1)[..., None]
    assert reach(call).double().tolist() == pytest.approx(own.amax((0, 2)).tolist(), rel=1e-4)


def test_nothing_to_bracket() -> None:
    empty = AttentionCall(layer="a", q_BHQD=Q1[:0], k_BGKD=Q1[:0])
    for values in (bracket(empty).low_H, bracket(empty).high_H, reach(empty)):
        assert values.shape == (2,)
        assert torch.isnan(values).all()
    with pytest.raises(ValueError, match="'a' has neither q and k nor scores"):
        bracket(AttentionCall(layer="a"))
    with pytest.raises(ValueError, match="'a' has no q and k; reach needs both"):
        reach(AttentionCall(layer="a", scores_BHQK=Q1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("additive", [False, True])
def test_a_row_that_sees_nothing_is_no_certificate(dtype: torch.dtype, additive: bool) -> None:
    """PyTorch's CPU kernel gives such a row a log-sum-exp of 0, above all scores of the others."""
    q = torch.ones(2, 2, 6, 8, dtype=dtype, requires_grad=True)
    k, v = (-torch.ones(2, 2, 6, 8, dtype=dtype) for _ in range(2))
    seen = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    seen[0, :, 2], seen[1] = False, False
    mask = torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, -math.inf) if additive else seen
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
    lse = out.grad_fn._saved_logsumexp
    assert (lse[0, :, 2] == 0).all()
    got = bracket(
        AttentionCall(layer="a", q_BHQD=q, k_BGKD=k, masks=(mask,), lse_BHQ=lse, dtype=dtype)
    )
    assert (got.low_H <= -8).all()
    assert (got.high_H >= -8).all()
    nothing = AttentionCall(
        layer="a", q_BHQD=q[1:], k_BGKD=k[1:], masks=(mask[1:],), lse_BHQ=lse[1:], dtype=dtype
    )
    assert bracket(nothing).low_H.isnan().all()
