"""What the steps between measured ones get, against the exact statistics of the same call."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import TINY_TILE, calls
from test_tiled import measured

from stability_probe.records import AttentionCall
from stability_probe.stats import glance as module
from stability_probe.stats import tiles
from stability_probe.stats.glance import GLANCE, glance, glanced
from stability_probe.stats.part import head_of, part_of, sequence_of
from stability_probe.stats.tiles import sizes_of


def numbers(call: AttentionCall, turn: int) -> dict[str, torch.Tensor]:
    return glanced(glance(call, turn))


def exactly(call: AttentionCall, name: str) -> torch.Tensor:
    return torch.from_numpy(measured(call, full=True)[name])


@settings(deadline=None, max_examples=30)
@given(call=calls(), turn=st.integers(0, 10), tile=st.sampled_from((TINY_TILE, 2**18)))
def test_the_head_whose_turn_it_is_has_its_maximum(call: AttentionCall, turn: int, tile: int):
    call = replace(call, softcap=None)
    sizes = sizes_of(call)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "_CPU_TILE", tile)
        patch.setattr(module, "SHARE", 1)  # all rows at each turn
        got = numbers(call, turn)["rotating_max_logit"]
        patch.setattr(module, "SHARE", 64)
        pairs = sizes.B * sizes.G
        each = [numbers(call, turn + pairs * i)["rotating_max_logit"] for i in range(64)]
        part, heads = head_of(call, turn)
        want = torch.full_like(got, math.nan)
        want[heads] = exactly(part, "qk_abs_max_logit")
    torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-6, atol=0)
    together = torch.stack(each).nan_to_num(nan=-math.inf).amax(0)
    torch.testing.assert_close(together, want.nan_to_num(nan=-math.inf), rtol=1e-6, atol=0)


def test_of_a_small_batch_a_turn_looks_at_some_of_the_rows(monkeypatch: pytest.MonkeyPatch):
    filled = []
    real = tiles.Products.fill
    monkeypatch.setattr(
        tiles.Products, "fill", lambda p, t, o: (filled.append(o.numel()), real(p, t, o))
    )
    for B, G, causal in ((4, 8, True), (4, 8, False), (1, 2, True), (16, 8, False)):
        call = AttentionCall(
            layer="a",
            q_BHQD=torch.randn(B, G, 1024, 8),
            k_BGKD=torch.randn(B, G, 1024, 8),
            causal=causal,
        )
        filled.clear()
        turns = B * G * -(-64 // (B * G))
        for turn in range(turns):
            glance(call, turn)
        whole = B * G * 1024 * (1024 if not causal else 576)  # 128 rows a tile, keys to its end
        if (B, G) == (1, 2):  # 8 tiles of 128 rows cannot be shared out further
            assert sum(filled) == whole * turns / (B * G) / 8
        else:
            assert sum(filled) == whole


@settings(deadline=None, max_examples=60)
@given(call=calls() | calls(spoilt=True), turn=st.integers(0, 3))
def test_bounds_hold_and_what_is_not_known_is_absent(call: AttentionCall, turn: int):
    got, largest = numbers(call, turn), exactly(call, "max_logit")
    assert tuple(got) == GLANCE
    slack = 1e-5 * largest.abs() + 1e-5
    assert not (got["max_logit_low"] > largest + slack).any()
    assert not (got["max_logit_high"] < largest - slack).any()
    assert all(torch.isfinite(x[~torch.isnan(x)]).all() for x in got.values())


def test_turns_go_through_all_heads_and_sequences():
    q, k = torch.randn(3, 4, 5, 8), torch.randn(3, 2, 5, 8)
    call = AttentionCall(layer="a", q_BHQD=q, k_BGKD=k, v_BGKE=k)
    seen = {(n, h) for n in range(6) for h in range(4) if not _absent(call, n)[h]}
    assert seen == {(n, h) for n in range(6) for h in ((0, 1) if n % 2 == 0 else (2, 3))}
    firsts = [head_of(call, n)[0].q_BHQD.data_ptr() for n in range(6)]
    assert len(set(firsts)) == 6
    assert [head_of(call, n + 6)[0].q_BHQD.data_ptr() for n in range(6)] == firsts


def _absent(call: AttentionCall, turn: int) -> list[bool]:
    return torch.isnan(numbers(call, turn)["rotating_max_logit"]).tolist()


def test_micro_batches_merge_by_maximum_and_an_unknown_bound_stays_unknown():
    one, two = (
        AttentionCall(
            layer="a",
            q_BHQD=torch.randn(2, 2, 4, 8),
            k_BGKD=torch.randn(2, 2, 4, 8),
            lse_BHQ=torch.randn(2, 2, 4),
        )
        for _ in range(2)
    )
    both = glanced(torch.maximum(glance(one, 0), glance(two, 0)))
    for name in ("max_logit_low", "max_logit_high"):
        expected = torch.maximum(numbers(one, 0)[name], numbers(two, 0)[name])
        torch.testing.assert_close(both[name], expected)
    biased = replace(two, masks=(torch.zeros(4, 4),), lse_BHQ=None)  # the norms certify nothing
    mixed = glanced(torch.maximum(glance(biased, 0), glance(one, 0)))
    assert torch.isnan(mixed["max_logit_high"]).all()
    torch.testing.assert_close(mixed["max_logit_low"], numbers(one, 0)["max_logit_low"])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_log_sum_exp_brackets_a_collapsed_head(causal: bool, dtype: torch.dtype):
    q, k, v = (torch.randn(2, 4, 64, 32).mul_(6).to(dtype).requires_grad_() for _ in range(3))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    call = AttentionCall(
        layer="a", q_BHQD=q.detach(), k_BGKD=k.detach(), causal=causal, scale=32**-0.5,
        lse_BHQ=out.grad_fn._saved_logsumexp, dtype=dtype,
    )  # fmt: skip
    got, largest = numbers(call, 0), exactly(call, "max_logit")
    assert (largest > 40).all()
    assert (got["max_logit_low"] > 0.9 * largest).all()
    assert (got["max_logit_high"] < 1.05 * largest).all()


def test_scores_without_q_and_k_have_bounds_that_are_exact_and_no_turn():
    scores = torch.randn(2, 3, 5, 7)
    got = numbers(AttentionCall(layer="a", scores_BHQK=scores, fused=False), 1)
    torch.testing.assert_close(got["max_logit_high"], scores.amax((0, 2, 3)))
    torch.testing.assert_close(got["max_logit_low"], scores.amax((0, 2, 3)))
    assert torch.isnan(got["rotating_max_logit"]).all()


@settings(deadline=None, max_examples=60)
@given(call=calls(), data=st.data())
def test_a_part_has_the_statistics_of_the_whole_cut_by_hand(call: AttentionCall, data):
    sizes = sizes_of(call)
    b, g = data.draw(st.integers(0, sizes.B - 1)), data.draw(st.integers(0, sizes.G - 1))
    heads = slice(g * sizes.R, (g + 1) * sizes.R)
    shape = (sizes.B, sizes.heads, sizes.Q, sizes.K)
    scale = call.scale
    by_hand = replace(
        call,
        q_BHQD=call.q_BHQD[b : b + 1, heads],
        k_BGKD=call.k_BGKD[b : b + 1, g : g + 1],
        v_BGKE=call.v_BGKE[b : b + 1, g : g + 1],
        output_BHQE=call.output_BHQE[b : b + 1, heads],
        masks=tuple(m.expand(shape)[b : b + 1, heads] for m in call.masks),
        scale=scale[b : b + 1, heads] if isinstance(scale, torch.Tensor) else scale,
    )
    part = part_of(call, slice(b, b + 1), slice(g, g + 1))
    got, want = measured(part, full=True), measured(by_hand, full=True)
    for name in want:
        torch.testing.assert_close(got[name], want[name], equal_nan=True, rtol=0, atol=0)


def test_a_part_keeps_the_positions_of_functions():
    q, k = torch.randn(3, 4, 6, 8), torch.randn(3, 2, 6, 8)

    def mask_mod(b, h, i, j):
        return (j <= i) & ((b + h + j) % 3 > 0) | (j == 0)

    def score_mod(s, b, h, i, j):
        return s + b - 2 * h + 0.1 * j

    call = AttentionCall(layer="a", q_BHQD=q, k_BGKD=k, mask_mod=mask_mod, score_mod=score_mod)
    whole = measured(call, full=True)["max_logit"]
    parts = [
        measured(part_of(call, slice(b, b + 1), slice(g, g + 1)), full=True)["max_logit"]
        for b in range(3)
        for g in range(2)
    ]
    together = torch.tensor([[*parts[2 * b], *parts[2 * b + 1]] for b in range(3)]).amax(0)
    torch.testing.assert_close(together, torch.from_numpy(whole))


def test_one_sequence_has_all_heads_and_counts_as_one():
    q, k = torch.randn(3, 4, 6, 8), torch.randn(3, 2, 6, 8)
    call = AttentionCall(layer="a", q_BHQD=q, k_BGKD=k, sequences=3)
    for turn in range(4):
        part = sequence_of(call, turn)
        assert torch.equal(part.q_BHQD, q[turn % 3][None])
        assert part.sequences is None  # as many as its batch axis: one
    packed = AttentionCall(layer="a", q_BHQD=q[:1], k_BGKD=k[:1], sequences=5)
    assert sequence_of(packed, 7).sequences == 5
    chunk = replace(call, sequences=0)  # its sequences are counted with another chunk
    assert sequence_of(chunk, 0).sequences == 0


def test_a_part_has_its_own_bounds_and_not_those_of_other_sequences():
    """The kernel's log-sum-exp has no axis for the head's width; it is cut all the same."""
    q, k = torch.randn(3, 4, 6, 8), torch.randn(3, 2, 6, 8)
    q *= torch.tensor([1.0, 30.0, 0.1])[:, None, None, None]
    scores = q @ k.repeat_interleave(2, 1).mT
    call = AttentionCall(layer="a", q_BHQD=q, k_BGKD=k, lse_BHQ=scores.logsumexp(-1))
    for b in range(3):
        for heads, g in ((slice(0, 2), 0), (slice(2, 4), 1)):
            part = part_of(call, slice(b, b + 1), slice(g, g + 1))
            torch.testing.assert_close(part.lse_BHQ, call.lse_BHQ[b : b + 1, heads])
        got = measured(sequence_of(call, b), full=True)
        largest = scores[b].amax((1, 2)).numpy()
        assert (got["max_logit_low"] <= largest).all()
        assert (largest <= got["max_logit_high"]).all()
