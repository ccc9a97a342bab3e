"""Overflow that float16 would have, overflow that really was, and which cause is told."""

from __future__ import annotations

import math

import pytest
import torch

from stability_probe.records import AttentionCall
from stability_probe.stats.accumulate import accumulate
from stability_probe.stats.finish import finish
from stability_probe.stats.measure import measure

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOAT16_MAX = 65504.0


def both(**fields) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    call = AttentionCall(layer="a", **fields)
    return tuple(finish(accumulate(call, full=full), full=full) for full in (False, True))


def vectors(size: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 3, 9, 16, generator=g), torch.randn(2, 3, 9, 16, generator=g)
    return (size * q).to(dtype), (size * k).to(dtype)


SCALES = [1.0, 0.125, -3.0, torch.tensor([1.0, 1e-3, 40.0]).view(3, 1, 1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", SCALES, ids=["1", "1/8", "-3", "per head"])
@pytest.mark.parametrize("size", [0.01, 1.0, 50.0, 2000.0])
def test_headroom_is_of_the_product_before_the_scale(
    dtype: torch.dtype, scale: float | torch.Tensor, size: float
) -> None:
    q, k = vectors(size, dtype)
    product = (q.double() @ k.double().mT).abs()
    want = torch.log2(FLOAT16_MAX / product.amax((0, 2, 3)))
    for values in both(q_BHQD=q, k_BGKD=k, scale=scale):
        got = values["fp16_headroom_log2"].double()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(values["fp16_overflow_unscaled"], (product > FLOAT16_MAX).sum((0, 2, 3)))
    logits = (product * torch.as_tensor(scale).abs()).double()
    assert torch.equal(values["fp16_overflow_scaled"], (logits > FLOAT16_MAX).sum((0, 2, 3)))
    assert values["nonfinite"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("size", [1.0, 38.0, 100.0, 1000.0])
def test_headroom_below_zero_is_what_float16_really_does(size: float) -> None:
    q, k = vectors(size, torch.float16)
    product = q.double() @ k.double().mT
    really = torch.isinf(product.half()).sum((0, 2, 3))
    # between the largest float16 and the halfway point to the next power float16 rounds down
    edge = ((product.abs() > FLOAT16_MAX) & (product.abs() < 65520)).sum((0, 2, 3))
    values = measure(q, k)
    assert torch.equal(values["fp16_overflow_unscaled"], really + edge)
    assert ((values["fp16_headroom_log2"] < 0) == (really + edge > 0)).all()


def test_pairs_that_nobody_sees_take_no_headroom() -> None:
    q, k = vectors(1.0, torch.float32)
    k[:, :, -1] = 1e5
    seen = torch.arange(9) < 8
    for values in both(q_BHQD=q, k_BGKD=k, masks=(seen,)):
        assert (values["fp16_headroom_log2"] > 10).all()
    assert values["fp16_overflow_unscaled"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fused_kernel_that_could_overflow_has_not(dtype: torch.dtype) -> None:
    q, k = vectors(400.0, dtype)
    for values in both(q_BHQD=q, k_BGKD=k, v_BGKE=k, output_BHQE=k, dtype=dtype):
        assert (values["fp16_headroom_log2"] < 0).all()
        assert values["nonfinite"].tolist() == values["fp16_scores"].tolist() == [0, 0, 0]
    assert (values["fp16_overflow_unscaled"] > 0).all()
    for name in ("q", "k", "v", "scores", "output", "masked_output"):
        assert values[f"nonfinite_{name}"].tolist() == [0, 0, 0]


def test_scores_that_overflowed_are_realised_and_potential_counts_apart() -> None:
    q, k = vectors(400.0, torch.float16)
    scores = (q.double() @ k.double().mT).half() / 4
    # -inf hides a key, whoever wrote it: the same entries that softmax gives no weight
    realised = torch.isposinf(scores).sum((0, 2, 3))
    assert (realised > 0).all()
    for values in both(q_BHQD=q, k_BGKD=k, scores_BHQK=scores, scale=0.25, fused=False):
        assert torch.equal(values["nonfinite"], realised)
        assert values["fp16_scores"].tolist() == [1, 1, 1]
        assert (values["fp16_headroom_log2"] < 0).all()
    assert torch.equal(values["nonfinite_scores"], realised)
    assert values["fp16_overflow_scaled"].tolist() == [0, 0, 0]  # what is left fits


CAUSES = ("q", "k", "scores", "v", "output")  # the earliest first


@pytest.mark.parametrize("first", range(len(CAUSES)))
def test_the_first_cause_wins_whatever_follows(first: int) -> None:
    """Cause number i spoils i + 1 values, and so do all later ones."""
    x = torch.ones(1, 1, 3, 8)
    tensors = {name: x.clone() for name in CAUSES}
    tensors["scores"] = torch.ones(1, 1, 3, 3)
    for i, name in enumerate(CAUSES[first:], start=first):
        tensors[name].view(-1)[: i + 1] = torch.nan
    fields = dict(zip(("q_BHQD", "k_BGKD", "scores_BHQK", "v_BGKE", "output_BHQE"),
                      tensors.values(), strict=True))  # fmt: skip
    for values in both(**fields, fused=False):
        assert values["nonfinite"].item() == first + 1
    later = [values[f"nonfinite_{name}"].item() for name in CAUSES]
    assert later == [0] * first + list(range(first + 1, 6))


def test_without_q_and_k_nothing_is_known_of_the_product() -> None:
    scores = torch.tensor([[[[1.0, math.inf], [7e4, 0.0]]]])
    for values in both(scores_BHQK=scores, fused=False):
        assert math.isnan(values["fp16_headroom_log2"].item())
        assert values["nonfinite"].item() == 1
    assert math.isnan(values["fp16_overflow_unscaled"].item())
    assert values["fp16_overflow_scaled"].item() == 1
