"""The pair behind the largest logit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dense_oracle import statistics
from hypothesis import given, settings
from hypothesis import strategies as st

from stability_probe.records import AttentionCall
from stability_probe.stats import tiles
from stability_probe.stats.accumulate import accumulate
from stability_probe.stats.finish import finish

NAMES = ("peak_logit", "peak_q_norm", "peak_k_norm", "peak_cosine", "scale")


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    causal=st.booleans(),
    masked=st.booleans(),
    per_head=st.booleans(),
    tile=st.sampled_from((64, 2**18)),
)
def test_the_peak_is_that_very_pair(seed, causal, masked, per_head, tile):
    g = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 4, 23, 5, generator=g), torch.randn(2, 2, 19, 5, generator=g)
    mask = torch.rand(2, 1, 23, 19, generator=g) < 0.5
    scale = torch.tensor([0.5, 1.0, 2.0, 4.0]).view(4, 1, 1) if per_head else 0.37
    call = AttentionCall(
        layer="a",
        q_BHQD=q,
        k_BGKD=k,
        masks=(mask,) if masked else (),
        causal=causal,
        scale=scale,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "_CPU_TILE", tile)
        got = finish(accumulate(call, full=True), full=True)
    want = statistics(q, k, masks=call.masks, causal=causal, scale=scale)
    for name in NAMES:
        np.testing.assert_allclose(got[name].numpy(), want[name], rtol=2e-5, err_msg=name)
    rebuilt = got["scale"] * got["peak_q_norm"] * got["peak_k_norm"] * got["peak_cosine"]
    torch.testing.assert_close(rebuilt, got["peak_logit"])
    torch.testing.assert_close(got["peak_logit"].abs(), got["qk_abs_max_logit"])


def test_no_visible_pair_is_no_peak():
    q = torch.randn(1, 2, 3, 4)
    mask = torch.tensor([True, False]).view(1, 2, 1, 1)
    call = AttentionCall(layer="a", q_BHQD=q, k_BGKD=q, masks=(mask,))
    got = finish(accumulate(call, full=True), full=True)
    for name in NAMES:
        assert torch.isnan(got[name]).tolist() == [False, True]


def test_a_bad_key_is_never_the_peak():
    q, k = torch.ones(1, 1, 2, 4), torch.ones(1, 1, 3, 4)
    k[0, 0, 0] = torch.nan
    k[0, 0, 2] = 2.0
    got = finish(accumulate(AttentionCall(layer="a", q_BHQD=q, k_BGKD=k), full=True), full=True)
    assert got["peak_logit"].item() == 8.0
    assert got["peak_k_norm"].item() == 4.0
