"""Merging, and doing no harm: nothing waits, nothing global moves, nothing large is kept."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import calls
from torch.utils._python_dispatch import TorchDispatchMode

from stability_probe.records import AttentionCall
from stability_probe.stats import tiles
from stability_probe.stats.accumulate import accumulate
from stability_probe.stats.accumulators import MAXIMA, concatenate, merge
from stability_probe.stats.catalogue import BETWEEN_SET
from stability_probe.stats.finish import finish


def part(call: AttentionCall, cut: slice) -> AttentionCall:
    """Some sequences of a call."""
    whole = call.q_BHQD.shape[0]

    def take(x):
        return x[cut] if isinstance(x, torch.Tensor) and x.dim() == 4 and len(x) == whole else x

    names = ("q_BHQD", "k_BGKD", "v_BGKE", "output_BHQE", "scale")
    return replace(
        call, masks=tuple(take(m) for m in call.masks), **{n: take(getattr(call, n)) for n in names}
    )


@settings(deadline=None, max_examples=40)
@given(call=calls(spoilt=False) | calls(spoilt=True), full=st.booleans())
def test_two_halves_merge_into_the_whole(call: AttentionCall, full: bool):
    if call.q_BHQD.shape[0] < 2:
        return
    whole = accumulate(call, full=full)
    kept = [i for i, name in enumerate(MAXIMA) if name not in ("low", "high")]  # rounding differs
    halves = [accumulate(part(call, cut), full=full) for cut in (slice(0, 1), slice(1, None))]
    for both in (merge(*halves), merge(*reversed(halves))):
        # not bit by bit: exp2 rounds the last few values of a tile in another way than the others
        torch.testing.assert_close(both.maxima[kept], whole.maxima[kept], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(both.minima, whole.minima, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(both.sums, whole.sums, rtol=1e-6, atol=1e-7)
        peaks = both.peak[0].abs(), whole.peak[0].abs()
        torch.testing.assert_close(*peaks, rtol=0, atol=0, equal_nan=True)


def test_a_call_that_sees_nothing_leaves_the_other_s_peak():
    x = torch.randn(1, 2, 5, 3)
    seen = AttentionCall(layer="a", q_BHQD=x, k_BGKD=x)
    blind = replace(seen, masks=(torch.zeros(5, 5, dtype=torch.bool),))
    one, other = accumulate(seen, full=True), accumulate(blind, full=True)
    assert torch.equal(merge(one, other).peak, one.peak)
    assert torch.equal(merge(other, one).peak, one.peak)


def test_layers_side_by_side_finish_as_they_would_alone():
    g = torch.Generator().manual_seed(0)
    calls = [
        AttentionCall(
            layer=str(h), q_BHQD=torch.randn(2, h, 9, 4, generator=g), k_BGKD=torch.ones(2, 1, 7, 4)
        )
        for h in (1, 3, 2)
    ]
    parts = [accumulate(call, full=True) for call in calls]
    together = finish(concatenate(parts), full=True)
    for name, values in together.items():
        alone = torch.cat([finish(acc, full=True)[name] for acc in parts])
        assert torch.equal(torch.nan_to_num(values), torch.nan_to_num(alone)), name
        assert values.shape[0] == 6


class Watch(TorchDispatchMode):
    """Fails on whatever makes the host wait for the device; remembers sizes and products."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")

    def __init__(self):
        super().__init__()
        self.largest = 0
        self.seen: set[str] = set()
        self.precisions: set[str] = set()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        self.seen.add(name)
        assert name.rstrip("_") not in self.WAITS, f"{name} waits for the device"
        if name.startswith("index"):
            for index in args[1] if isinstance(args[1], (list, tuple)) else args[1:2]:
                bool_index = isinstance(index, torch.Tensor) and index.dtype == torch.bool
                assert not bool_index, "indexing with a bool tensor waits for the device"
        out = func(*args, **(kwargs or {}))
        if name == "bmm":
            self.precisions.add(torch.backends.mkldnn.matmul.fp32_precision)
            self.precisions.add(torch.backends.cuda.matmul.fp32_precision)
            self.dtypes.add(out.dtype)
        if isinstance(out, torch.Tensor) and out._base is None:
            self.largest = max(self.largest, out.numel())
        return out


def some_calls(*, T: int, H: int = 2) -> list[AttentionCall]:
    g = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, H, T, 4, generator=g), torch.randn(2, 1, T, 4, generator=g)
    base = AttentionCall(
        layer="a",
        q_BHQD=q,
        k_BGKD=k,
        v_BGKE=k,
        output_BHQE=q,
        input_rms=torch.tensor(1.0),
        scale=torch.ones(2, H, 1, 1),
    )
    keep = torch.rand(2, 1, 1, T, generator=g) < 0.5
    return [
        base,
        replace(base, causal=True),
        replace(base, masks=(keep,), softcap=3.0),
        replace(base, masks=(torch.zeros(2, 1, 1, T).masked_fill(~keep, -1e4),), causal=True),
        replace(base, scores_BHQK=torch.randn(2, H, T, T, generator=g), masks=()),
    ]


@pytest.mark.parametrize("full", [False, True])
def test_nothing_waits_for_the_device(full: bool):
    with Watch() as watch:
        for call in some_calls(T=12):
            finish(merge(accumulate(call, full=full), accumulate(call, full=full)), full=full)
    assert "bmm" in watch.seen


@pytest.mark.parametrize("full", [False, True])
def test_collapsed_heads_make_no_denormals(full: bool):
    """Products with denormals cost forty times as much: neither e nor e^2 may be one."""

    class Weights(TorchDispatchMode):
        smallest = 1.0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.exp2_.default:
                self.smallest = min(self.smallest, out.double().amin().item())
            return out

    q = 200 * torch.randn(1, 2, 40, 8)
    for call in (AttentionCall(layer="a", q_BHQD=q, k_BGKD=q, causal=c) for c in (False, True)):
        with Weights() as weights:
            accumulate(call, full=full)
        assert weights.smallest < 1e-15
        assert weights.smallest**2 >= torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("full", [False, True])
def test_a_device_that_cannot_be_looked_at_gives_the_same(
    full: bool, monkeypatch: pytest.MonkeyPatch
):
    for call in some_calls(T=12):
        looked = accumulate(call, full=full)
        with monkeypatch.context() as patch:
            for room in ("accumulate", "tiled"):
                patch.setattr(f"stability_probe.stats.{room}.known_finite", lambda *_: False)
            counted = accumulate(call, full=full)
        for name in ("maxima", "minima", "sums"):
            one, two = getattr(looked, name), getattr(counted, name)
            torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)


def test_more_queries_than_keys_under_a_causal_edge():
    """Tiles of queries that see every key have no corner."""
    g = torch.Generator().manual_seed(5)
    q, k = torch.randn(1, 2, 300, 4, generator=g), torch.randn(1, 2, 5, 4, generator=g)
    call = AttentionCall(layer="a", q_BHQD=q, k_BGKD=k, causal=True)
    mask = torch.ones(300, 5, dtype=torch.bool).tril()
    masked = replace(call, causal=False, masks=(mask,))
    one, two = (finish(accumulate(c, full=True), full=True) for c in (call, masked))
    for name in one.keys() - BETWEEN_SET:  # a mask says less of what is visible than the edge
        torch.testing.assert_close(one[name], two[name], rtol=1e-5, atol=1e-6, equal_nan=True)


def test_products_beyond_float16_are_counted_one_by_one():
    """The short cut of plain calls ends where there is something to count."""
    q = torch.ones(1, 1, 3, 2)
    q[0, 0, 1] = 300.0
    for largest, unscaled, scaled in ((100.0, 0, 0), (200.0, 3, 0), (2000.0, 3, 3)):
        call = AttentionCall(layer="a", q_BHQD=q, k_BGKD=torch.full((1, 1, 3, 2), largest))
        values = finish(accumulate(replace(call, scale=0.1), full=True), full=True)
        assert values["fp16_overflow_unscaled"].tolist() == [unscaled]
        assert values["fp16_overflow_scaled"].tolist() == [scaled]


def test_the_watch_sees_what_waits():
    x = torch.ones(3)
    for wait in (lambda: x[x > 0], lambda: x.sum().item(), lambda: bool(x[0]), x.nonzero):
        with pytest.raises(AssertionError, match="waits"), Watch():
            wait()


@pytest.mark.parametrize("full", [False, True])
def test_no_tensor_of_the_size_of_the_scores(full: bool):
    T, H = 1024, 1
    for call in some_calls(T=T, H=H)[:4]:
        with Watch() as watch:
            accumulate(call, full=full)
        # a tile, or what is per query or key: never T x T
        assert watch.largest <= max(tiles._CPU_TILE, 60 * 2 * H * T) < T * T


@pytest.mark.parametrize("full", [False, True])
def test_no_random_number_is_drawn(full: bool):
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    for call in some_calls(T=12):
        accumulate(call, full=full)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_of_the_caller_changes_nothing(dtype: torch.dtype):
    for call in some_calls(T=40):
        alone = accumulate(call, full=True)
        with Watch() as watch, torch.autocast("cpu", dtype=dtype):
            inside = accumulate(call, full=True)
            assert torch.is_autocast_enabled("cpu")
        assert watch.dtypes <= {torch.float32}
        assert torch.equal(inside.sums, alone.sums)
        assert torch.equal(inside.maxima, alone.maxima)


def test_gradients_are_neither_needed_nor_recorded():
    for call in some_calls(T=12):
        q = call.q_BHQD.clone().requires_grad_()
        acc = accumulate(replace(call, q_BHQD=q), full=True)
        assert not any(x.requires_grad for x in (acc.maxima, acc.minima, acc.sums, acc.peak))
        assert torch.is_grad_enabled()


def test_inputs_are_left_as_they_were():
    for call in some_calls(T=12):
        names = ("q_BHQD", "k_BGKD", "v_BGKE", "output_BHQE", "scores_BHQK", "scale")
        tensors = [x for n in names if (x := getattr(call, n)) is not None] + list(call.masks)
        before = [(x.clone(), x._version) for x in tensors]
        for full in (False, True):
            accumulate(call, full=full)
        for x, (copy, version) in zip(tensors, before, strict=True):
            assert torch.equal(x, copy)
            assert x._version == version


def test_heads_that_lie_apart_in_memory():
    g = torch.Generator().manual_seed(5)
    q, k = torch.randn(2, 30, 4, 8, generator=g), torch.randn(2, 30, 2, 8, generator=g)
    apart = AttentionCall(layer="a", q_BHQD=q.transpose(1, 2), k_BGKD=k.transpose(1, 2))
    close = AttentionCall(
        layer="a", q_BHQD=apart.q_BHQD.contiguous(), k_BGKD=apart.k_BGKD.contiguous()
    )
    for full in (False, True):
        a, b = accumulate(apart, full=full), accumulate(close, full=full)
        assert torch.equal(a.sums, b.sums)
        assert torch.equal(a.maxima, b.maxima)


def test_a_call_without_anything_to_read():
    with pytest.raises(ValueError, match="neither q and k nor scores"):
        accumulate(AttentionCall(layer="a"), full=True)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 2, 0, 4)])
@pytest.mark.parametrize("full", [False, True])
def test_no_rows_at_all_is_absent(shape: tuple[int, ...], full: bool):
    call = AttentionCall(layer="a", q_BHQD=torch.ones(shape), k_BGKD=torch.ones(shape))
    values = finish(accumulate(call, full=full), full=full)
    assert values["nonfinite"].tolist() == [0.0, 0.0]
    assert torch.isnan(values["entropy"]).all()
    assert torch.isnan(values["qk_abs_max_logit"]).all()


def test_no_keys_masks_every_row():
    call = AttentionCall(layer="a", q_BHQD=torch.ones(1, 2, 3, 4), k_BGKD=torch.ones(1, 2, 0, 4))
    values = finish(accumulate(call, full=True), full=True)
    assert values["masked_rows"].tolist() == [3.0, 3.0]
    assert torch.isnan(values["entropy"]).all()


def test_the_input_is_pooled_by_its_rows():
    def call(rows: int, rms: float) -> AttentionCall:
        x = torch.ones(1, 2, rows, 4)
        return AttentionCall(layer="a", q_BHQD=x, k_BGKD=x, input_rms=torch.tensor(rms))

    parts = [accumulate(call(*x), full=True) for x in ((3, 2.0), (1, 6.0), (5, torch.inf))]
    both = merge(merge(parts[0], parts[1]), parts[2])
    assert finish(both, full=True)["input_rms"].tolist() == [pytest.approx(12**0.5)] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True])
def test_only_an_unfused_float16_run_forms_float16_scores(dtype: torch.dtype, fused: bool):
    x = torch.ones(1, 1, 2, 4)
    call = AttentionCall(layer="a", q_BHQD=x, k_BGKD=x, dtype=dtype, fused=fused)
    values = finish(accumulate(call, full=False), full=False)
    assert values["fp16_scores"].item() == float(dtype == torch.float16 and not fused)
