"""Hooks, wrappers and kinds of tensor that a watched model may have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from side_by_side import both, calls, sequences
from tiny_models import HEADS, WIDTH, Attention, Encoder, Model, MultiHead, loss_of, tokens
from torch import Tensor, nn

import stability_probe as sp

LAYERS = ["blocks.0.attention", "blocks.1.attention"]

SPELLINGS = ("sdpa", "torch.softmax", "einsum", "baddbmm")


def make(spelling: str = "sdpa", **options: float) -> Model:
    return Model(Attention(spelling, **options), Attention(spelling, **options))


# ------------------------------------------------------------------ hooks of the user's


def test_hooks_of_the_user_s_see_and_change_what_they_did() -> None:
    seen: list[list[Tensor]] = []

    def build() -> nn.Module:
        model, log = make("torch.softmax", dropout=0.1), []
        seen.append(log)
        attention = model.blocks[0].attention
        attention.register_forward_pre_hook(lambda m, args: (args[0] * 2.0,))
        attention.register_forward_hook(lambda m, args, out: out * 0.5, prepend=True)
        attention.register_full_backward_hook(lambda m, gi, go: log.append(go[0].clone()))
        attention.register_full_backward_pre_hook(lambda m, go: (go[0] * 3.0,))
        attention.qkv.register_forward_hook(lambda m, args, out: log.append(out.detach()))
        attention.qkv.weight.register_hook(lambda g: g * 2.0)
        return model

    probe = both(build)
    assert len(seen[0]) == len(seen[1]) == 8
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    assert calls(probe) == dict.fromkeys(LAYERS, 4)


@pytest.mark.parametrize("how", ["weight_norm", "spectral_norm", "orthogonal", "pruned", "LoRA"])
def test_parametrised_projections(how: str) -> None:
    from torch.nn.utils import parametrizations, prune

    class LoRA(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 3 * WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.b(self.a(x))

    def build() -> nn.Module:
        model = make(dropout=0.1)
        for block in model.blocks:
            if how == "LoRA":
                block.attention.qkv = LoRA(block.attention.qkv)
            elif how == "pruned":
                prune.random_unstructured(block.attention.qkv, "weight", 0.5)
            else:
                getattr(parametrizations, how)(block.attention.qkv)
        return model

    probe = both(build)
    assert calls(probe) == dict.fromkeys(LAYERS, 4)
    assert all(r.verified == "output" or r.verified == "reissued" for r in probe.coverage)


def test_a_forward_that_takes_only_keywords() -> None:
    """No positional argument to look at (huggingface/transformers#29247)."""

    class Keyword(Attention):
        def forward(self, *, hidden_states: Tensor, position: Tensor | None = None) -> Tensor:
            return super().forward(hidden_states)

    class Calling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn = Keyword("torch.softmax", 0.1)

        def forward(self, x: Tensor) -> Tensor:
            return self.self_attn(hidden_states=x, position=None)

    probe = both(lambda: Model(Calling(), Calling()), plan=sp.every(1, full_every=1))
    assert calls(probe) == {f"{layer}.self_attn": 4 for layer in LAYERS}
    assert (probe.frame().query("step > 1").input_rms > 0).all()


@pytest.mark.parametrize(
    "how",
    [
        "positional",
        "keyword",
    ],
)  # fmt: skip
@pytest.mark.parametrize("spelling", SPELLINGS[:2])
def test_frozen_attention_in_eval_mode_whose_input_needs_gradients(spelling: str, how: str) -> None:
    """As in prompt tuning: nothing of the layer trains, and gradients go through it."""

    class Calling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Attention(spelling).eval().requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x=x) if how == "keyword" else self.inner(x)

    probe = both(lambda: Model(Calling(), Calling()), allow_eval=True)
    assert calls(probe) == {f"{layer}.inner": 4 for layer in LAYERS}


def test_an_output_projection_that_is_never_called_as_a_module() -> None:
    """nn.MultiheadAttention reads out_proj's weight; a hook there would see nothing."""
    probe = both(lambda: MultiHead(need_weights=False))
    assert calls(probe) == {"attention": 4}


@pytest.mark.parametrize("outputs", ["tuple", "dict", "None"])
def test_modules_that_return_something_else(outputs: str) -> None:
    class Returning(Attention):
        def forward(self, x: Tensor, out: list[Tensor] | None = None) -> Any:
            y = super().forward(x)
            if out is not None:
                out.append(y)
            return {"tuple": (y, None), "dict": {"y": y}, "None": None}[outputs]

    class Calling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Returning("torch.softmax", 0.1)

        def forward(self, x: Tensor) -> Tensor:
            kept: list[Tensor] = []
            self.inner(x, kept)
            return kept[0]

    probe = both(lambda: Model(Calling(), Calling()))
    assert calls(probe) == {f"{layer}.inner": 4 for layer in LAYERS}


# ------------------------------------------------------------------ kinds of tensor


def test_a_jagged_nested_tensor_is_seen_and_not_hurt() -> None:
    class Jagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            rows = [x[0], x[1, :7], x[2, :3]]
            nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
            q, k, v = (p(nested).unflatten(-1, [HEADS, -1]).transpose(1, 2) for p in self.parts)
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            return y.to_padded_tensor(0.0)

    def pad(y: Tensor) -> Tensor:
        return F.pad(y, (0, 0, 0, 12 - y.shape[1]))

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Jagged()

        def forward(self, x: Tensor) -> Tensor:
            return pad(self.inner(x))

    probe = both(lambda: Model(Padded(), Attention()))
    assert not probe.alerts
    assert calls(probe) == {"blocks.0.attention.inner": 4, "blocks.1.attention": 4}


def test_a_tensor_subclass_passes_through_unchanged() -> None:
    class Tagged(Tensor):
        pass

    class Tagging(Attention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (z.as_subclass(Tagged) for z in (q, k, v))
            out = super().attend(q, k, v)
            assert type(out) is Tagged
            return out.as_subclass(Tensor)

    for spelling in SPELLINGS:
        probe = both(lambda spelling=spelling: Model(Tagging(spelling), Tagging(spelling)))
        assert calls(probe) == dict.fromkeys(LAYERS, 4), spelling
        assert not probe.alerts


@pytest.mark.parametrize(("batch", "length"), [(0, 0), (0, 3), (2, 0), (1, 1), (1, 2)])
@pytest.mark.parametrize("spelling", ["sdpa", "torch.softmax"])
def test_empty_and_tiny_batches(spelling: str, batch: int, length: int) -> None:
    """A rank whose shard ran out of data still runs the model."""

    class Small(Attention):
        def forward(self, x: Tensor) -> Tensor:
            b, t, _ = x.shape
            q, k, v = (
                z.view(b, t, HEADS, WIDTH // HEADS).transpose(1, 2)
                for z in self.qkv(x).chunk(3, -1)
            )
            return self.out(self.attend(q, k, v).transpose(1, 2).reshape(b, t, WIDTH))

    sizes = iter([(2, 5), (batch, length), (2, 5), (batch, length)] * 2)

    def step(model: nn.Module, _: Tensor) -> Tensor:
        return model(torch.zeros(*next(sizes), dtype=torch.long)).square().sum()

    probe = both(lambda: Model(Small(spelling), Small(spelling)), step=step)
    assert not probe.alerts
    assert calls(probe)[LAYERS[0]] >= 2
    assert [len(s) for s in sequences(probe)][::2] == [2, 2]


@pytest.mark.parametrize("spelling", ["sdpa", "torch.softmax"])
def test_shapes_that_change_at_every_step(spelling: str) -> None:
    count = iter(range(1, 1000))

    def step(model: nn.Module, _: Tensor) -> Tensor:
        i = next(count) % 5 + 1
        return loss_of(model, tokens(i, 3 * i))

    probe = both(lambda: make(spelling), step=step, steps=5)
    assert [s[LAYERS[0]] for s in sequences(probe)] != []
    assert not probe.alerts


def test_an_encoder_inside_a_larger_model_with_its_own_masks() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.model = Encoder(0.1), make(dropout=0.1)

        def forward(self, batch: Tensor) -> Tensor:
            return self.encoder(batch) + self.model(batch)

    probe = both(Two)
    assert len(calls(probe)) == 4
    assert set(calls(probe).values()) == {4}


# ------------------------------------------------------------------ autocast: the right numbers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spelling", ["sdpa", "torch.softmax"])
def test_autocast_does_not_round_the_probe_s_own_work(spelling: str, dtype: torch.dtype) -> None:
    """`q.float() @ k.float().mT` under autocast is a half-precision product all the same."""
    torch.manual_seed(0)
    model, batch = make(spelling), tokens()
    with torch.no_grad():
        model.blocks[0].attention.qkv.weight[: 2 * WIDTH] *= 30
    kept: list[Tensor] = []
    handle = model.blocks[0].attention.qkv.register_forward_hook(
        lambda module, args, out: kept.append(out.detach())
    )
    with sp.watch(model, strict=True) as probe:
        with torch.autocast("cpu", dtype=dtype):
            loss_of(model, batch).backward()
        probe.step()
        got = probe.latest("qk_abs_max_logit")[LAYERS[0]]
        headroom = probe.latest("fp16_headroom_log2")[LAYERS[0]]
    handle.remove()
    (qkv,) = kept
    assert qkv.dtype == dtype
    q, k, _ = (z.double().view(*batch.shape, HEADS, -1).transpose(1, 2) for z in qkv.chunk(3, -1))
    causal = torch.ones(12, 12, dtype=torch.bool).tril()
    product = (q @ k.mT).abs().masked_fill(~causal, 0).amax((0, 2, 3))
    torch.testing.assert_close(got.double(), product / q.shape[-1] ** 0.5, rtol=1e-5, atol=0)
    torch.testing.assert_close(headroom.double(), torch.log2(65504 / product), rtol=0, atol=1e-4)
