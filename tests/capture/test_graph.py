"""Opaque kernels, read from the autograd graph."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from seeing import Layer, Taker, assert_reads_like, dense, seen_by
from tiny_models import Attention, Model, loss_of, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import stability_probe as sp
from stability_probe.capture import attach

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


def scripted() -> object:
    @torch.jit.script
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attention


class Scripted(nn.Module):
    """A TorchScript function: no torch-function mode sees into it."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.kv_proj = nn.Linear(32, 32), nn.Linear(32, 64)
        self.scaled_dot_product = scripted()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            z.unflatten(-1, (4, 8)).transpose(1, 2)
            for z in (self.q_proj(x), *self.kv_proj(x).chunk(2, -1))
        )
        return self.scaled_dot_product(q, k, v).transpose(1, 2).flatten(-2)


def test_a_scripted_function_is_read_with_its_exact_tensors() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 10, 32)
    model = nn.Sequential(Scripted())
    calls, report, _ = seen_by(model, x, forwards=2)
    assert len(calls) == 2
    assert (report.layer, report.seam, report.sees) == ("0", "graph", "qk")
    assert report.verified == "lse"
    q = model[0].q_proj(x).unflatten(-1, (4, 8))
    k = model[0].kv_proj(x).chunk(2, -1)[0].unflatten(-1, (4, 8))
    products = dense(q, k)
    hidden = torch.ones(10, 10, dtype=torch.bool).triu(1)
    assert_reads_like(calls[0], products.masked_fill(hidden, -torch.inf), products)


def trained(model: nn.Module, *, watched: bool) -> tuple[list[Tensor], sp.Probe | None]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    probe = sp.watch(model, strict=True) if watched else None
    for _ in range(5):
        loss = loss_of(model, tokens())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if probe is not None:
            probe.step(loss=loss)
    return [p.detach().clone() for p in model.parameters()], probe


def test_training_is_the_same_to_the_bit_and_both_layers_are_seen_once() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Model(Attention(), Scripted())

    bare, _ = trained(make(), watched=False)
    model = make()
    seen, probe = trained(model, watched=True)
    assert probe is not None
    with probe:
        assert all(torch.equal(a, b) for a, b in zip(bare, seen, strict=True))
        report = {r.layer: r for r in probe.coverage}
        assert report["blocks.0.attention"].seam == "sdpa"
        assert report["blocks.1.attention"].seam == "graph"
        assert [r.calls for r in report.values()] == [5, 5]
        assert not probe.alerts


def test_an_earlier_layer_is_not_taken_for_a_later_one() -> None:
    """The walk ends where the module's forward began."""

    class NothingAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: Tensor, *, attend: bool = False) -> Tensor:
            x = self.linear(x)
            return F.scaled_dot_product_attention(x, x, x) if attend else x

    model = nn.Sequential(Scripted(), NothingAttention())
    taker = Taker()
    attachment = attach(model, taker, strict=True)
    try:
        model(torch.randn(2, 10, 32))
        assert [call.layer for call in taker.calls] == ["0"]
        assert set(attachment.unseen()) == {"1"}
    finally:
        attachment.close()


class Counting(torch.autograd.graph.saved_tensors_hooks):
    """Counts how often a saved tensor is unpacked."""

    def __init__(self) -> None:
        self.unpacked = 0
        super().__init__(lambda t: t, self.unpack)

    def unpack(self, t: Tensor) -> Tensor:
        self.unpacked += 1
        return t


@pytest.mark.parametrize("where", ["inside the module", "around the model"])
def test_saved_tensor_hooks_are_not_run(where: str) -> None:
    hooks = Counting()
    inside, around = (
        (hooks, nullcontext()) if where.startswith("inside") else (nullcontext(), hooks)
    )

    class Offloaded(Scripted):
        def forward(self, x: Tensor) -> Tensor:
            with inside:
                return super().forward(x)

    taker = Taker()
    attachment = attach(Offloaded(), taker, strict=True)
    try:
        with around:
            output = attachment._model(torch.randn(2, 10, 32))
    finally:
        attachment.close()
    assert not taker.calls
    assert hooks.unpacked == 0
    output.sum().backward()
    assert hooks.unpacked > 0  # they were in use


def test_a_checkpointed_part_is_not_computed_once_more() -> None:
    runs = []

    class Checkpointed(Scripted):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

        def inner(self, x: Tensor) -> Tensor:
            runs.append(1)
            return Scripted.forward(self, x)

    model = nn.Sequential(Checkpointed())
    attachment = attach(model, Taker(), strict=True)
    try:
        model(torch.randn(2, 10, 32))
        assert len(runs) == 1
    finally:
        attachment.close()


class FlashAttnFunc(torch.autograd.Function):
    """What flash-attn keeps for its backward, with dense maths."""

    @staticmethod
    def forward(ctx, q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes):
        # in NumPy, so that nothing of it shows
        scores = np.einsum("bqhd,bkhd->bhqk", q.detach().numpy(), k.detach().numpy())
        scores = np.tanh(scores * softmax_scale / softcap) * softcap
        scores[..., np.triu(np.ones((10, 10), bool), 1)] = -np.inf
        e = np.exp(scores)
        out = np.einsum("bhqk,bkhe->bqhe", e / e.sum(-1, keepdims=True), v.detach().numpy())
        out, lse = torch.from_numpy(out), torch.from_numpy(np.log(e.sum(-1)))
        ctx.save_for_backward(q, k, v, out, lse, torch.empty(2))
        ctx.dropout_p, ctx.softmax_scale, ctx.causal = dropout_p, softmax_scale, causal
        ctx.window_size, ctx.softcap, ctx.alibi_slopes = window_size, softcap, alibi_slopes
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad, grad, grad, *(None,) * 6


class Flash(Layer):
    """A layer whose code calls flash-attn; what it calls here is not the known function."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.flash_attn_of_its_own(*self.heads(x)).flatten(-2))

    def flash_attn_of_its_own(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return FlashAttnFunc.apply(q, k, v, 0.0, 0.25, True, (-1, -1), 2.0, None)


def test_flash_attn_s_autograd_function_is_read() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 10, 32)
    model = nn.Sequential(Flash(dense, groups=4))
    calls, report, _ = seen_by(model, x)
    assert (report.layer, report.seam, report.verified) == ("0", "graph", "lse")
    q, k, _ = model[0].heads(x)
    products = dense(q, k, 0.25)
    hidden = torch.ones(10, 10, dtype=torch.bool).triu(1)
    scores = (torch.tanh(products / 2) * 2).masked_fill(hidden, -torch.inf)
    assert_reads_like(calls[0], scores, products)
