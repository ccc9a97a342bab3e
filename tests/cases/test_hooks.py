"""What monitors built on hooks got wrong: numbers moved, memory kept, disks filled, runs killed."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from attending import random
from side_by_side import both, calls
from tiny_models import HEADS, VOCABULARY, WIDTH, Attention, Model, loss_of, tokens
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import stability_probe as sp

LAYERS = ["blocks.0.attention", "blocks.1.attention"]


def make(spelling: str = "torch.softmax") -> Model:
    return Model(Attention("sdpa", 0.1), Attention(spelling, 0.1))


# ------------------------------------------------------------------ numbers that a hook can move


class Padded(nn.Module):
    """Multi-head attention in which some samples are all padding, or queries see nothing."""

    def __init__(self, *, need_weights: bool, how: str, mode: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.options, self.how, self.mode = {"need_weights": need_weights}, how, mode

    def forward(self, batch: Tensor) -> Tensor:
        x, (b, t) = self.embedding(batch), batch.shape
        padding, mask = torch.zeros(b, t, dtype=torch.bool), torch.zeros(t, t, dtype=torch.bool)
        if self.how == "a sample":
            padding[1] = True
        elif self.how == "a query":
            mask[3] = True
        else:
            mask[:] = True
        if self.mode == "float":
            mask = torch.zeros(t, t).masked_fill(mask, -math.inf)
            padding = torch.zeros(b, t).masked_fill(padding, -math.inf)
        y, _ = self.attention(x, x, x, key_padding_mask=padding, attn_mask=mask, **self.options)
        return self.head(x + y)


@pytest.mark.parametrize("mode", ["bool", "float"])
@pytest.mark.parametrize("how", ["a sample", "a query", "every query"])
@pytest.mark.parametrize("need_weights", [True, False])
def test_rows_that_see_nothing_stay_what_they_are(need_weights: bool, how: str, mode: str) -> None:
    """With weights NaN in the output and in every gradient, without them 0 (pytorch#41508)."""

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch)[0, :3], batch[0, :3])  # of rows that are sound

    probe = both(lambda: Padded(need_weights=need_weights, how=how, mode=mode), step=step)
    assert calls(probe) == {"attention": 4}
    first = next(iter(probe._kept)).observations[0].values
    expected = {"a sample": 12, "a query": 3, "every query": 36}[how]
    assert first["masked_rows"].tolist() == [expected] * HEADS
    assert not first["nonfinite"].any()


@pytest.mark.parametrize("attached", ["before the first step", "after a step"])
@pytest.mark.parametrize("need_weights", [True, False])
def test_an_evaluation_with_padding_beyond_its_band_keeps_its_nan(
    need_weights: bool, attached: str
) -> None:
    """Any hook on the module would clean it up: another kernel (pytorch#190486)."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x, t = random(3, 12, WIDTH), 12
    band = torch.ones(t, t, dtype=torch.bool).triu(1) | torch.ones(t, t, dtype=torch.bool).tril(-3)
    padding = torch.zeros(3, t, dtype=torch.bool)
    padding[0, :6] = True

    def evaluate() -> Tensor:
        encoder.eval()
        with torch.no_grad():
            out = encoder(x, mask=band, src_key_padding_mask=padding)
        encoder.train()
        return out

    before = evaluate()
    with sp.watch(encoder, strict=True) as probe:
        if attached == "after a step":
            encoder(x).sum().backward()
            probe.step()
        during = evaluate()
    assert torch.equal(before.isnan(), during.isnan())
    assert torch.equal(before.nan_to_num(), during.nan_to_num())
    assert torch.equal(before.nan_to_num(), evaluate().nan_to_num())


@pytest.mark.parametrize("level", ["full", "default", "sentinel"])
def test_no_random_number_is_drawn(level: str) -> None:
    plan = {"full": sp.every(1, full_every=1), "default": sp.every(1), "sentinel": sp.every(1000)}
    model = make()
    with sp.watch(model, plan=plan[level], strict=True) as probe:
        for _ in range(3):
            loss = loss_of(model.eval(), tokens())
            before = torch.get_rng_state()
            loss = loss_of(model, torch.zeros(2, 5, dtype=torch.long))
            loss.backward()
            probe.step(loss=loss)
            assert torch.equal(before, torch.get_rng_state())


class Waits(TorchDispatchMode):
    """Counts operators that wait for a device when there is one."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = str(func)
        indexed = "aten.index.Tensor" in name and any(
            getattr(i, "dtype", None) is torch.bool for i in args[1]
        )
        if any(n in name for n in self.NAMES) or indexed:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("spelling", ["sdpa", "torch.softmax", "soft-cap"])
def test_nothing_in_a_watched_forward_waits_for_the_device(spelling: str, measured: bool) -> None:
    torch.manual_seed(0)
    model = Model(Attention(spelling), Attention(spelling))
    waits: list[list[str]] = []
    for watched in (False, True):
        plan = sp.every(1, full_every=1) if measured else sp.every(1000)
        probe = sp.watch(model, plan=plan, strict=True) if watched else None
        for _ in range(3):  # the first, of discovery, verifies and finds its way
            mode = Waits()
            with mode:
                loss_of(model, tokens()).backward()
            if probe is not None:
                probe.step()
        if probe is not None:
            probe.close()
        waits.append(mode.seen)
    assert waits[0] == waits[1]
