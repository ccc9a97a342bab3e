"""Whole float32 products whatever the user set, and every setting back afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from test_accumulate import Watch, some_calls

from stability_probe.stats.accumulate import accumulate
from stability_probe.stats.precision import count_nonfinite, full_float32, rounds_to_one


@pytest.fixture
def products() -> Iterator[list]:
    settings = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]
    yield settings
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    for setting in settings:
        setting.fp32_precision = "none"


@pytest.mark.parametrize("precision", ["medium", "high", "highest"])
def test_a_lowered_product_precision_is_raised_and_put_back(products, precision: str):
    torch.set_float32_matmul_precision(precision)
    before = [s.fp32_precision for s in products]
    with Watch() as watch:
        for call in some_calls(T=12):
            accumulate(call, full=True)
    assert watch.precisions == {"ieee"}
    assert [s.fp32_precision for s in products] == before
    assert torch.get_float32_matmul_precision() == precision


def test_it_is_put_back_after_an_error(products):
    torch.set_float32_matmul_precision("medium")
    before = [s.fp32_precision for s in products]
    with pytest.raises(KeyError, match="ieee"), full_float32("cpu"):
        raise KeyError(products[1].fp32_precision)
    assert [s.fp32_precision for s in products] == before


def test_a_setting_that_nobody_made_is_not_touched(products):
    for setting in products:
        setting.fp32_precision = "none"
    with full_float32("cpu"):
        assert [s.fp32_precision for s in products] == ["none", "none"]


def test_a_wider_setting_is_still_followed_afterwards(products):
    for setting in products:
        setting.fp32_precision = "none"
    torch.backends.fp32_precision = "tf32"
    inherited = [s.fp32_precision for s in products]
    assert "tf32" in inherited
    with full_float32("cpu"):
        assert {s.fp32_precision for s in products} <= {"ieee", "none"}
    assert [s.fp32_precision for s in products] == inherited
    torch.backends.fp32_precision = "ieee"
    assert [s.fp32_precision for s in products] == ["ieee", "ieee"]


def test_autocast_and_gradients_come_back():
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad():
        with full_float32("cpu"):
            assert not torch.is_autocast_enabled("cpu")
            assert not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_grad_enabled()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_count_of_values_that_are_not_finite(dtype: torch.dtype, monkeypatch):
    monkeypatch.setattr("stability_probe.stats.precision._CPU_PIECE", 40)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 4, 7, generator=g).to(dtype)
    x[0, 0, 0, 0] = x[4, 2, 3] = torch.nan
    x[1, 1, 1, 1:3] = torch.inf
    x[2, 0, 2, 5] = -torch.inf
    x[3, 0, 0, 0] = torch.finfo(dtype).max
    want = (~torch.isfinite(x)).sum(-1).float()
    assert want.sum() == 11
    assert torch.equal(count_nonfinite(x), want)
    assert torch.equal(count_nonfinite(x.transpose(1, 2)), want.transpose(1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_where_a_weight_rounds_to_one(dtype: torch.dtype):
    edge = rounds_to_one(dtype)
    weights = torch.tensor([1 - edge, 1 - edge * 1.01], dtype=torch.float64)
    assert (weights.to(dtype) == 1).tolist() == [True, False]
