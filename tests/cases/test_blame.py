"""Which layer, which step and which cause: what is told of models of every shape."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from attending import Attention as Given
from side_by_side import both, sequences
from tiny_models import WIDTH, Attention, Model, loss_of, tokens
from torch import Tensor, nn

import stability_probe as sp
from stability_probe.records import Severity

LAYERS = ["blocks.0.attention", "blocks.1.attention"]


def make(spelling: str = "torch.softmax") -> Model:
    return Model(Attention("sdpa", 0.1), Attention(spelling, 0.1))


# ------------------------------------------------------------------ shapes of models


def test_layers_without_attention_and_heads_that_differ() -> None:
    """Hybrid stacks, and layers of other shapes (maxtext#3277): nothing is stacked over layers."""

    class Wide(nn.Module):
        def __init__(self, heads: int) -> None:
            super().__init__()
            self.q, self.num_heads = nn.Linear(WIDTH, WIDTH), heads

        def forward(self, x: Tensor) -> Tensor:
            b, t, d = x.shape
            q = self.q(x).view(b, t, self.num_heads, -1).transpose(1, 2)
            return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(b, t, d)

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.cell(x)[0]

    probe = both(lambda: Model(Wide(2), Recurrent(), Wide(8), nn.Linear(WIDTH, WIDTH), Wide(1)))
    heads = {r.layer: r.heads for r in probe.coverage}
    assert heads == {f"blocks.{i}.attention": h for i, h in ((0, 2), (2, 8), (4, 1))}
    assert not probe.alerts
    assert probe.frame().groupby("layer")["head"].nunique().tolist() == [2, 8, 1]


def test_maxima_are_of_their_step_and_not_of_the_run() -> None:
    """A logged "maximum" that only ever rises hides that a run has calmed down (Primus#1164)."""
    sizes = [1.0, 50.0, 2.0, 1.0]
    model = Given(F.scaled_dot_product_attention)
    with sp.watch(model, strict=True, plan=sp.every(1)) as probe:
        got = []
        for size in sizes:
            x = torch.full((1, 1, 3, 4), size, requires_grad=True)
            model(x, torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4))
            probe.step()
            got.append(float(probe.latest("qk_abs_max_logit")["(root)"]))
    assert got == pytest.approx([2 * s for s in sizes])


def test_a_step_whose_forward_never_ran_has_no_numbers_of_the_last_one() -> None:
    model = make()
    with sp.watch(model, strict=True, plan=sp.every(1)) as probe:
        loss_of(model, tokens()).backward()
        probe.step()
        probe.step(skipped=True)
        loss_of(model, tokens()).backward()
        probe.step()
    assert [len(s) for s in sequences(probe)] == [2, 0, 2]


# ------------------------------------------------------------------ whose fault it is


@pytest.mark.parametrize("spelling", ["sdpa", "torch.softmax"])
def test_what_overflowed_below_attention_is_not_laid_to_attention(spelling: str) -> None:
    """T5 in float16: an MLP made the infinity that attention then shows (transformers#9295)."""

    class Overflowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model(Attention(spelling), Attention(spelling))

        def forward(self, batch: Tensor) -> Tensor:
            x = self.model.embedding(batch)
            x = self.model.blocks[0](x)
            x = torch.where(torch.arange(x.shape[1])[:, None] == 3, x * torch.inf, x)
            return self.model.head(self.model.blocks[1](x))

    model = Overflowing()
    with sp.watch(model, strict=True) as probe:
        loss_of(model, tokens())
        probe.step()
    (alert,) = [a for a in probe.alerts if a.rule == "nonfinite"]
    assert alert.layer == "model.blocks.1.attention"
    assert "from outside attention, between model.blocks.0" in alert.cause
    assert alert.severity is Severity.CRITICAL


@pytest.mark.parametrize("where", ["q", "k"])
def test_one_layer_far_larger_than_the_others_is_the_one_that_is_named(where: str) -> None:
    """A level belongs to a checkpoint's layer: nothing of another layer is told with it."""
    torch.manual_seed(0)
    model = Model(*(Attention("torch.softmax") for _ in range(3)))
    rows = {"q": slice(0, 8), "k": slice(WIDTH, WIDTH + 8)}
    with torch.no_grad():
        model.blocks[1].attention.qkv.weight[rows[where]] *= 3e4
    with sp.watch(model, strict=True) as probe:
        loss_of(model, tokens())
        probe.step()
    told = {(a.layer, a.heads) for a in probe.alerts}
    assert told == {("blocks.1.attention", (0,))}


def test_a_loop_of_the_user_s_that_counts_steps_itself() -> None:
    """Twelve forwards, three updates: three records, on the user's own numbers."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with sp.watch(model, strict=True) as probe:
        for update in (100, 200, 300):
            for _ in range(4):
                (loss_of(model, tokens()) / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
            probe.step(step=update)
    assert [r.step for r in probe._kept] == [100, 200, 300]
    assert sequences(probe) == [dict.fromkeys(LAYERS, 12)] * 3


@pytest.mark.parametrize("overflows", [False, True])
def test_a_scaler_that_searches_is_told_from_attention_that_breaks(overflows: bool) -> None:
    """An infinite gradient norm while the scale is searched is info, at most."""
    torch.manual_seed(0)
    model = Model(Attention("torch.softmax"), Attention())
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127 if overflows else 2.0**16)
    with sp.watch(model, strict=True) as probe:
        for _ in range(5):
            optimizer.zero_grad()
            loss = loss_of(model, tokens())
            scaler.scale(loss * 1e12 if overflows else loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            probe.step(loss=loss, grad_norm=norm, skipped=scaler.get_scale() < before)
    skipped = [r.scalars.skipped for r in probe._kept]
    assert skipped == [overflows] * 5
    assert {a.severity for a in probe.alerts} == ({Severity.INFO} if overflows else set())
    assert [len(s) for s in sequences(probe)] == [2] * 5
