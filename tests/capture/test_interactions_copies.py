"""Copies, pickles, traces and functional calls of a model that is being watched."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable

import pytest
import torch
from side_by_side import both, calls, sequences
from tiny_models import Attention, Encoder, Model, MultiHead, loss_of, tokens
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import stability_probe as sp

MODELS: dict[str, Callable[[], nn.Module]] = {
    "sdpa": lambda: Model(Attention(), Attention()),
    "softmax": lambda: Model(Attention("torch.softmax"), Attention("einsum")),
    "encoder": lambda: Encoder(dropout=0.0),
    "multi-head": lambda: MultiHead(need_weights=True, dropout=0.0),
}
LAYERS = ["blocks.0.attention", "blocks.1.attention"]


def train_step(model: nn.Module, probe: sp.Probe) -> None:
    loss_of(model, tokens()).backward()
    probe.step()


def saved(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "torch.save": saved,
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_copy_tells_the_probe_nothing(name: str, settled: bool, how: str) -> None:
    """Also during discovery, where hooks are global and every module's forward is seen."""
    torch.manual_seed(0)
    model = MODELS[name]()
    with sp.watch(model, strict=True) as probe:
        if settled:
            train_step(model, probe)
        before = calls(probe)
        twin = COPIES[how](model)
        loss_of(twin, tokens()).backward()
        assert calls(probe) == before
        train_step(model, probe)
        seen = [n for n, c in calls(probe).items() if c]
        assert all(calls(probe)[n] == before.get(n, 0) + 1 for n in seen)
        assert list(twin.state_dict()) == list(model.state_dict())
        assert seen
    loss_of(twin, tokens()).backward()
    with sp.watch(twin, strict=True) as second:
        train_step(twin, second)
        assert [n for n, c in calls(second).items() if c] == seen


def test_an_exponential_moving_average_beside_the_model() -> None:
    """Made before the watch and after it, and run in train mode, as a teacher is."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    torch.manual_seed(0)
    model = MODELS["sdpa"]()
    early = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    with sp.watch(model, strict=True) as probe:
        for step in range(1, 5):
            late = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            train_step(model, probe)
            for average in (early, late):
                average.update_parameters(model)
                loss_of(average.train(), tokens(5))
                with torch.no_grad():
                    average.eval()(tokens(5))
            assert calls(probe) == dict.fromkeys(LAYERS, step)
        assert [set(s.values()) for s in sequences(probe)] == [{3}] * 4


def test_a_state_dict_has_nothing_of_the_probe() -> None:
    model = MODELS["sdpa"]()
    before = {n: v.clone() for n, v in model.state_dict().items()}
    with sp.watch(model, strict=True) as probe:
        loss_of(model, tokens()).backward()
        probe.step()
        assert list(model.state_dict()) == list(before)
        assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
        MODELS["sdpa"]().load_state_dict(model.state_dict())
        model.load_state_dict(before)
        assert [n for n, _ in model.named_buffers()] == []


# ------------------------------------------------------------------ tracing


@pytest.mark.parametrize(
    ("name", "settled"), [("sdpa", False), ("softmax", True), ("multi-head", True)]
)
def test_a_jit_trace_has_the_same_nodes(name: str, settled: bool) -> None:
    torch.manual_seed(0)
    model, batch = MODELS[name](), tokens()

    def traced() -> list[str]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = torch.jit.trace(model, batch, check_trace=False).inlined_graph
        return [node.kind() for node in graph.nodes()]

    before = traced()
    with sp.watch(model, strict=True) as probe:
        if settled:
            train_step(model, probe)
        count = calls(probe)
        assert traced() == before
        assert calls(probe) == count
        train_step(model, probe)
        assert sum(calls(probe).values()) > sum(count.values())
    assert traced() == before


@pytest.mark.parametrize(("name", "settled"), [("sdpa", False), ("multi-head", True)])
def test_an_export_has_the_same_nodes(name: str, settled: bool) -> None:
    torch.manual_seed(0)
    model, batch = MODELS[name](), tokens()

    def exported() -> list[str]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(model, (batch,), strict=False)
        return [str(node.target) for node in program.graph.nodes]

    before = exported()
    with sp.watch(model, strict=True) as probe:
        if settled:
            train_step(model, probe)
        count = calls(probe)
        assert exported() == before
        assert calls(probe) == count
        train_step(model, probe)
        assert sum(calls(probe).values()) > sum(count.values())
        assert not probe.alerts


def test_a_fake_forward_leaves_nothing() -> None:
    """Shape propagation runs the model on tensors without data."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = MODELS["sdpa"]()
    with sp.watch(model, strict=True) as probe:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model(tokens())
        for _ in range(2):
            train_step(model, probe)
        assert calls(probe) == dict.fromkeys(LAYERS, 2)
        assert not probe.alerts
        with FakeTensorMode(allow_non_fake_inputs=True):
            model(tokens())
        train_step(model, probe)
        assert calls(probe) == dict.fromkeys(LAYERS, 3)
        assert not probe.alerts


def test_a_model_can_be_scripted_once_it_is_no_longer_watched() -> None:
    class Scriptable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(self.q(x) @ x.mT, -1) @ x

    model = nn.Sequential(Scriptable())
    x = torch.randn(2, 5, 8)
    with sp.watch(model, strict=True) as probe:
        for _ in range(2):
            model(x).sum().backward()
            probe.step()
        assert calls(probe) == {"0": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(model)
    assert torch.equal(scripted(x), model(x))


# ------------------------------------------------------------------ functional calls


def test_a_functional_call_is_a_forward_like_any_other() -> None:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        weights = {n: p * 1.0 for n, p in model.named_parameters()}
        logits = functional_call(model, weights, (batch,))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())

    probe = both(MODELS["sdpa"], step=step)
    assert calls(probe) == dict.fromkeys(LAYERS, 4)
    assert all(r.verified == "output" for r in probe.coverage)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # SDPA under vmap
@pytest.mark.parametrize("name", ["sdpa", "softmax", "multi-head"])
@pytest.mark.parametrize("settled", [False, True])
def test_func_grad_vmap_and_their_like_are_left_alone(name: str, settled: bool) -> None:
    """Per-sample gradients: numbers of a batch inside vmap belong to no step of the loop."""
    torch.manual_seed(0)
    model, batch = MODELS[name](), tokens()
    weights = {n: p.detach() for n, p in model.named_parameters()}

    def loss(weights: dict[str, Tensor], sample: Tensor) -> Tensor:
        logits = functional_call(model, weights, (sample.unsqueeze(0),))
        return nn.functional.cross_entropy(logits.flatten(0, 1), sample)

    def per_sample() -> dict[str, Tensor]:
        alone = grad(loss)(weights, batch[0])
        together = vmap(grad(loss), (None, 0))(weights, batch)
        return alone | {f"{n}, vmap": g for n, g in together.items()}

    before = per_sample()
    with sp.watch(model, strict=True) as probe:
        if settled:
            train_step(model, probe)
        watched = per_sample()
        assert all(torch.equal(before[n], watched[n]) for n in before)
        train_step(model, probe)
        assert not probe.alerts
        assert set(sequences(probe)[-1].values()) == {3}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # SDPA under vmap
def test_modules_stacked_for_vmap_are_left_alone() -> None:
    from torch.func import stack_module_state

    torch.manual_seed(0)
    models = [MODELS["sdpa"]() for _ in range(3)]
    batch = tokens()
    with sp.watch(models[0], strict=True) as probe:
        parameters, buffers = stack_module_state(models)

        def forward(p: dict[str, Tensor], b: dict[str, Tensor]) -> Tensor:
            return functional_call(models[0], (p, b), (batch,))

        stacked = vmap(forward, randomness="different")(parameters, buffers)
        alone = torch.stack([model(batch) for model in models[1:]])
        torch.testing.assert_close(stacked[1:], alone)
        probe.step()
        assert set(calls(probe).values()) <= {0}
