"""The accuracy that is promised, statistic by statistic, for every way of measuring."""

from __future__ import annotations

import math

import pytest
import torch

from stability_probe.stats.measure import measure

BACKENDS: dict[str, dict[str, str]] = {"torch": {}}  # settings of `measure` by name

pytestmark = pytest.mark.parametrize("backend", BACKENDS)
ULP = 2.0**-23


def got(backend: str, q: torch.Tensor, k: torch.Tensor, **settings) -> dict[str, torch.Tensor]:
    values = measure(q, k, **settings, **BACKENDS[backend])
    return {name: x.double() for name, x in values.items()}


def vectors(size: float, *, T: int = 96, D: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k [2, 3, T, D] whose largest logit at scale 1 is about `size`."""
    g = torch.Generator().manual_seed(7)
    q, k = torch.randn(2, 3, T, D, generator=g), torch.randn(2, 3, T, D, generator=g)
    largest = (q @ k.mT).abs().max().item()
    return q * math.sqrt(size / largest), k * math.sqrt(size / largest)


def exact(S: torch.Tensor, *, causal: bool) -> dict[str, torch.Tensor]:
    """Slope, trace and entropy in float64, [H]; no difference of numbers close to 1."""
    S = S.double()
    seen = torch.ones(S.shape[-2:], dtype=torch.bool)
    seen = seen.tril() if causal else seen
    e = torch.exp(
        S.masked_fill(~seen, -torch.inf) - S.masked_fill(~seen, -torch.inf).amax(-1, True)
    )
    others = torch.stack([e[..., j + 1 :].sum(-1) + e[..., :j].sum(-1) for j in range(e.shape[-1])])
    trace = (e * others.movedim(0, -1)).sum(-1) / e.sum(-1).square()
    p = e / e.sum(-1, keepdim=True)
    n = seen.sum(-1)
    use = n >= 2
    return {
        "softmax_slope": trace[..., use].sum((0, 2)) / (len(S) * n[use].sum()),
        "jacobian_trace": trace[..., use].mean((0, 2)),
        "entropy": torch.special.entr(p).sum(-1)[..., use].mean((0, 2)),
    }


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [0.5, 1.0, 20.0, 100.0, 500.0])
def test_slope_of_queries_and_keys(backend: str, size: float, causal: bool) -> None:
    q, k = vectors(size)
    want = exact(q.double() @ k.double().mT, causal=causal)["softmax_slope"]
    error = (got(backend, q, k, scale=1.0, causal=causal)["softmax_slope"] - want).abs()
    assert (error <= 1e-5 * want + 1e-7 / q.shape[2]).all(), error / want


def scores_of(level: str) -> torch.Tensor:
    """Float32 scores [1, 4, 48, 64] at one level: as large as that, or diffuse around it."""
    g = torch.Generator().manual_seed(3)
    S = torch.randn(1, 4, 48, 64, generator=g)
    if level == "one-hot":  # from nearly to wholly
        gaps = torch.linspace(2, 40, 48)[:, None]
        winner = torch.nn.functional.one_hot(torch.arange(48), 64)
        return S + winner * gaps * 1.5
    if level.startswith("around"):
        return S + float(level.removeprefix("around"))
    return S * float(level) / S.abs().max()


@pytest.mark.parametrize("level", ["1", "100", "1e4", "around 1e4", "around -1e4", "one-hot"])
@pytest.mark.parametrize("causal", [False, True])
def test_slope_of_given_scores_at_any_level(backend: str, level: str, causal: bool) -> None:
    S = scores_of(level)
    keys = torch.eye(64).expand(1, 4, 64, 64)  # S times one: the very same float32 scores
    values = got(backend, S, keys, scale=1.0, causal=causal)
    visible = S[..., torch.ones(48, 64, dtype=torch.bool).tril()] if causal else S
    assert values["max_logit"].max() == visible.max()
    want = exact(S, causal=causal)
    for name in ("softmax_slope", "jacobian_trace"):
        # below e^-43 a weight counts as that: 2e-19 a key
        torch.testing.assert_close(values[name], want[name], rtol=1e-5, atol=1e-16, msg=name)


@pytest.mark.parametrize("D", [1, 16, 64, 128])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4, 1e12])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_largest_logit_within_four_ulp_of_its_terms(
    backend: str, D: int, size: float, offset: float
) -> None:
    q, k = vectors(size, D=D)
    q = q + offset * q.abs().max()  # terms much larger than their sum
    scale = D**-0.5
    S = q.double() @ k.double().mT * scale
    terms = (q.double().abs() @ k.double().abs().mT * scale).amax((0, 2, 3))
    values = got(backend, q, k)
    for name, want in (
        ("max_logit", S.amax((0, 2, 3))),
        ("min_logit", S.amin((0, 2, 3))),
        ("abs_max_logit", S.abs().amax((0, 2, 3))),
        ("qk_abs_max_logit", S.abs().amax((0, 2, 3))),
    ):
        assert ((values[name] - want).abs() <= 4 * ULP * terms).all(), name


@pytest.mark.parametrize("size", [0.0, 1.0, 30.0, 1e3, 1e4, 1e8])
def test_entropy_is_never_negative(backend: str, size: float) -> None:
    q, k = vectors(size)
    for causal in (False, True):
        rows = measure(q, k, scale=1.0, causal=causal, rows=True, **BACKENDS[backend])
        entropy = rows["row_entropy"]
        assert (entropy[~torch.isnan(entropy)] >= 0).all()
        for name in ("entropy", "entropy_ratio", "softmax_slope", "jacobian_trace"):
            assert (rows[name] >= 0).all()
        assert (rows["entropy_ratio"] <= 1).all()


@pytest.mark.parametrize(("size", "limit"), [(1.0, 2e-6), (100.0, 1.5e-5), (1e4, 1e-3)])
def test_entropy_at_any_level(backend: str, size: float, limit: float) -> None:
    q, k = vectors(1.0)
    one = torch.ones(2, 3, 96, 1)
    q, k = torch.cat((q, one), -1), torch.cat((k, size * one), -1)  # every logit near `size`
    want = exact(q.double() @ k.double().mT, causal=False)["entropy"]
    values = got(backend, q, k, scale=1.0)
    assert values["abs_max_logit"].max() >= 0.9 * size
    assert ((values["entropy"] - want).abs() <= limit).all()
