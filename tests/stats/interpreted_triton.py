"""The Triton kernel in Triton's own interpreter, which runs it in NumPy, one program at a time.

Not collected by itself: whether kernels are interpreted is decided when Triton is imported, for
the whole process, so `test_triton.py` runs this file in a process of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton.language as tl
from dense_oracle import statistics
from hypothesis import given, settings
from problems import MASKS, calls, integers, masks_of, spoil
from test_tiled import assert_same, expected
from triton.runtime import interpreter

from stability_probe.records import AttentionCall
from stability_probe.stats import triton_kernel, triton_scores
from stability_probe.stats.accumulate import accumulate
from stability_probe.stats.accumulators import SUMS, Accumulators, merge
from stability_probe.stats.finish import finish
from stability_probe.stats.measure import measure

# the interpreter warns of each inf - inf in NumPy, which the kernel makes and then drops
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


BLOCKS = triton_scores.Blocks(queries=32, keys=16, width=32, warps=4, stages=2)


@pytest.fixture(autouse=True, scope="module")
def interpreted() -> Iterator[None]:
    """Small blocks, of unequal sides so that no axis passes for the other."""
    assert triton_kernel.INTERPRETED
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_scores, "blocks_of", lambda call, *, full: BLOCKS)
        mend(patch)
        yield


def mend(patch: pytest.MonkeyPatch) -> None:
    """Make the interpreter do what a GPU does with bfloat16, and patch its language only once.

    It keeps bfloat16 as the integers of its bits, multiplies those, and cuts where it should round.
    """
    patched: set[str] = set()
    builder = interpreter.InterpreterBuilder
    patch_language, dot, cast = interpreter._patch_lang, builder.create_dot, builder.cast_impl

    def patch_once(fn):
        if fn.__module__ not in patched:
            patched.add(fn.__module__)
            patch_language(fn)
        return SimpleNamespace(restore=lambda: None)

    def whole(x):
        return x if x.dtype.scalar != tl.bfloat16 else cast(None, x, tl.float32)

    def create_dot(self, a, b, *rest):
        return dot(self, whole(a), whole(b), *rest)

    def cast_impl(self, x, to):
        if (x.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, x, to)
        rounded = torch.from_numpy(x.data.copy()).to(torch.bfloat16).view(torch.uint16).numpy()
        return interpreter.TensorHandle(rounded, tl.bfloat16)

    patch.setattr(interpreter, "_patch_lang", patch_once)
    patch.setattr(builder, "create_dot", create_dot)
    patch.setattr(builder, "cast_impl", cast_impl)


def kernel(call: AttentionCall, *, full: bool) -> Accumulators:
    return accumulate(call, full=full, backend="triton")


def values(acc: Accumulators, *, full: bool) -> dict[str, np.ndarray]:
    return {name: x.numpy() for name, x in finish(acc, full=full).items()}


def check(call: AttentionCall, *, levels: tuple[bool, ...] = (False, True)) -> None:
    """Against the definitions, and against what the PyTorch backend accumulates."""
    want = expected(call)
    for full in levels:
        got = kernel(call, full=full)
        assert_same(values(got, full=full), want, call)
        same_accumulators(got, accumulate(call, full=full, backend="torch"), full=full)


def same_accumulators(a: Accumulators, b: Accumulators, *, full: bool) -> None:
    for name in ("maxima", "minima", "sums"):
        got, want = getattr(a, name), getattr(b, name)
        assert got.dtype == want.dtype
        if name == "sums" and not full:  # there PyTorch may count a row of bad scores once or twice
            bad = SUMS.index("scores")
            assert torch.equal(got[bad] > 0, want[bad] > 0)
            got, want = (torch.cat((x[:bad], x[bad + 1 :])) for x in (got, want))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5, msg=lambda m, n=name: n + m)
    torch.testing.assert_close(a.peak[0].abs(), b.peak[0].abs(), rtol=1e-6, atol=0, equal_nan=True)


def problem(
    seed: int,
    *,
    B: int = 1,
    Q: int = 37,
    K: int = 37,
    D: int = 8,
    R: int = 2,
    masks: str = "none",
    dtype: torch.dtype = torch.float32,
    spoilt: bool = False,
    **options,
) -> AttentionCall:
    """A call whose products are exact, so that counts and ties can be compared exactly."""
    g = torch.Generator().manual_seed(seed)
    q, k = integers((B, R, Q, D), g) * 2.0 ** (seed % 7 - 2), integers((B, 1, K, D), g)
    v, output = torch.ones(B, 1, K, 2), torch.ones(B, R, Q, 2)
    if spoilt:
        q, k = spoil(q, g, share=0.02), spoil(k, g, share=0.01)
        v, output = spoil(v, g, share=0.1), spoil(output, g, share=0.1)
        output[:, :, -1, 0] = math.nan  # rows beyond the last one must not count it again
    return AttentionCall(
        layer="layer",
        q_BHQD=q.to(dtype),
        k_BGKD=k.to(dtype),
        v_BGKE=v,
        output_BHQE=output,
        masks=masks_of(masks, B, R, Q, K, g),
        dtype=dtype,
        scale=0.25,
        **options,
    )


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("causal", [False, True])
def test_every_mask(kind: str, causal: bool):
    seed = MASKS.index(kind)
    B = 1 + (kind in ("padding", "-1e4"))
    call = problem(seed, B=B, masks=kind, causal=causal, dtype=DTYPES[(seed + causal) % 3])
    check(call, levels=(False, True) if causal else (True,))


@pytest.mark.parametrize("kind", ["none", "padding", "-inf", "two"])
def test_what_is_not_finite_is_counted_and_left_out(kind: str):
    seed = MASKS.index(kind)
    causal, dtype = seed % 2 == 0, DTYPES[seed % 3]
    check(problem(seed, Q=36, masks=kind, causal=causal, spoilt=True, dtype=dtype))


@pytest.mark.parametrize(
    ("Q", "K", "D"),
    [(1, 1, 3), (1, 77, 8), (77, 1, 1), (77, 77, 3), (16, 40, 80), (40, 16, 80), (33, 17, 1)],
)
def test_sizes_that_fill_no_block(Q: int, K: int, D: int):
    check(problem(Q + D, Q=Q, K=K, D=D, causal=True, dtype=DTYPES[Q % 3]))


def test_one_half_and_one_whole_input():
    call = problem(3, dtype=torch.bfloat16)
    check(replace(call, k_BGKD=call.k_BGKD.float()))
    check(replace(call, q_BHQD=call.q_BHQD.half()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_that_are_not_integers(dtype: torch.dtype):
    g = torch.Generator().manual_seed(1)
    q, k = 2 * torch.randn(1, 2, 34, 33, generator=g), torch.randn(1, 1, 40, 33, generator=g)
    scale = torch.tensor([0.3, -0.2]).view(2, 1, 1)
    call = AttentionCall(
        layer="a", q_BHQD=q.to(dtype), k_BGKD=k.to(dtype), scale=scale, causal=True, dtype=dtype
    )
    check(call)
    got = values(kernel(call, full=True), full=True)
    for name in ("peak_logit", "peak_q_norm", "peak_k_norm", "peak_cosine", "scale"):
        np.testing.assert_allclose(got[name], expected(call)[name], rtol=2e-5, err_msg=name)


@pytest.mark.parametrize("cap", [0.5, 8.0, 1e4])
def test_soft_caps_from_flat_to_none(cap: float):
    g = torch.Generator().manual_seed(2)
    q, k = 3 * torch.randn(1, 2, 34, 8, generator=g), torch.randn(1, 2, 40, 8, generator=g)
    call = AttentionCall(layer="a", q_BHQD=q, k_BGKD=k, softcap=cap, dtype=q.dtype)
    got, want = values(kernel(call, full=True), full=True), expected(call)
    for name in ("entropy", "logit_gap", "logit_std", "lse_max", "max_logit", "qk_abs_max_logit"):
        np.testing.assert_allclose(got[name], want[name], rtol=2e-6, err_msg=name)


@pytest.mark.parametrize(("level", "limit"), [(1.0, 2e-6), (100.0, 1.5e-5), (1e4, 1e-3)])
def test_entropy_of_diffuse_rows_at_any_level(level: float, limit: float):
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 1, 40, 16, generator=g), torch.randn(1, 1, 200, 16, generator=g)
    q = torch.cat((q, torch.full((1, 1, 40, 1), 4.0)), -1)
    k = torch.cat((k, torch.full((1, 1, 200, 1), level)), -1)  # the same for every key of a row
    got = measure(q, k, scale=0.25, rows=True, backend="triton")
    want = statistics(q, k, scale=0.25)
    error = np.abs(got["row_entropy"].numpy() - want["row_entropy"])
    assert error.max() <= limit
    np.testing.assert_allclose(got["logit_std"].numpy(), want["logit_std"], rtol=20 * limit)


def test_slope_of_nearly_one_hot_rows():
    """One head a case: the largest score ahead by `gap`, `tied` times, in any block of keys."""
    g = torch.Generator().manual_seed(0)
    cases = [(gap, tied) for gap in (0, 1e-3, 0.5, 3, 10, 16, 20, 30, 36) for tied in (1, 2)]
    scores = torch.empty(1, len(cases), 40, 1)
    for h, (gap, tied) in enumerate(cases):
        scores[0, h, :, 0] = -gap - 2 * torch.rand(40, generator=g)
        scores[0, h, torch.randperm(40, generator=g)[:tied]] = 0.0
    q = torch.ones(1, len(cases), 1, 1)
    for level in (0.0, -2000.0):
        got = measure(q, scores + level, scale=1.0, backend="triton")
        want = statistics(q, scores + level, scale=1.0)
        for name in ("softmax_slope", "jacobian_trace"):
            np.testing.assert_allclose(got[name].numpy(), want[name], rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(got["entropy"].numpy(), want["entropy"], rtol=2e-5, atol=1e-12)
        assert np.array_equal(got["saturated_rows"].numpy(), want["saturated_rows"].astype("f4"))


@pytest.mark.parametrize("ascending", [False, True])
@pytest.mark.parametrize("step", [0.0, 1e-6, 0.3, 9.0, 40.0, 1e30])
def test_a_maximum_that_moves_from_block_to_block(step: float, ascending: bool):
    order = torch.arange(60.0) // 7 if ascending else -torch.arange(60.0) // 7
    q, k = torch.ones(1, 1, 1, 1), (step * order).view(1, 1, 60, 1)
    got = measure(q, k, scale=1.0, backend="triton")
    want = statistics(q, k, scale=1.0)
    for name in ("entropy", "softmax_slope", "top_weight", "lse_max", "tied_max_rows"):
        np.testing.assert_allclose(
            got[name].numpy(), want[name], rtol=1e-5, atol=1e-12, err_msg=name
        )
    for name in ("logit_gap", "max_logit", "min_logit"):
        np.testing.assert_allclose(got[name].numpy(), want[name], rtol=2e-6, err_msg=name)
    if step < 1e9:  # the square of a larger one is beyond float32
        np.testing.assert_allclose(got["logit_std"].numpy(), want["logit_std"], rtol=2e-6)


def test_collapsed_rows_are_finite_at_any_size():
    q = torch.randn(1, 1, 40, 4, generator=torch.Generator().manual_seed(4))
    for size in (1e2, 1e15):
        got = measure(q * size, q * size, backend="triton")
        want = statistics(q * size, q * size, scale=0.5)
        assert got["nonfinite_scores"].item() == 0
        assert 0 <= got["entropy"].item() < 1e-3
        np.testing.assert_allclose(got["max_logit"].numpy(), want["max_logit"], rtol=1e-6)
        assert math.isfinite(got["logit_gap"].item())


def test_heads_that_lie_apart_and_masks_that_are_not_expanded():
    call = problem(5, B=2, R=2, Q=20, K=37, masks="two")
    apart = replace(
        call,
        q_BHQD=call.q_BHQD.transpose(1, 2).contiguous().transpose(1, 2),
        k_BGKD=call.k_BGKD.mT.contiguous().mT,
        masks=(call.masks[0].expand(2, 2, 20, 37), call.masks[1].mT.contiguous().mT),
    )
    assert not apart.k_BGKD.is_contiguous()
    for full in (False, True):
        a, b = kernel(call, full=full), kernel(apart, full=full)
        assert torch.equal(a.sums, b.sums)
        assert torch.equal(a.maxima, b.maxima)


def test_many_masks_of_both_kinds_at_once():
    g = torch.Generator().manual_seed(6)
    masks = tuple(
        m for kind in ("bool", "padding", "bias", "-1e4") for m in masks_of(kind, 1, 2, 37, 37, g)
    )
    call = problem(6, causal=True)
    check(replace(call, masks=(*masks, torch.tensor(0.5, dtype=torch.bfloat16))))


@pytest.mark.parametrize(("below", "leaks"), [(10.9, 1.0), (11.3, 0.0)])
@pytest.mark.parametrize("place", [0, 20, 46])
def test_a_masked_key_leaks_by_its_share_of_the_whole_row(below: float, leaks: float, place: int):
    k = torch.arange(48.0) // 16 * 20  # each block of keys outweighs those before it
    bias = torch.zeros(48)
    bias[place] = -1e4
    k[place] = 1e4 + 40 - below
    call = AttentionCall(
        layer="a",
        q_BHQD=torch.ones(1, 1, 1, 1),
        k_BGKD=k.view(1, 1, 48, 1),
        masks=(bias,),
        dtype=torch.float32,
    )
    check(call, levels=(True,))
    assert values(kernel(call, full=True), full=True)["mask_leak"].item() == leaks


def test_sinks_and_rows():
    q = torch.randn(2, 3, 37, 8, generator=torch.Generator().manual_seed(7))
    sinks = torch.tensor([-2.0, 1.0, math.inf])
    mask = torch.ones(2, 1, 37, 1, dtype=torch.bool)
    mask[1, :, 5] = False
    options = {"sinks": sinks, "mask": mask, "causal": True, "rows": True}
    got = measure(q, q, backend="triton", **options)
    want = measure(q, q, backend="torch", **options)
    assert list(got) == list(want)
    for name, x in got.items():
        torch.testing.assert_close(x, want[name], rtol=1e-5, atol=2e-6, equal_nan=True, msg=name)


def test_it_merges_with_the_other_backend():
    call = problem(8, B=2, Q=20, masks="bias", causal=True)
    halves = [
        replace(call, **{n: getattr(call, n)[i : i + 1] for n in ("q_BHQD", "k_BGKD")})
        for i in range(2)
    ]
    halves = [replace(half, v_BGKE=None, output_BHQE=None) for half in halves]
    mixed = merge(kernel(halves[0], full=True), accumulate(halves[1], full=True, backend="torch"))
    whole = kernel(replace(call, v_BGKE=None, output_BHQE=None), full=True)
    same_accumulators(mixed, whole, full=True)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 2, 0, 4)])
def test_no_rows_at_all(shape: tuple[int, ...]):
    call = AttentionCall(layer="a", q_BHQD=torch.ones(shape), k_BGKD=torch.ones(shape))
    assert np.isnan(values(kernel(call, full=True), full=True)["entropy"]).all()


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(call=calls(spoilt=False) | calls(spoilt=True).map(lambda c: replace(c, softcap=None)))
def test_every_statistic_equals_its_definition(call: AttentionCall):
    check(call)
