"""Gradients of attention are watched, and pass through unchanged."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import PRODUCTS, Attention, Encoder, Model, MultiHead, loss_of, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import stability_probe as sp
from stability_probe.capture.gradients import GradientHook
from stability_probe.plan import every
from stability_probe.records import FirstBad
from stability_probe.sentinel import gradient_witness

PLAIN = ("torch.softmax", "einsum", "bmm")
GRADIENTS = {"grad_q", "grad_k", "grad_v", "grad_output", "grad_input"}


class Poison(torch.autograd.Function):
    """Passes x on; in backward one value of its gradient becomes NaN or infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        gradient[(1,) * gradient.dim()] = ctx.value
        return gradient, None


class Identity(torch.autograd.Function):
    """A node of the graph that can be referred to weakly."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Poisoned(Attention):
    """Attention whose backward gives a bad gradient of q, k or v, or gets one for its output."""

    where: str | None = None
    value = float("nan")

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = {"q": q, "k": k, "v": v}
        if self.where in rows:  # a branch beside the call: the two gradients meet in q
            q, k, v = (z.view_as(z) for z in (q, k, v))
            side = Poison.apply({"q": q, "k": k, "v": v}[self.where], self.value)
            return super().attend(q, k, v) + 0.0 * side
        if self.where == "scores":
            scores = PRODUCTS[self.spelling](q, k)
            scores = scores + 0.0 * Poison.apply(scores.clamp(min=-1e3), self.value)
            return torch.softmax(scores, -1).view(*q.shape[:3], -1) @ v
        y = super().attend(q, k, v)
        return Poison.apply(y, self.value) if self.where == "output" else y


def bad(probe: sp.Probe) -> set[tuple[str, str, int]]:
    found: list[FirstBad] = [b for r in probe._kept for b in r.scalars.first_bad]
    return {(b.layer.split(".")[1], b.tensor, b.step) for b in found}


def model_of(spelling: str, reentrant: bool | None = None, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    model = Model(*(Poisoned(spelling, dropout) for _ in range(3)))
    if reentrant is not None:
        for block in model.blocks:
            forward = block.forward
            block.forward = lambda x, f=forward: checkpoint(f, x, use_reentrant=reentrant)
    return model


@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize(
    ("spelling", "where", "kinds"),
    [
        *(("sdpa", w, {f"grad_{w}", "grad_input"}) for w in "qkv"),
        *((s, "v", {"grad_v", "grad_input"}) for s in ("torch.softmax", "einsum")),
        *((s, "scores", {"grad_q", "grad_k", "grad_input"}) for s in PLAIN),
        *((s, "output", GRADIENTS) for s in ("sdpa", *PLAIN)),
    ],
)
def test_a_poisoned_gradient_is_told_with_its_layer_and_step(
    spelling: str, where: str, kinds: set[str], reentrant: bool | None, settled: bool
) -> None:
    model = model_of(spelling, reentrant)
    at = 3 if settled else 1
    with sp.watch(model, strict=True, plan=every(2)) as probe:
        for step in range(1, 5):
            model.blocks[1].attention.where = where if step == at else None
            loss = loss_of(model, tokens())
            loss.backward()
            probe.step(loss=loss)
            model.zero_grad()
        found = bad(probe)
    mine = {kind for layer, kind, _ in found if layer == "1"}
    assert mine == kinds
    below = {kind for layer, kind, _ in found if layer == "0"}
    assert below == GRADIENTS
    assert not {kind for layer, kind, _ in found if layer == "2"}
    assert {step for *_, step in found} == {at}


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_dtype_and_kind_of_bad_value(dtype: torch.dtype, value: float) -> None:
    model = model_of("sdpa")
    model.blocks[0].attention.where, model.blocks[0].attention.value = "v", value
    model.to(dtype)
    with sp.watch(model, strict=True) as probe:
        loss_of(model, tokens()).backward()
        probe.step()
        assert bad(probe) == {("0", "grad_v", 1), ("0", "grad_input", 1)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_large_finite_values_are_finite_though_their_sum_passes_half_precision(
    dtype: torch.dtype,
) -> None:
    x = torch.full((2, 4, 64, 8), 6e4, dtype=dtype)
    assert bool(torch.isfinite(gradient_witness(x)))
    x[1, 2, 3, 4] = float("inf")
    x[1, 2, 3, 5] = float("-inf")
    assert not bool(torch.isfinite(gradient_witness(x)))


@pytest.mark.parametrize("need_weights", [True, False])
def test_multi_head_attention_is_watched(need_weights: bool) -> None:
    class Model(MultiHead):
        def forward(self, batch: Tensor) -> Tensor:
            x = self.embedding(batch)
            y, _ = self.attention(x, x, x, need_weights=self.need_weights)
            return self.head(x + Poison.apply(y, float("nan")))

    model = Model(need_weights=need_weights)
    with sp.watch(model, strict=True) as probe:
        loss_of(model, tokens()).backward()
        probe.step()
        kinds = {b.tensor for r in probe._kept for b in r.scalars.first_bad}
    assert kinds == GRADIENTS


def hooks_on(*tensors: Tensor) -> int:
    return sum(len(t._backward_hooks or {}) for t in tensors)


class Keeping(Attention):
    """Attention whose tensors can be looked at afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        x = Identity.apply(x)
        self.node = x.grad_fn
        return super().forward(x)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = super().attend(q, k, v)
        self.seen = (q, k, v, out)
        return out


def gradients(
    watched: bool, of: Callable[[Tensor, nn.Module], list[Tensor]], spelling: str
) -> list[Tensor]:
    torch.manual_seed(0)
    model = Model(Keeping(spelling, 0.1), Keeping(spelling, 0.1))
    probe = sp.watch(model, strict=True) if watched else None
    loss = loss_of(model, tokens())
    found = of(loss, model)
    if probe is not None:
        probe.step()
        assert not bad_any(probe)
        probe.close()
    return [*found, torch.get_rng_state()]


def bad_any(probe: sp.Probe) -> list[FirstBad]:
    return [b for r in probe._kept for b in r.scalars.first_bad]


def backward_twice(loss: Tensor, model: nn.Module) -> list[Tensor]:
    loss.backward(retain_graph=True)
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def penalty(loss: Tensor, model: nn.Module) -> list[Tensor]:
    """A gradient penalty: the gradient itself is differentiated."""
    parameters = list(model.parameters())
    first = torch.autograd.grad(loss, parameters, create_graph=True)
    sum(g.square().sum() for g in first).backward()
    return [p.grad for p in parameters if p.grad is not None]


def by_grad(loss: Tensor, model: nn.Module) -> list[Tensor]:
    q, k, v, out = model.blocks[0].attention.seen
    return list(torch.autograd.grad(loss, [q, k, v, out, model.embedding.weight]))


def batched(loss: Tensor, model: nn.Module) -> list[Tensor]:
    q, _, _, out = model.blocks[1].attention.seen
    directions = torch.stack([torch.ones_like(out), torch.zeros_like(out)])
    return list(torch.autograd.grad(out, [q], directions, is_grads_batched=True))


def none_of_v(loss: Tensor, model: nn.Module) -> list[Tensor]:
    """The loss does not depend on the second layer at all: its gradients never come."""
    model.blocks[0].attention.seen[3].square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("of", [backward_twice, penalty, by_grad, batched, none_of_v])
@pytest.mark.parametrize("spelling", ["sdpa", "torch.softmax"])
def test_unusual_backwards_are_bit_identical(
    of: Callable[[Tensor, nn.Module], list[Tensor]], spelling: str
) -> None:
    if of is penalty and spelling == "sdpa":
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            one, two = gradients(False, of, spelling), gradients(True, of, spelling)
    else:
        one, two = gradients(False, of, spelling), gradients(True, of, spelling)
    assert len(one) == len(two) > 1
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("spelling", ["sdpa", "torch.softmax"])
def test_both_checkpoints_with_dropout_are_bit_identical(spelling: str, reentrant: bool) -> None:
    def run(watched: bool) -> list[Tensor]:
        model = model_of(spelling, reentrant, dropout=0.2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        probe = sp.watch(model, strict=True, plan=every(2)) if watched else None
        found = []
        for _ in range(6):
            optimizer.zero_grad()
            loss_of(model, tokens()).backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            if probe is not None:
                probe.step()
        if probe is not None:
            assert [len(r.observations) for r in probe._kept] == [3] * 6
            assert all(o.sequences == 3 for r in probe._kept for o in r.observations)
            probe.close()
        return [*found, *(p.detach() for p in model.parameters()), torch.get_rng_state()]

    one, two = run(False), run(True)
    assert len(one) == len(two)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_a_call_has_one_hook_a_tensor_and_close_makes_them_inert() -> None:
    model = Model(Keeping(), Keeping("torch.softmax"))
    probe = sp.watch(model, strict=True)
    loss = loss_of(model, tokens())
    fused, plain = (block.attention.seen for block in model.blocks)
    assert [hooks_on(t) for t in fused] == [1, 1, 1, 1]
    assert [hooks_on(t) for t in plain] == [1, 0, 1, 1]  # the product's factor is k transposed
    told: list[str] = []
    real = probe._meter.gradient
    probe._meter.gradient = lambda *a: (told.append(a[2]), real(*a))  # type: ignore[method-assign]
    loss.backward(retain_graph=True)
    assert sorted(told) == sorted(2 * list(GRADIENTS))
    probe.close()
    told.clear()
    model.zero_grad()
    loss.backward()
    assert not told
    assert model.embedding.weight.grad is not None
    loss_of(model, tokens())
    assert not any(hooks_on(*block.attention.seen) for block in model.blocks)


def test_the_recomputation_of_a_non_reentrant_checkpoint_sets_no_hooks() -> None:
    model = Model(Keeping())
    counts = []
    with sp.watch(model, strict=True) as probe:
        for reentrant in (False, True):
            x = model.embedding(tokens())
            out = checkpoint(model.blocks[0], x, use_reentrant=reentrant)
            first = hooks_on(*model.blocks[0].attention.seen)
            model.head(out).sum().backward()
            counts.append((first, hooks_on(*model.blocks[0].attention.seen)))
            probe.step()
    assert counts == [(4, 0), (0, 4)]


def test_hooks_keep_neither_the_graph_nor_the_users_tensors() -> None:
    model = Model(Keeping(), Keeping("torch.softmax"))
    gc.collect()
    gc.disable()  # what dies here dies by its reference count
    try:
        with sp.watch(model, strict=True) as probe:
            loss = loss_of(model, tokens())
            seen = [t for b in model.blocks for t in b.attention.seen]
            kept = [weakref.ref(t) for t in (*seen, *(b.attention.node for b in model.blocks))]
            for block in model.blocks:
                del block.attention.seen, block.attention.node
            del seen
            loss.backward()
            del loss
            probe.step()
            assert not [ref for ref in kept if ref() is not None]
    finally:
        gc.enable()


def test_a_graph_that_lives_on_does_not_keep_the_probe() -> None:
    model = Model(Keeping())
    probe = sp.watch(model, strict=True)
    loss = loss_of(model, tokens())
    probe.close()
    watching = weakref.ref(probe._attachment._gradients)
    del probe
    gc.collect()
    assert watching() is None
    loss.backward()


def test_parameters_are_left_alone_and_copies_are_inert() -> None:
    class Learned(Attention):
        """Attention whose queries are a parameter."""

        def __init__(self) -> None:
            super().__init__()
            self.queries = nn.Parameter(torch.randn(1, 4, 5, 8))

        def forward(self, x: Tensor) -> Tensor:
            b, t, d = x.shape
            _, k, v = (z.view(b, t, 4, -1).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
            y = torch.nn.functional.scaled_dot_product_attention(self.queries, k, v)
            return self.out(y.mean(2).reshape(b, 1, d).expand(b, t, d))

    model = Model(Learned())
    with sp.watch(model, strict=True) as probe:
        loss_of(model, tokens(1)).backward()
        assert not any(hooks_on(p) for p in model.parameters())
        twin = copy.deepcopy(model)
        loss_of(twin, tokens(1)).backward()
        probe.step()
        assert not bad_any(probe)
        hook = GradientHook(probe._attachment._gradients, "x", 0, "grad_q")
        assert copy.deepcopy(hook)(torch.ones(1)) is None
        assert not isinstance(copy.deepcopy(hook), GradientHook)


def test_a_fault_in_backward_is_one_alert_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    model = Model(Attention(), Attention())
    with sp.watch(model) as probe:
        monkeypatch.setattr(probe._meter, "gradient", broken)
        for _ in range(3):
            loss_of(model, tokens()).backward()
            probe.step()
        (alert,) = [a for a in probe.alerts if a.rule == "probe_fault"]
        assert "a bug of ours" in alert.message
    assert model.embedding.weight.grad is not None


def test_gradients_arrive_from_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd may run hooks on threads of its own; no witness may be lost."""
    monkeypatch.setattr("stability_probe.meter.known_finite", lambda *_: False)  # as on a device
    from concurrent.futures import ThreadPoolExecutor

    from stability_probe.meter import Meter
    from stability_probe.records import AttentionCall

    meter = Meter()
    x = torch.ones(1, 1, 2, 4)
    meter.call(AttentionCall(layer="a", q_BHQD=x, k_BGKD=x, v_BGKE=x, output_BHQE=x))
    with ThreadPoolExecutor(8) as pool:
        for _ in range(50):
            list(pool.map(lambda i: meter.gradient("a", 0, "grad_q", x * i), range(8)))
    # 50 rounds of 0 + 1 + ... + 7, eight values each
    assert float(meter._slots["a", 0].pool.gradients["grad_q"]) == 50 * 28 * 8
    meter.gradient("unknown", 0, "grad_q", x)  # a layer that was never recorded


def test_the_flag_is_up_after_a_bad_backward() -> None:
    model = model_of("sdpa")
    with sp.watch(model, strict=True) as probe:
        loss = loss_of(model, tokens())
        model.blocks[2].attention.where = "k"
        bad_loss = loss_of(model, tokens())
        loss.backward()
        assert not bool(probe.nonfinite_flag())
        bad_loss.backward()
        assert bool(probe.nonfinite_flag())
        probe.step()
        assert not bool(probe.nonfinite_flag())


def test_transformer_encoder_layers_are_watched_in_backward() -> None:
    class Bad(Encoder):
        def forward(self, batch: Tensor) -> Tensor:
            return Poison.apply(super().forward(batch), float("inf"))

    model = Bad()
    with sp.watch(model, strict=True) as probe:
        for _ in range(2):
            loss_of(model, tokens()).backward()
            probe.step()
        layers = {(b.layer, b.tensor) for b in bad_any(probe)}
    assert len({layer for layer, _ in layers}) == 2
    assert {kind for _, kind in layers} == GRADIENTS


def test_the_alert_names_the_layer_and_replay_says_the_same(tmp_path: Path) -> None:
    model = model_of("sdpa")
    with sp.watch(model, tmp_path, strict=True, plan=every(4)) as probe:
        for step in range(1, 12):
            model.blocks[1].attention.where = "q" if step == 6 else None
            loss = loss_of(model, tokens())
            loss.backward()
            model.zero_grad()
            probe.step(loss=loss)
    (alert,) = [a for a in probe.alerts if a.state == "firing"]
    assert (alert.rule, alert.step, alert.layer) == ("nonfinite", 6, "blocks.1.attention")
    assert "forward healthy, backward non-finite" in alert.message
    assert "that of its q is not" in alert.message
    assert "earlier layers follow: blocks.0.attention" in alert.message
    run = sp.load(tmp_path)
    assert run.alerts == probe.alerts
    assert sp.replay(tmp_path) == probe.alerts
    assert {b.tensor for r in run.records() for b in r.scalars.first_bad} == GRADIENTS
