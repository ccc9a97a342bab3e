"""Hugging Face's registry: flex on a CPU for real, flash through the stand-in for flash-attn."""

from __future__ import annotations

import sys
import types

import pytest
import stand_ins
import torch
from seeing import Attentive, Taker, assert_reads_like, dense, seen_by
from stand_ins import package
from torch import Tensor, nn

from stability_probe.capture import attach

transformers = pytest.importorskip("transformers")
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.* is deprecated"),
]

X = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(3))
HIDDEN = torch.ones(10, 10, dtype=torch.bool).triu(1)


@pytest.fixture
def eager_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library compiles FlexAttention and its masks; without that the same runs at once."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    home = sys.modules["transformers.integrations.flex_attention"]

    def eager(q: Tensor, k: Tensor, v: Tensor, training: bool = False, **how: object) -> Tensor:
        return flex_attention(q, k, v, **how)

    def masks(*args: object, **how: object) -> object:
        return create_block_mask(*args, **(how | {"_compile": False}))

    monkeypatch.setattr(home, "compile_friendly_flex_attention", eager)
    monkeypatch.setattr("transformers.masking_utils.create_block_mask", masks)


def attend_with(name: str, **how: object) -> object:
    """Attention as a model of the library calls it: looked up at each forward."""
    module = nn.Module()
    module.is_causal = True
    module.config = types.SimpleNamespace(_attn_implementation=name)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if name == "flex_attention":  # its backward does not run on a CPU
            q, k, v = (t.detach() for t in (q, k, v))
        given = {"attention_mask": None, "scaling": 0.3} | how
        return ALL_ATTENTION_FUNCTIONS[name](module, q, k, v, **given)[0]

    return attend


@pytest.mark.usefixtures("eager_flex")
def test_flex_with_a_cap_a_mask_and_a_bias() -> None:
    mask = torch.zeros(2, 1, 10, 10).masked_fill(HIDDEN, torch.finfo(torch.float32).min)
    bias = torch.randn(2, 4, 10, 10, generator=torch.Generator().manual_seed(5))
    attend = attend_with("flex_attention", attention_mask=mask, softcap=1.5, position_bias=bias)
    model = Attentive(attend)
    before = dict(AttentionInterface._global_mapping)
    bare = model(X)
    calls, report, _ = seen_by(model, X)
    assert (len(calls), report.seam, report.verified) == (1, "huggingface", "output")
    q, k, _ = model.attention.heads(X)
    products = dense(q, k, 0.3)
    scores = (1.5 * torch.tanh(products / 1.5) + bias).masked_fill(HIDDEN, -torch.inf)
    assert_reads_like(calls[0], scores, products)
    assert before == AttentionInterface._global_mapping
    assert torch.equal(model(X), bare)


@pytest.mark.usefixtures("eager_flex")
def test_flex_in_a_whole_model() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        attn_implementation="flex_attention",
    )  # fmt: skip
    model = LlamaForCausalLM(config).train().requires_grad_(False)
    tokens = torch.randint(0, 50, (2, 12))
    bare = model(tokens).logits
    taker = Taker()
    attachment = attach(model, taker, strict=True)
    try:
        seen = model(tokens).logits
        assert [c.layer for c in taker.calls] == [f"model.layers.{i}.self_attn" for i in (0, 1)]
        assert all(c.q_BHQD.shape[1] == 4 and c.k_BGKD.shape[1] == 2 for c in taker.calls)
        assert all(c.mask_mod is not None for c in taker.calls)
        assert [r.verified for r in attachment.report()] == ["output", "output"]
    finally:
        attachment.close()
    assert torch.equal(bare, seen)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's flash function, with the stand-ins in the place of the kernels."""
    from transformers import modeling_flash_attention_utils as utils

    for name in ("flash_attn", "flash_attn.flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    two = package("flash_attn.flash_attn_interface", *stand_ins.TWO)
    kernels = (two.flash_attn_func, two.flash_attn_varlen_func, None, utils._pad_input,
               utils._unpad_input)  # fmt: skip
    how = utils._lazy_define_process_function(two.flash_attn_varlen_func)
    monkeypatch.setattr(
        utils, "lazy_import_flash_attention", lambda *_, **__: (kernels, (how, how))
    )
    monkeypatch.setattr(
        sys.modules["transformers.integrations.flash_attention"],
        "get_target_dtype", lambda *_: None,
    )  # fmt: skip


def flash_scores(model: Attentive, **how: object) -> Tensor:
    q, k, _ = model.attention.heads(X)
    return stand_ins.scores_of(q, k, **{"scale": 0.3, "window": (-1, 0)} | how).float()


CASES = {
    "causal": ({}, {}),
    "not causal": ({"is_causal": False}, {"window": (-1, -1)}),
    "window": ({"sliding_window": 4}, {"window": (3, 0)}),
    "a window longer than the keys": ({"sliding_window": 40}, {}),
    "soft-cap": ({"softcap": 1.5}, {"softcap": 1.5}),
}


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("name", CASES)
def test_flash(name: str) -> None:
    given, how = CASES[name]
    model = Attentive(attend_with("flash_attention_2", **given))
    calls, report, _ = seen_by(model, X)
    assert (len(calls), report.seam, report.verified) == (1, "huggingface", "output")
    assert_reads_like(calls[0], flash_scores(model, **how))


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("side", ["left", "right"])
def test_flash_with_padding(side: str) -> None:
    real = torch.ones(2, 10, dtype=torch.long)
    real[0, slice(0, 3) if side == "left" else slice(7, 10)] = 0
    model = Attentive(attend_with("flash_attention_2", attention_mask=real, sliding_window=5))
    calls, report, _ = seen_by(model, X)
    assert (len(calls), report.verified) == (1, "output")
    scores = flash_scores(model, window=(4, 0))
    both = real[:, None, :, None].bool() & real[:, None, None].bool()
    assert_reads_like(calls[0], scores.masked_fill(~both, -torch.inf))


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("form", ["cu_seq_lens", "position_ids"])
def test_flash_with_packed_sequences(form: str) -> None:
    cu = torch.tensor([0, 4, 13, 20], dtype=torch.int32)
    lengths = cu.diff().tolist()
    given = (
        {f"cu_seq_lens_{s}": cu for s in "qk"} | {f"max_length_{s}": 9 for s in "qk"}
        if form == "cu_seq_lens"
        else {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}
    )
    inner = attend_with("flash_attention_2", **given)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return inner(*(t.flatten(0, 1)[None] for t in (q, k, v)))[0].unflatten(0, (2, 10))

    model = Attentive(attend)
    calls, report, _ = seen_by(model, X)
    assert (len(calls), report.verified) == (1, "output")
    assert calls[0].sequences == (3 if form == "cu_seq_lens" else None)
    q, k = (t.flatten(0, 1)[None] for t in model.attention.heads(X)[:2])
    scores = stand_ins.scores_of(q, k, scale=0.3, window=(-1, 0)).float()
    document = torch.repeat_interleave(torch.arange(3), cu.diff())
    apart = document[:, None] != document
    assert_reads_like(calls[0], scores.masked_fill(apart, -torch.inf))
