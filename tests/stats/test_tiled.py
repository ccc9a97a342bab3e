"""Every statistic against its dense float64 definition, over shapes, masks, dtypes and tiles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from dense_oracle import statistics
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import TINY_TILE, calls

from stability_probe.records import AttentionCall
from stability_probe.stats import tiles
from stability_probe.stats.accumulate import accumulate
from stability_probe.stats.catalogue import DEFAULT_SET, EXACT_SET
from stability_probe.stats.finish import finish

COUNTS = [
    *("entropy_hist", "fp16_overflow_unscaled", "fp16_overflow_scaled", "fp16_scores"),
    *("nonfinite_q", "nonfinite_k", "nonfinite_v", "nonfinite_scores", "nonfinite_output"),
    *("nonfinite", "nonfinite_masked_output", "masked_rows", "mask_leak", "rows"),
    *("entropy_rows", "keys", "tied_max_rows", "saturated_rows"),
]


def measured(call: AttentionCall, *, full: bool) -> dict[str, np.ndarray]:
    return {n: x.numpy() for n, x in finish(accumulate(call, full=full), full=full).items()}


def expected(call: AttentionCall) -> dict[str, np.ndarray]:
    return statistics(
        call.q_BHQD,
        call.k_BGKD,
        call.v_BGKE,
        call.output_BHQE,
        masks=call.masks,
        causal=call.causal,
        scale=call.scale,
        softcap=call.softcap,
        scores=call.scores_BHQK,
        dtype=call.dtype,
        fused=call.fused,
        input_rms=None if call.input_rms is None else float(call.input_rms),
    )


def assert_same(got: dict[str, np.ndarray], want: dict[str, np.ndarray], call: AttentionCall):
    biggest = np.nanmax([np.nanmax(np.abs(want["abs_max_logit"]), initial=0), 1.0])
    for name, value in got.items():
        assert value.dtype == np.float32
        if name in ("peak_q_norm", "peak_k_norm", "peak_cosine"):
            continue  # several pairs may share the peak: see test_peak
        if name in ("max_logit_low", "max_logit_high"):  # bounds; where absent, they bind nothing
            beyond = value - want["max_logit"].astype(np.float32)
            assert not (beyond > 0 if name == "max_logit_low" else beyond < 0).any(), name
            continue
        if name == "peak_logit":
            value, want_it = np.abs(value), np.abs(want[name])
        else:
            want_it = want[name]
        if name == "entropy_hist":  # a ratio on the edge of a bin may fall on either side
            assert value.sum() == want_it.sum()
            assert np.abs(np.cumsum(value, -1) - np.cumsum(want_it, -1)).max() <= _on_edge(want)
            continue
        tight = name in COUNTS and not (call.softcap and name == "tied_max_rows")
        np.testing.assert_allclose(
            value,
            want_it,
            rtol=1e-6 if tight else 2e-5,
            atol=0 if tight else 2e-6 + 3e-7 * biggest * (name not in ("top_weight",)),
            err_msg=name,
        )


def _on_edge(want: dict[str, np.ndarray]) -> int:
    """Rows whose ratio could fall on either side of a bin's edge: unknown, so a few."""
    return max(2, int(0.05 * np.max(want["entropy_rows"])))


@settings(deadline=None, max_examples=120)
@given(call=calls(), tile=st.sampled_from((TINY_TILE, 1024, 2**18)))
def test_every_statistic_equals_its_definition(call: AttentionCall, tile: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "_CPU_TILE", tile)
        want = expected(call)
        got = measured(call, full=True)
        assert tuple(got) == EXACT_SET
        assert_same(got, want, call)
        got = measured(call, full=False)
        assert tuple(got) == DEFAULT_SET
        assert_same(got, want, call)


@settings(deadline=None, max_examples=100)
@given(call=calls(spoilt=True), tile=st.sampled_from((TINY_TILE, 2**18)))
def test_what_is_not_finite_is_counted_and_left_out(call: AttentionCall, tile: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "_CPU_TILE", tile)
        want = expected(replace(call, softcap=None))
        assert_same(measured(replace(call, softcap=None), full=True), want, call)
        assert_same(measured(replace(call, softcap=None), full=False), want, call)


def formed(call: AttentionCall) -> torch.Tensor:
    """The scores as an unfused run forms them, in the call's dtype."""
    k = call.k_BGKD.repeat_interleave(call.q_BHQD.shape[1] // call.k_BGKD.shape[1], 1)
    scores = (call.q_BHQD.float() @ k.float().mT * call.scale).to(call.dtype)
    for mask in call.masks:
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -torch.inf)
        else:
            scores = scores + mask.clamp_min(torch.finfo(call.dtype).min).to(call.dtype)
    return scores


@settings(deadline=None, max_examples=100)
@given(
    call=calls(spoilt=False) | calls(spoilt=True),
    tile=st.sampled_from((TINY_TILE, 2**18)),
    with_pairs=st.booleans(),
    with_masks=st.booleans(),
)
def test_given_scores(call, tile, with_pairs, with_masks):
    call = replace(call, causal=False, softcap=None, scores_BHQK=formed(call), fused=False)
    if not with_pairs:
        call = replace(call, q_BHQD=None, k_BGKD=None)
    if not with_masks:
        call = replace(call, masks=())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "_CPU_TILE", tile)
        want = expected(call)
        assert_same(measured(call, full=True), want, call)
        assert_same(measured(call, full=False), want, call)
        if not with_pairs:
            for name in ("qk_abs_max_logit", "fp16_headroom_log2", "q_norm_max", "nonfinite_q"):
                assert np.isnan(measured(call, full=True)[name]).all()


def test_a_mask_of_each_head_over_several_tiles():
    g = torch.Generator().manual_seed(0)
    call = AttentionCall(
        layer="a",
        q_BHQD=torch.randn(2, 4, 20, 3, generator=g),
        k_BGKD=torch.randn(2, 2, 9, 3, generator=g),
        masks=(torch.rand(2, 4, 20, 9, generator=g) < 0.5,),
        dtype=torch.float32,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "_CPU_TILE", TINY_TILE)
        assert len(list(tiles.cut(tiles.sizes_of(call), causal=False, device_type="cpu"))) == 8
        assert_same(measured(call, full=True), expected(call), call)
        assert_same(measured(call, full=False), expected(call), call)
