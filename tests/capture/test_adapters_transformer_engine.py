"""TransformerEngine's DotProductAttention, through a stand-in with the real signature."""

from __future__ import annotations

import functools
import sys
import types

import pytest
import stand_ins
import torch
from seeing import Attentive, assert_reads_like, seen_by
from torch import Tensor, nn

HOME = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
X = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(3))
CU = torch.tensor([0, 4, 13, 20], dtype=torch.int32)


def make_class() -> type[nn.Module]:
    class DotProductAttention(nn.Module):
        """The settings and the forward of the real one; the scores are given by the test."""

        def __init__(
            self, *, attn_mask_type="causal", qkv_format="sbhd", window_size=None,
            bottom_right_diagonal=None, attention_dropout=0.0, softmax_offset=None,
            return_max_logit=False, softmax_scale=0.3, scores=None,
        ):  # fmt: skip
            super().__init__()
            self.attn_mask_type, self.qkv_format = attn_mask_type, qkv_format
            self.window_size, self.bottom_right_diagonal = window_size, bottom_right_diagonal
            self.attention_dropout, self.softmax_offset = attention_dropout, softmax_offset
            self.return_max_logit, self.scores = return_max_logit, scores
            self.flash_attention = types.SimpleNamespace(softmax_scale=softmax_scale)

        def forward(
            self, query_layer=None, key_layer=None, value_layer=None, attention_mask=None,
            qkv_format=None, cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None,
            cu_seqlens_kv_padded=None, max_seqlen_q=None, max_seqlen_kv=None,
            attn_mask_type=None, window_size=None, bottom_right_diagonal=None,
            checkpoint_core_attention=False, core_attention_bias_type="no_bias",
            core_attention_bias=None, alibi_slopes=None, fast_zero_fill=True,
            inference_params=None, pad_between_seqs=None, fp8_output=False, bf16_backward=False,
            num_splits=1, score_mod=None, score_mod_bprop=None, score_mod_tensors=None,
            score_mod_bprop_tensors=None, qkv_layer=None, kv_layer=None, qkv_interleave_dim=-3,
        ):  # fmt: skip
            q, k, v = query_layer, key_layer, value_layer
            layout = qkv_format or self.qkv_format
            if layout == "sbhd":
                q, k, v = (t.transpose(0, 1) for t in (q, k, v))
            if layout == "thd":
                q, k, v = (t[None] for t in (q, k, v))
            scores = self.scores(q, k)
            out = stand_ins.weigh(scores, v, self.softmax_offset).flatten(-2)
            if layout == "sbhd":
                out = out.transpose(0, 1)
            out = out[0] if layout == "thd" else out
            return (out, scores.amax((0, 2, 3)).float()) if self.return_max_logit else out

    return DotProductAttention


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> type[nn.Module]:
    module = types.ModuleType(HOME)
    module.DotProductAttention = make_class()
    monkeypatch.setitem(sys.modules, HOME, module)
    return module.DotProductAttention


class Around(Attentive):
    """A model with the module inside its attention layer."""

    def __init__(self, core: nn.Module, layout: str = "sbhd", **given: object) -> None:
        super().__init__(self.attend)
        self.core, self.layout, self.given = core, layout, given

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.layout == "sbhd":
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        if self.layout == "thd":
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        out = self.core(q, k, v, qkv_format=self.layout, **self.given)
        out = (out[0] if isinstance(out, tuple) else out).unflatten(-1, (4, 8))
        if self.layout == "thd":
            return out.unflatten(0, (2, 10))
        return out.transpose(0, 1) if self.layout == "sbhd" else out


def scores_with(**how: object):
    def scores(q: Tensor, k: Tensor) -> Tensor:
        return stand_ins.scores_of(q, k, **{"scale": 0.3, "bottom_right": False} | how)

    return scores


PADDED = torch.zeros(2, 1, 1, 10, dtype=torch.bool)
PADDED[0, ..., 6:] = True
BIAS = torch.randn(1, 4, 10, 10, generator=torch.Generator().manual_seed(6))


def padded(scores: Tensor) -> Tensor:
    return scores.masked_fill(PADDED | PADDED.mT, -torch.inf)


CASES = {
    "causal": ({}, {}, scores_with(window=(-1, 0))),
    "no mask": ({"attn_mask_type": "no_mask"}, {}, scores_with()),
    "a mask type of the call": ({}, {"attn_mask_type": "no_mask"}, scores_with()),
    "window": ({"window_size": (3, 0)}, {}, scores_with(window=(3, 0))),
    "window to both sides": (
        {"attn_mask_type": "no_mask", "window_size": (2, 1)}, {}, scores_with(window=(2, 1))
    ),
    "padding": (
        {"attn_mask_type": "padding"}, {"attention_mask": PADDED},
        lambda q, k: padded(scores_with()(q, k)),
    ),
    "padding by lengths": (
        {"attn_mask_type": "padding_causal"},
        {f"cu_seqlens_{s}": torch.tensor([0, 6, 16]) for s in ("q", "kv")},
        lambda q, k: padded(scores_with(window=(-1, 0))(q, k)),
    ),
    "arbitrary": (
        {"attn_mask_type": "arbitrary"}, {"attention_mask": BIAS > 0.5},
        lambda q, k: scores_with()(q, k).masked_fill(BIAS > 0.5, -torch.inf),
    ),
    "bias": (
        {}, {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": BIAS},
        lambda q, k: scores_with(window=(-1, 0))(q, k) + BIAS,
    ),
    "bias before the scale": (
        {}, {"core_attention_bias_type": "pre_scale_bias", "core_attention_bias": BIAS},
        lambda q, k: scores_with(window=(-1, 0))(q, k) + BIAS * 0.3,
    ),
    "slopes": (
        {"attn_mask_type": "no_mask"},
        {"core_attention_bias_type": "alibi", "alibi_slopes": torch.tensor([0.5, 0.2, 0.1, 0.05])},
        scores_with(slopes=torch.tensor([0.5, 0.2, 0.1, 0.05])),
    ),
    "sink": (
        {"softmax_offset": torch.tensor([0.0, 1.0, -1.0, 2.0])}, {}, scores_with(window=(-1, 0))
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("name", CASES)
def test_batches(kind: type[nn.Module], name: str, layout: str) -> None:
    settings, given, scores = CASES[name]
    model = Around(kind(scores=scores, **settings), layout, **given)
    calls, report, _ = seen_by(model, X)
    assert (report.layer, report.seam, len(calls)) == ("core", "transformer_engine", 1)
    assert report.verified == "output"
    q, k, _ = model.attention.heads(X)
    assert_reads_like(calls[0], scores(q, k).float())


@pytest.mark.parametrize("corner", [False, True])
def test_packed_tokens(kind: type[nn.Module], corner: bool) -> None:
    def scores(q: Tensor, k: Tensor) -> Tensor:
        whole = torch.full((1, 4, 20, 20), -torch.inf, dtype=torch.float64)
        for a, b in ((0, 4), (4, 13), (13, 20)):
            whole[:, :, a:b, a:b] = scores_with(window=(-1, 0))(q[:, a:b], k[:, a:b])
        return whole

    name = "padding_causal_bottom_right" if corner else "padding_causal"
    core = kind(scores=scores, attn_mask_type=name)
    model = Around(core, "thd", cu_seqlens_q=CU, cu_seqlens_kv=CU)
    calls, report, _ = seen_by(model, X)
    assert (report.verified, calls[0].sequences) == ("output", 3)
    q, k = (t.flatten(0, 1)[None] for t in model.attention.heads(X)[:2])
    assert_reads_like(calls[0], scores(q, k).float())


@pytest.mark.parametrize("wrong", [0.0, -0.5])
def test_the_largest_logit_that_it_returns_is_compared(
    kind: type[nn.Module], wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = scores_with(window=(-1, 0))
    if wrong:
        real = kind.forward

        @functools.wraps(real)
        def lowered(*args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
            output, largest = real(*args, **kwargs)
            return output, largest + wrong

        monkeypatch.setattr(kind, "forward", lowered)
    model = Around(kind(scores=scores, return_max_logit=True))
    calls, report, _ = seen_by(model, X)
    assert len(calls) == 1
    assert report.verified == ("max" if not wrong else "no")


def test_the_class_has_its_own_forward_again(kind: type[nn.Module]) -> None:
    real = kind.forward
    seen_by(Around(kind(scores=scores_with(window=(-1, 0)))), X)
    assert kind.forward is real
