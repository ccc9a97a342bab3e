"""How close the row numbers come to float64, where rounding hurts most."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dense_oracle import statistics

from stability_probe.records import AttentionCall
from stability_probe.stats.accumulate import accumulate
from stability_probe.stats.finish import finish
from stability_probe.stats.measure import measure
from stability_probe.stats.rowmaths import row_maths
from stability_probe.stats.tiled import row_pass


@pytest.mark.parametrize(("offset", "limit"), [(1.0, 2e-6), (100.0, 1.5e-5), (1e4, 1e-3)])
def test_entropy_of_diffuse_rows_at_any_level(offset: float, limit: float):
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 2, 50, 16, generator=g), torch.randn(1, 2, 400, 16, generator=g)
    q = torch.cat((q, torch.full((1, 2, 50, 1), 4.0)), -1)
    k = torch.cat((k, torch.full((1, 2, 400, 1), offset)), -1)  # the same for every key of a row
    got = measure(q, k, scale=0.25, rows=True)
    want = statistics(q, k, scale=0.25)
    assert 0.9 * offset < want["abs_max_logit"].max() < 1.1 * offset + 5
    error = np.abs(got["row_entropy"].numpy() - want["row_entropy"])
    assert error.max() <= limit
    assert abs(got["entropy"].numpy() - want["entropy"]).max() <= limit


@pytest.mark.parametrize("keys", [2, 3, 17, 700])
@pytest.mark.parametrize("gap", [0.0, 1e-3, 0.5, 3.0, 10.0, 16.0, 20.0, 30.0, 36.0])
@pytest.mark.parametrize("tied", [1, 2])
def test_slope_of_nearly_one_hot_rows(keys: int, gap: float, tied: int):
    g = torch.Generator().manual_seed(keys)
    scores = -gap - 2 * torch.rand(1, 1, 6, keys, generator=g)
    scores[..., :tied] = 0.0
    scores = scores + torch.tensor([0.0, 5.0, -70.0, 300.0, 900.0, -2000.0])[:, None]
    full = finish(accumulate(AttentionCall(layer="a", scores_BHQK=scores), full=True), full=True)
    want = statistics(scores=scores)
    for name in ("softmax_slope", "jacobian_trace"):
        np.testing.assert_allclose(full[name].numpy(), want[name], rtol=1e-5)
    np.testing.assert_allclose(full["entropy"].numpy(), want["entropy"], rtol=2e-5, atol=1e-12)
    assert np.array_equal(full["saturated_rows"].numpy(), want["saturated_rows"].astype("f4"))


def test_below_the_floor_a_row_is_one_hot_up_to_its_keys():
    scores = torch.full((1, 1, 1, 1000), -500.0)
    scores[..., 3] = 0.0
    values = finish(accumulate(AttentionCall(layer="a", scores_BHQK=scores), full=True), full=True)
    assert 0 <= values["jacobian_trace"].item() < 1e-15
    assert 0 <= values["entropy"].item() < 1e-13
    assert values["top_weight"].item() == 1.0


def test_entropy_is_never_negative():
    g = torch.Generator().manual_seed(0)
    for size in (1.0, 30.0, 1e3, 1e4):
        scores = size * torch.randn(1, 4, 64, 64, generator=g)
        rows = row_pass(AttentionCall(layer="a", scores_BHQK=scores), None, full=False)
        maths = row_maths(rows.per_head())
        assert (maths.entropy >= 0).all()
        assert ((maths.entropy_ratio >= 0) & (maths.entropy_ratio <= 1)).all()
        assert (maths.trace >= 0).all()


def test_uniform_rows_reach_the_top_of_the_scale():
    values = measure(torch.zeros(5, 8), torch.ones(33, 8))
    assert values["entropy_ratio"].item() == pytest.approx(1.0, abs=1e-6)
    assert values["entropy_hist"].tolist() == [[0.0] * 15 + [5.0]]
    assert values["jacobian_trace"].item() == pytest.approx(1 - 1 / 33, rel=1e-6)
    assert values["tied_max_rows"].item() == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_inputs_are_read_in_float32(dtype: torch.dtype):
    g = torch.Generator().manual_seed(1)
    q = (20 * torch.randn(2, 3, 70, 33, generator=g)).to(dtype)
    k = torch.randn(2, 3, 90, 33, generator=g).to(dtype)
    got, want = measure(q, k, scale=0.3), statistics(q, k, scale=0.3, dtype=dtype)
    assert want["abs_max_logit"].max() > 100
    for name in ("max_logit", "min_logit", "entropy", "softmax_slope", "logit_std", "logit_gap"):
        np.testing.assert_allclose(got[name].numpy(), want[name], rtol=2e-5, err_msg=name)


def test_many_tiles_of_the_real_size():
    g = torch.Generator().manual_seed(2)
    q, k = torch.randn(2, 6, 300, 20, generator=g), torch.randn(2, 3, 1000, 20, generator=g)
    for causal in (False, True):
        call = AttentionCall(layer="a", q_BHQD=q, k_BGKD=k, scale=0.25, causal=causal)
        want = dense_torch(q, k, scale=0.25, causal=causal)
        for full in (False, True):
            got = finish(accumulate(call, full=full), full=full)
            for name, value in want.items():
                if name in got:
                    torch.testing.assert_close(
                        got[name].double(), value, rtol=1e-5, atol=1e-6, msg=f"{name} {causal}"
                    )


def dense_torch(q, k, *, scale, causal):
    """A few statistics the short way, over the whole matrix in float64."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    s = q.double() @ k.double().mT * scale
    Q, K = s.shape[-2:]
    seen = torch.ones(Q, K, dtype=torch.bool)
    seen = seen.tril() if causal else seen
    p = s.masked_fill(~seen, -torch.inf).softmax(-1)
    n = seen.sum(-1)
    use = n >= 2
    H = torch.special.entr(p).sum(-1)
    slope = (p * (1 - p)).sum(-1)
    mean = s.masked_fill(~seen, 0).sum(-1) / n
    top = s.masked_fill(~seen, -torch.inf).amax(-1)
    return {
        "max_logit": top.amax((0, 2)),
        "min_logit": s.masked_fill(~seen, torch.inf).amin((0, 2, 3)),
        "abs_max_logit": s.masked_fill(~seen, 0).abs().amax((0, 2, 3)),
        "entropy": H[..., use].mean((0, 2)),
        "entropy_ratio": (H / n.log())[..., use].mean((0, 2)),
        "jacobian_trace": slope[..., use].mean((0, 2)),
        "softmax_slope": slope[..., use].sum((0, 2)) / (2 * n[use].sum()),
        "logit_gap": (top - mean)[..., use].mean((0, 2)),
        "first_key_mass": p[..., 0][..., use].mean((0, 2)),
    }
