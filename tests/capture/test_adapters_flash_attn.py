"""flash-attn, through stand-ins with the real signatures: every function, window, cap and slope."""

from __future__ import annotations

import sys
import types

import pytest
import stand_ins
import torch
from seeing import Attentive, assert_reads_like, dense, seen_by
from stand_ins import package
from torch import Tensor

X = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(3))
CU = torch.tensor([0, 3, 3, 11, 20], dtype=torch.int32)  # an empty sequence among them


@pytest.fixture
def fa(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    names = ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn_interface",
             "flash_attn.cute", "flash_attn.cute.interface")  # fmt: skip
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)
    interface = package("flash_attn.flash_attn_interface", *stand_ins.TWO)
    package("flash_attn_interface", flash_attn_func=stand_ins.flash_attn_3_func)
    package("flash_attn.cute.interface", flash_attn_func=stand_ins.flash_attn_4_func)
    top = package("flash_attn")
    vars(top).update({n: f for n, f in vars(interface).items() if n.startswith("flash")})
    return top


def want(q: Tensor, k: Tensor, **how: object) -> Tensor:
    how = {"scale": None} | how
    return stand_ins.scores_of(q, k, **how).float()


CASES = {
    "plain": {},
    "scale": {"softmax_scale": 0.7},
    "causal": {"causal": True},
    "window": {"window_size": (3, 2)},
    "left window": {"window_size": (4, -1)},
    "causal window": {"causal": True, "window_size": (3, 7)},
    "soft-cap": {"causal": True, "softcap": 1.5},
    "slopes": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.06])},
    "slopes of a batch": {"alibi_slopes": torch.rand(2, 4), "causal": True, "softcap": 1.5},
    "lse": {"return_attn_probs": True, "causal": True},
}


def expected(arguments: dict) -> dict:
    window = arguments.get("window_size", (-1, -1))
    return {
        "scale": arguments.get("softmax_scale"),
        "window": (window[0], 0) if arguments.get("causal") else window,
        "softcap": arguments.get("softcap", 0.0),
        "slopes": arguments.get("alibi_slopes"),
    }


@pytest.mark.parametrize("name", CASES)
def test_whole_sequences(fa: types.ModuleType, name: str) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = fa.flash_attn_func(q, k, v, **CASES[name])
        return out[0] if isinstance(out, tuple) else out

    model = Attentive(attend)
    calls, report, _ = seen_by(model, X)
    assert (report.layer, report.seam, len(calls)) == ("attention", "flash_attn", 1)
    assert report.verified == ("lse" if name == "lse" else "output")
    q, k, _ = model.attention.heads(X)
    assert_reads_like(
        calls[0],
        want(q, k, **expected(CASES[name])),
        dense(q, k, CASES[name].get("softmax_scale")),
    )


def longer(t: Tensor, length: int) -> Tensor:
    """More or fewer positions than there are."""
    return t[:, torch.arange(length) % t.shape[1]] * torch.arange(length).view(1, -1, 1, 1)


@pytest.mark.parametrize("keys", [4, 17])
def test_the_last_query_stands_at_the_last_key(fa: types.ModuleType, keys: int) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (longer(t, keys) for t in (k, v))
        return fa.flash_attn_func(q, k, v, causal=True, window_size=(5, 0))

    model = Attentive(attend)
    calls, report, _ = seen_by(model, X)
    assert report.verified == "output"
    q, k, _ = model.attention.heads(X)
    assert_reads_like(calls[0], want(q, longer(k, keys), window=(5, 0)))


@pytest.mark.parametrize("form", ["qkv", "kv"])
def test_packed_projections(fa: types.ModuleType, form: str) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if form == "qkv":
            return fa.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), causal=True)
        return fa.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), causal=True)

    model = Attentive(attend, groups=4)
    calls, report, _ = seen_by(model, X)
    assert (len(calls), report.verified) == (1, "output")
    q, k, _ = model.attention.heads(X)
    assert_reads_like(calls[0], want(q, k, window=(-1, 0)))


def apart(scores_of_pair: object, q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
    """Dense scores [1, H, T, T] of packed sequences, each with its own."""
    whole = torch.full((1, q.shape[1], len(q), len(k)), -torch.inf)
    for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        whole[:, :, a:b, c:d] = scores_of_pair(q[None, a:b], k[None, c:d])
    return whole


@pytest.mark.parametrize("form", ["q k v", "qkv", "kv"])
@pytest.mark.parametrize("name", ["plain", "causal", "causal window", "soft-cap", "slopes", "lse"])
def test_packed_sequences(fa: types.ModuleType, form: str, name: str) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        how = CASES[name]
        if form == "qkv":
            out = fa.flash_attn_varlen_qkvpacked_func(torch.stack((q, k, v), 1), CU, 9, **how)
        elif form == "kv":
            kv = torch.stack((k, v), 1)
            out = fa.flash_attn_varlen_kvpacked_func(q, kv, CU, CU, 9, 9, **how)
        else:
            out = fa.flash_attn_varlen_func(q, k, v, CU, CU, 9, 9, **how)
        return (out[0] if isinstance(out, tuple) else out).unflatten(0, (2, 10))

    model = Attentive(attend, groups=4)
    calls, report, _ = seen_by(model, X)
    assert (len(calls), calls[0].sequences) == (1, 4)
    assert report.verified == ("lse" if name == "lse" else "output")
    q, k = (t.flatten(0, 1) for t in model.attention.heads(X)[:2])
    how = expected(CASES[name])
    assert_reads_like(calls[0], apart(lambda a, b: want(a, b, **how), q, k, CU, CU))


def test_packed_cross_attention_aligns_each_sequence_at_its_end(fa: types.ModuleType) -> None:
    cu_k = torch.tensor([0, 6, 8, 12, 20], dtype=torch.int32)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        out = fa.flash_attn_varlen_func(q, k, v, CU, cu_k, 9, 8, causal=True, window_size=(4, 0))
        return out.unflatten(0, (2, 10))

    model = Attentive(attend)
    calls, report, _ = seen_by(model, X)
    assert report.verified == "output"
    q, k = (t.flatten(0, 1) for t in model.attention.heads(X)[:2])
    assert_reads_like(calls[0], apart(lambda a, b: want(a, b, window=(4, 0)), q, k, CU, cu_k))


def test_version_3(fa: types.ModuleType) -> None:
    three = sys.modules["flash_attn_interface"]
    model = Attentive(
        lambda q, k, v: three.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[0]
    )
    calls, report, _ = seen_by(model, X)
    assert (len(calls), report.verified) == (1, "lse")
    q, k, _ = model.attention.heads(X)
    assert_reads_like(calls[0], want(q, k, window=(-1, 0)))


def test_version_4_with_a_sink(fa: types.ModuleType) -> None:
    four, sink = sys.modules["flash_attn.cute.interface"], torch.tensor([0.0, 1.0, 2.0, -1.0])
    model = Attentive(
        lambda q, k, v: four.flash_attn_func(
            q, k, v, causal=True, window_size=(4, None), learnable_sink=sink
        )
    )
    calls, report, _ = seen_by(model, X)
    assert (len(calls), report.verified) == (1, "output")
    q, k, _ = model.attention.heads(X)
    assert_reads_like(calls[0], want(q, k, window=(4, 0)))
    assert torch.equal(calls[0].sink_BHQ1, sink.view(1, 4, 1, 1))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"qv": torch.zeros(1)}, "second queries"),
        ({"attention_chunk": 4}, "chunked attention"),
        ({"q_descale": torch.ones(1)}, "float8"),
    ],
)
def test_what_is_not_read_says_so(fa: types.ModuleType, arguments: dict, reason: str) -> None:
    three = sys.modules["flash_attn_interface"]
    model = Attentive(lambda q, k, v: three.flash_attn_func(q, k, v, **arguments))
    calls, report, attachment = seen_by(model, X)
    assert not calls
    assert reason in report.reason
    assert not attachment.faults


def test_a_read_that_forgets_the_window_fails_the_check(fa: types.ModuleType) -> None:
    """The comparison with the output is no formality."""
    from stability_probe.capture.adapters import flash_attn

    with pytest.MonkeyPatch.context() as patch:
        real = flash_attn.settings_of
        patch.setattr(flash_attn, "settings_of", lambda a: real(a | {"window_size": (-1, -1)}))
        model = Attentive(lambda q, k, v: fa.flash_attn_func(q, k, v, window_size=(2, 0)))
        _, report, _ = seen_by(model, X)
    assert report.verified == "no"
    assert "rebuilt output differs" in report.reason
