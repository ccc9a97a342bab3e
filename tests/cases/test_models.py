"""Small models of the Transformers library, whose masks, scales, caps and caches are real."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from attending import PER_ROW, assert_agree, dense
from torch import Tensor, nn

import stability_probe as sp
from stability_probe.records import Severity

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.slow,  # the import alone takes long
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]

SMALL = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


KINDS = ("ForConditionalGeneration", "ForCausalLM", "LMHeadModel", "ForMaskedLM", "Model")


def build(name: str, implementation: str, **changes: Any) -> nn.Module:
    """A model with random weights in train mode; nothing is downloaded."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **changes})
    config._attn_implementation = implementation
    kinds = (getattr(transformers, name + kind, None) for kind in KINDS)
    return next(kind for kind in kinds if kind is not None)(config).train()


class Spy:
    """Keeps what softmax and SDPA were given, in order: an oracle beside the probe."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[dict[str, Any]] = []
        sdpa = torch.nn.functional.scaled_dot_product_attention
        softmax = torch.nn.functional.softmax

        def spied_sdpa(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, dropout_p: float = 0,
                       is_causal: bool = False, **more: Any) -> Tensor:  # fmt: skip
            self.calls.append({"q": q.detach().clone(), "k": k.detach().clone(), "mask": attn_mask,
                               "causal": is_causal, "scale": more.get("scale")})  # fmt: skip
            return sdpa(q, k, v, attn_mask, dropout_p, is_causal, **more)

        def spied_softmax(x: Tensor, dim: int = -1, **more: Any) -> Tensor:
            if x.dim() == 4:
                self.calls.append({"scores": x.detach().clone()})
            return softmax(x, dim, **more)

        self.patch = monkeypatch
        self.replaced = {"scaled_dot_product_attention": spied_sdpa, "softmax": spied_softmax}

    def watch(self, model: nn.Module, **inputs: Tensor) -> None:
        """One unwatched forward, noted."""
        with self.patch.context() as patch:
            for name, function in self.replaced.items():
                patch.setattr(torch.nn.functional, name, function)
            model(**inputs)

    def expected(self, i: int) -> dict[str, Tensor]:
        call = self.calls[i]
        if "scores" in call:
            scores = call["scores"]
            return dense(scores, scores > -9e3)
        q, k = call["q"], call["k"].repeat_interleave(call["q"].shape[1] // call["k"].shape[1], 1)
        scale = 1 / math.sqrt(q.shape[-1]) if call["scale"] is None else call["scale"]
        raw = q.double() @ k.double().mT * scale
        mask, visible = call["mask"], torch.ones(raw.shape[-2:], dtype=torch.bool)
        if call["causal"]:
            visible = visible.tril()
        if mask is None:
            return dense(raw, visible)
        if mask.dtype == torch.bool:
            return dense(raw, mask.expand(raw.shape) & visible)
        return dense(raw + mask, (mask > -9e3).expand(raw.shape), raw_BHQK=raw)


def tokens(pads: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 99, (2, 12), generator=g)
    mask = torch.ones_like(ids)
    mask[1, :pads] = 0
    return {"input_ids": ids, "attention_mask": mask}


def watched(model: nn.Module, **inputs: Tensor) -> tuple[dict[str, dict[str, Tensor]], sp.Probe]:
    with sp.watch(model, plan=sp.every(1, full_every=1), strict=True) as probe:
        model(**inputs)
        probe.step()
        (record,) = probe._kept
    layers = {
        o.layer: {n: torch.from_numpy(v) for n, v in o.values.items()} for o in record.observations
    }
    return layers, probe


DECODERS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Mistral": {"sliding_window": 4},
    "Gemma2": {"head_dim": 8, "query_pre_attn_scalar": 224, "attn_logit_softcapping": 5.0},
    "Granite": {"attention_multiplier": 0.0156},
    "GPT2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "scale_attn_by_inverse_layer_idx": True},
    "Phi": {},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "GPTNeoX": {},
    "Bloom": {"n_head": 4, "n_layer": 2},
    "Mixtral": {"num_local_experts": 4},
    "Bert": {},
}


@pytest.mark.parametrize("pads", [0, 4])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "name",
    [
        *DECODERS,
    ],
)  # fmt: skip
def test_the_numbers_are_those_of_the_scores_that_the_model_formed(
    name: str, implementation: str, pads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left padding, windows, grouped heads, scales of every kind, with weights that make logits."""
    if name in ("Bloom", "Gemma2") and implementation == "sdpa":
        pytest.skip(f"{name} has no SDPA implementation")
    model = build(name, implementation, **DECODERS[name])
    for module in model.modules():
        for attribute in ("attention_dropout", "dropout", "attn_dropout"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for n, p in model.named_parameters():
            if p.dim() == 2 and any(s in n for s in ("q_proj", "k_proj", "c_attn", "query")):
                p *= 10
    spy = Spy(monkeypatch)
    spy.watch(model, **tokens(pads))
    layers, probe = watched(model, **tokens(pads))
    per_call = [c for c in spy.calls if "q" in c or c["scores"].shape[-1] == 12]
    spy.calls = per_call
    assert len(layers) == 2 == len(per_call), (probe.coverage, len(per_call))
    names = (*PER_ROW, "max_logit", "abs_max_logit", "masked_rows", "keys")
    for i, values in enumerate(layers.values()):
        assert_agree(values, spy.expected(i), names, rtol=1e-3, atol=1e-4)
    assert all(r.verified != "no" for r in probe.coverage), probe.coverage
    assert not [a for a in probe.alerts if a.severity is Severity.CRITICAL]


def test_scales_are_the_models_own() -> None:
    """GPT-2 divides by the layer's number, Granite has a multiplier."""
    scales = {
        "Llama": [8**-0.5] * 2,
        "GPT2": [8**-0.5, 8**-0.5 / 2],
        "Granite": [0.0156] * 2,
    }
    for name, expected in scales.items():
        layers, _ = watched(build(name, "sdpa", **DECODERS[name]), **tokens())
        got = [float(v["scale"][0]) for v in layers.values()]
        assert got == pytest.approx(expected, rel=1e-4), name


def test_sinks_of_gpt_oss() -> None:
    model = build(
        "GptOss", "eager", head_dim=8, num_local_experts=2, num_experts_per_tok=1,
        attention_dropout=0.0, sliding_window=64,
    )  # fmt: skip
    with torch.no_grad():
        for n, p in model.named_parameters():
            if "q_proj" in n:
                p.zero_()
            if "sinks" in n:
                p.fill_(4.0)
    layers, _ = watched(model, **tokens())
    assert len(layers) == 2
    for values in layers.values():
        torch.testing.assert_close(values["entropy_ratio"], torch.ones(4), rtol=0, atol=1e-4)
        assert values["keys"].tolist() == [12] * 4


def encoder_decoder(name: str, implementation: str) -> nn.Module:
    sizes = {
        "d_model": 32, "num_hidden_layers": 1, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_heads": 4,
        "num_layers": 1, "d_kv": 8, "d_ff": 48, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
        "decoder_start_token_id": 1,
    }  # fmt: skip
    return build(name, implementation, **sizes)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["T5", "Bart"])
def test_encoder_decoders_have_three_kinds_of_layers(name: str, implementation: str) -> None:
    model = encoder_decoder(name, implementation)
    inputs = tokens(4) | {"decoder_input_ids": tokens()["input_ids"][:, :5]}
    layers, probe = watched(model, **inputs)
    keys = {n: (int(v["keys"].max()), int(v["rows"][0])) for n, v in layers.items()}
    assert sorted(keys.values()) == [(5, 10), (12, 10), (12, 24)]
    if name == "T5":
        assert all(float(v["scale"][0]) == 1.0 for v in layers.values())
    assert all(r.verified != "no" for r in probe.coverage), probe.coverage


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_generate_inside_training_is_dropped(name: str, implementation: str) -> None:
    model = build(name, implementation, **DECODERS[name])
    inputs = tokens()
    with sp.watch(model, strict=True) as probe:
        for _ in range(3):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model.generate(**inputs, max_new_tokens=4, do_sample=False)
            model(**inputs, labels=inputs["input_ids"]).loss.backward()
            probe.step()
        assert [{o.sequences for o in r.observations} for r in probe._kept] == [{2}] * 3


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_gradient_checkpointing_counts_once(implementation: str, reentrant: bool) -> None:
    results = []
    for watching in (False, True):
        model = build("Llama", implementation)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        inputs = tokens(3)
        probe = sp.watch(model, strict=True) if watching else None
        for _ in range(3):
            model(**inputs, labels=inputs["input_ids"]).loss.backward()
            if probe is not None:
                probe.step()
        results.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        if probe is not None:
            probe.close()
            assert [[o.sequences for o in r.observations] for r in probe._kept] == [[2, 2]] * 3
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_biases_that_overflow_float16_in_eager_attention_alone(
    dtype: torch.dtype, implementation: str
) -> None:
    """huggingface/transformers#33317: NaN in one implementation, right in the other."""
    model = build("Qwen2", implementation, hidden_size=256, num_attention_heads=2)
    with torch.no_grad():
        for n, p in model.named_parameters():
            if n.endswith(("q_proj.bias", "k_proj.bias")):
                p.fill_(30.0)
    layers, probe = watched(model.to(dtype), **tokens())
    overflows = dtype == torch.float16 and implementation == "eager"
    critical = {a.rule for a in probe.alerts if a.severity is Severity.CRITICAL}
    assert critical == ({"nonfinite", "fp16_overflow"} if overflows else set())
    first = next(iter(layers.values()))
    assert (first["fp16_headroom_log2"] < 0).all()
    assert first["qk_abs_max_logit"].isfinite().all()
    assert (first["qk_abs_max_logit"] > 65504 / 128**0.5).all()
