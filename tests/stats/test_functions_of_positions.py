"""Score and mask functions of positions, and sinks, against the dense float64 definitions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from dense_oracle import statistics
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import TINY_TILE, integers
from test_accumulate import Watch
from test_tiled import assert_same, measured

from stability_probe.errors import ShapeError
from stability_probe.positions import Block
from stability_probe.records import AttentionCall
from stability_probe.stats import tiles
from stability_probe.stats.accumulate import accumulate
from stability_probe.stats.accumulators import merge
from stability_probe.stats.catalogue import BETWEEN_SET
from stability_probe.stats.finish import finish
from stability_probe.stats.measure import measure

INF = float("inf")


def score_mods(g: torch.Generator, H: int, Q: int, K: int) -> dict:
    slopes = torch.tensor([0.5, 0.25, 1.0, 2.0, 0.125, 4.0])[:H]
    table = integers((2, H, Q, K), g)
    return {
        "none": None,
        "cap": lambda s, b, h, q, k: 8 * torch.tanh(s / 8),
        "alibi": lambda s, b, h, q, k: s - slopes[h] * (q - k).abs(),
        "table": lambda s, b, h, q, k: s + table[b, h, q, k],
        "chained": lambda s, b, h, q, k: s + table[b][0][q][k],
        "hides": lambda s, b, h, q, k: torch.where((q + k) % 3 == b, -INF, s),
    }


def mask_mods(g: torch.Generator, Q: int, K: int) -> dict:
    documents = torch.randint(0, 3, (2, max(Q, K)), generator=g)
    padding = torch.rand((2, K), generator=g) < 0.7
    return {
        "none": None,
        "causal": lambda b, h, q, k: q >= k,
        "window": lambda b, h, q, k: (q - k).abs() <= 3,
        "document": lambda b, h, q, k: documents[b, q] == documents[b, k],
        "padding": lambda b, h, q, k: padding[b, k],
        "by head": lambda b, h, q, k: (q + k) % (h + 1) == 0,
        "nothing": lambda b, h, q, k: q < 0,
    }


@st.composite
def calls(draw: st.DrawFn) -> AttentionCall:
    B, G, R = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    Q, K, D, H = draw(st.integers(1, 24)), draw(st.integers(1, 20)), 3, G * R
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    mods = score_mods(g, H, Q, K)
    masks = mask_mods(g, Q, K)
    keep = torch.rand((B, 1, Q, K), generator=g) < 0.7
    sink_shape = draw(st.sampled_from((None, (1, H, 1, 1), (B, H, Q, 1))))
    return AttentionCall(
        layer="layer",
        q_BHQD=integers((B, H, Q, D), g) * 2.0 ** draw(st.integers(-3, 2)),
        k_BGKD=integers((B, G, K, D), g),
        scale=2.0 ** -draw(st.integers(0, 3)),
        score_mod=mods[draw(st.sampled_from(sorted(mods)))],
        mask_mod=masks[draw(st.sampled_from(sorted(masks)))],
        masks=draw(st.sampled_from(((), (keep,)))),
        causal=draw(st.booleans()),
        sink_BHQ1=None if sink_shape is None else torch.randn(sink_shape, generator=g) * 3,
        dtype=torch.float32,
    )


@settings(deadline=None, max_examples=150)
@given(call=calls(), tile=st.sampled_from((TINY_TILE, 1024, 2**18)))
def test_every_statistic_is_its_definition(call: AttentionCall, tile: int):
    before, tiles._CPU_TILE = tiles._CPU_TILE, tile
    try:
        full, default = measured(call, full=True), measured(call, full=False)
    finally:
        tiles._CPU_TILE = before
    want = statistics(
        call.q_BHQD,
        call.k_BGKD,
        masks=call.masks,
        causal=call.causal,
        scale=call.scale,
        score_mod=call.score_mod,
        mask_mod=call.mask_mod,
        sink=call.sink_BHQ1,
    )
    # as with a soft-cap, ties are decided by the last bit of a float32 function
    inexact = replace(call, softcap=1.0) if call.score_mod is not None else call
    assert_same(full, want, inexact)
    assert_same(default, want, inexact)


def test_a_score_that_a_function_masks_with_a_low_number_is_hidden():
    q, k = torch.randn(1, 1, 6, 4), torch.randn(1, 1, 6, 4)
    low = torch.finfo(torch.bfloat16).min
    keep = torch.rand(6, 6) < 0.5
    keep.fill_diagonal_(True)
    hidden = measure(q, k, score_mod=lambda s, b, h, i, j: torch.where(keep[i, j], s, low))
    masked = measure(q, k, mask=keep)
    for name in (name for name in masked if name not in BETWEEN_SET):  # bounds may differ
        value = masked[name]
        torch.testing.assert_close(hidden[name], value, equal_nan=True, msg=name)


@pytest.mark.parametrize("value", [math.nan, INF])
def test_a_function_that_makes_a_bad_score_is_a_fault_where_the_key_is_visible(value: float):
    q, k = torch.randn(1, 1, 4, 4), torch.randn(1, 1, 4, 4)

    def spoils(s, b, h, i, j):
        return torch.where((i == 2) & (j == 3), value, s)

    assert measure(q, k, score_mod=spoils)["nonfinite_scores"].item() == 1
    assert measure(q, k, score_mod=spoils, causal=True)["nonfinite_scores"].item() == 0
    assert measure(q, k, score_mod=spoils)["entropy_rows"].item() == 3


def test_an_axis_that_a_mask_ignores_costs_nothing():
    block = Block(*(torch.arange(n) for n in (2, 3, 4, 5)))
    assert block.visible(lambda b, h, q, k: q >= k).shape == (1, 1, 4, 5)
    assert block.visible(lambda b, h, q, k: h > 1).shape == (1, 3, 1, 1)
    everywhere = block.visible(lambda b, h, q, k: b.new_ones((), dtype=torch.bool))
    assert everywhere.all()
    assert everywhere.shape[1:] == (1, 1, 1)


def test_nothing_waits_for_the_device_and_no_square_is_kept():
    g = torch.Generator().manual_seed(0)
    T = 700
    call = AttentionCall(
        layer="a",
        q_BHQD=torch.randn(1, 2, T, 4, generator=g),
        k_BGKD=torch.randn(1, 2, T, 4, generator=g),
        score_mod=lambda s, b, h, q, k: s - 0.1 * (q - k).abs(),
        mask_mod=lambda b, h, q, k: q >= k,
        sink_BHQ1=torch.zeros(1, 2, 1, 1),
    )
    before, tiles._CPU_TILE = tiles._CPU_TILE, 2**14
    try:
        with Watch() as watch:
            finish(accumulate(call, full=True), full=True)
    finally:
        tiles._CPU_TILE = before
    assert "bmm" in watch.seen
    assert watch.largest < T * T / 4


def test_calls_with_and_without_a_sink_merge_by_their_rows():
    q = torch.randn(1, 1, 5, 3)
    bare = AttentionCall(layer="a", q_BHQD=q, k_BGKD=q)
    sunk = replace(bare, sink_BHQ1=torch.ones(1, 1, 1, 1))
    one, other = accumulate(bare, full=True), accumulate(sunk, full=True)
    alone = finish(other, full=True)["sink_mass"]
    assert 0 < alone.item() < 1
    assert torch.equal(finish(merge(one, other), full=True)["sink_mass"], alone)
    assert finish(one, full=True)["sink_mass"].isnan().all()


def test_a_sink_changes_nothing_but_its_own_number():
    q, k = torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4)
    bare, sunk = measure(q, k, causal=True), measure(q, k, causal=True, sinks=torch.randn(3))
    for name in bare:
        if name != "sink_mass":
            assert torch.equal(torch.nan_to_num(bare[name]), torch.nan_to_num(sunk[name])), name
    assert sunk["sink_mass"].isfinite().all()


def test_sinks_that_do_not_fit_are_refused():
    q = torch.randn(2, 3, 7, 4)
    with pytest.raises(ShapeError, match="sinks has shape"):
        measure(q, q, sinks=torch.zeros(4))
    with pytest.raises(ShapeError, match="softcap and score_mod"):
        measure(q, q, softcap=2.0, score_mod=lambda s, b, h, i, j: s)
