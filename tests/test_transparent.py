"""A watched run is the unwatched run, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import KERNELS, PRODUCTS, Attention, Encoder, Model, MultiHead, loss_of, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import stability_probe as sp
from stability_probe.plan import every

MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda n=name: Model(Attention(n, 0.1), Attention(n, 0.1)) for name in KERNELS},
    **{name: lambda n=name: Model(Attention(n, 0.1), Attention(n, 0.1)) for name in PRODUCTS},
    "TransformerEncoder with padding": Encoder,
    "MultiheadAttention with weights": lambda: MultiHead(need_weights=True),
    "MultiheadAttention without weights": lambda: MultiHead(need_weights=False),
}


def train(
    make: Callable[[], nn.Module],
    watched: bool,
    *,
    steps: int = 20,
    step: Callable[[nn.Module, Tensor], Tensor] = loss_of,
    plan: sp.Plan | None = None,
) -> tuple[list[Tensor], sp.Probe | None]:
    """Losses, final weights, an evaluation's output and the random state of a short run."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    probe = sp.watch(model, strict=True, plan=plan) if watched else None
    traces = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = step(model, tokens())
        loss.backward()
        optimizer.step()
        if probe is not None:
            probe.step(loss=loss, grad_norm=1.0)
        traces.append(loss.detach())
    model.eval()
    with torch.no_grad():
        traces.append(model(tokens()))
    traces += [p.detach().clone() for p in model.parameters()]
    traces.append(torch.get_rng_state())
    if probe is not None:
        probe.close()
    return traces, probe


def assert_same(one: list[Tensor], two: list[Tensor]) -> None:
    assert len(one) == len(two)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_twenty_steps_with_dropout_are_bit_identical(name: str) -> None:
    bare, _ = train(MODELS[name], watched=False)
    watched, probe = train(MODELS[name], watched=True)
    assert_same(bare, watched)
    assert probe is not None
    assert all(r.verified != "no" for r in probe.coverage), probe.coverage
    assert not probe.alerts


@pytest.mark.parametrize("name", ["sdpa", "torch.softmax", "TransformerEncoder with padding"])
def test_unmeasured_steps_are_bit_identical(name: str) -> None:
    bare, _ = train(MODELS[name], watched=False)
    watched, _ = train(MODELS[name], watched=True, plan=every(7))
    assert_same(bare, watched)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["sdpa", "torch.softmax"])
def test_activation_checkpointing_is_bit_identical_and_counts_once(
    name: str, reentrant: bool
) -> None:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        x = model.embedding(batch)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return torch.nn.functional.cross_entropy(model.head(x).flatten(0, 1), batch.flatten())

    bare, _ = train(MODELS[name], watched=False, steps=6, step=step)
    watched, probe = train(MODELS[name], watched=True, steps=6, step=step)
    assert_same(bare, watched)
    assert probe is not None
    frame = probe.frame()
    assert set(frame.step) == set(range(1, 7))
    records = list(probe._kept)
    assert all(o.sequences == 3 for r in records for o in r.observations)
    assert all(len(r.observations) == 2 for r in records)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["sdpa", "torch.softmax", "TransformerEncoder with padding"])
def test_autocast_is_bit_identical(name: str, dtype: torch.dtype) -> None:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return loss_of(model, batch)

    bare, _ = train(MODELS[name], watched=False, steps=6, step=step)
    watched, probe = train(MODELS[name], watched=True, steps=6, step=step)
    assert_same(bare, watched)
    assert probe is not None
    assert all(r.verified != "no" for r in probe.coverage), probe.coverage


@pytest.mark.parametrize(
    "make", [Encoder, lambda: nn.Sequential(nn.Embedding(50, 32), Encoder().encoder)]
)
def test_evaluation_keeps_the_fast_path(make: Callable[[], nn.Module]) -> None:
    """A hook inside nn.TransformerEncoderLayer would switch it off and move the output."""
    torch.manual_seed(0)
    model = make().train()
    batch = tokens()

    def evaluate() -> Tensor:
        model.eval()
        with torch.no_grad():
            out = model(batch)
        model.train()
        return out

    before = evaluate()
    with sp.watch(model, strict=True) as probe:
        during_discovery = evaluate()
        model(batch).sum().backward()
        probe.step()
        while_watched = evaluate()
        assert probe.coverage[0].verified != "no"
    assert torch.equal(before, during_discovery)
    assert torch.equal(before, while_watched)


def test_a_frozen_encoder_in_eval_mode_keeps_its_fast_path_in_training() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Encoder().eval().requires_grad_(False)
            self.model = Model(Attention("sdpa"))

        def forward(self, batch: Tensor) -> Tensor:
            with torch.no_grad():
                frozen = self.encoder(batch)
            return self.model(batch) + frozen

        def train(self, mode: bool = True) -> nn.Module:
            super().train(mode)
            self.encoder.eval()
            return self

    bare, _ = train(lambda: Frozen().train(), watched=False, steps=5)
    watched, probe = train(lambda: Frozen().train(), watched=True, steps=5)
    assert_same(bare, watched)
    assert probe is not None
    assert [r.layer for r in probe.coverage if r.seam] == ["model.blocks.0.attention"]


RANDOM_STATES = """
import random, sys
import numpy as np
import torch
sys.path.insert(0, {tests!r})
from tiny_models import Attention, Model, loss_of, tokens

random.seed(0), np.random.seed(0), torch.manual_seed(0)
model = Model(Attention("torch.softmax"))
import stability_probe
probe = stability_probe.watch(model, {logdir!r}) if {watched} else None
for step in range(4):
    loss = loss_of(model, tokens())
    loss.backward()
    if step == 2:
        loss = loss * float("nan")
    if probe is not None:
        probe.step(loss=loss)
if probe is not None:
    probe.close()
    assert probe.alerts
print(random.random(), np.random.random(), torch.rand(()).item(), torch.initial_seed())
"""


def test_no_random_state_of_any_library_moves(tmp_path: Path) -> None:
    """In a process of its own: libraries draw when they are imported for the first time."""
    drawn = []
    for watched in (False, True):
        code = RANDOM_STATES.format(
            tests=str(Path(__file__).parent), logdir=str(tmp_path / "run"), watched=watched
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        drawn.append(done.stdout)
    assert drawn[0] == drawn[1]
