"""When a run is warned of, and when it is not: trends by head, lengths, hard events, summaries."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from attending import Attention
from tiny_models import WIDTH, Model, loss_of, tokens
from tiny_models import Attention as Layer
from torch import Tensor

import stability_probe as sp
from stability_probe.records import Severity, State

HEADS, D = 4, 8


def attend(q: Tensor, k: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, k)


@pytest.mark.slow
@pytest.mark.parametrize(("head", "rate"), [(0, 1.02), (2, 1.05)])
def test_one_head_that_runs_away_is_named(head: int, rate: float) -> None:
    """Muon: few heads explode while the rest sit still; a mean over heads would hide them."""
    g = torch.Generator().manual_seed(0)
    model, gain = Attention(attend, HEADS), torch.ones(1, HEADS, 1, 1)
    with sp.watch(model, strict=True) as probe:
        for step in range(300):
            if step > 80:
                gain[0, head] *= rate
            q = torch.randn(2, HEADS, 12, D, generator=g) * gain
            model(q.requires_grad_(), torch.randn(2, HEADS, 12, D, generator=g))
            probe.step(loss=2.0)
    (first, *_) = [a for a in probe.alerts if a.rule == "logit_growth"]
    assert first.heads == (head,)
    assert first.severity is not Severity.CRITICAL  # the loss is not hurt


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lengths", "sequences"),
    [((16, 128), (4, 4)), ((64, 8), (4, 4)), ((8, 24, 72), (2, 2, 2)), ((12, 12, 12), (1, 16, 4))],
)
def test_a_jump_of_the_length_or_the_batch_is_no_alarm(
    lengths: tuple[int, ...], sequences: tuple[int, ...]
) -> None:
    """The maximum of more numbers is larger: a curriculum is not an instability."""
    g = torch.Generator().manual_seed(0)
    model = Attention(attend, HEADS)
    with sp.watch(model, strict=True) as probe:
        for length, batch in zip(lengths, sequences, strict=False):
            for _ in range(90):
                q = torch.randn(batch, HEADS, length, D, generator=g).requires_grad_()
                model(q, torch.randn(batch, HEADS, length, D, generator=g))
                probe.step(loss=2.0)
    assert not probe.alerts, [a.message for a in probe.alerts]


@pytest.mark.parametrize("factor", [1e4, 1e20, 1e38])
def test_the_second_step_is_not_too_early(factor: float) -> None:
    """Step 1 is healthy, the update ruins it: no warm-up may hide what is not finite."""
    torch.manual_seed(0)
    model = Model(Layer("torch.softmax"), Layer("torch.softmax"))
    with sp.watch(model, strict=True) as probe:
        loss_of(model, tokens()).backward()
        probe.step()
        with torch.no_grad():
            model.blocks[1].attention.qkv.weight[: 2 * WIDTH] *= factor
        loss_of(model, tokens())
        probe.step()
    bad = [a for a in probe.alerts if a.rule == "nonfinite"]
    assert [(a.step, a.layer) for a in bad] == (
        [(2, "blocks.1.attention")] if factor > 1e19 else []
    )
    if factor == 1e4:  # of a product that is beyond float32 there is no size to tell
        assert any(a.rule == "fp16_overflow" and a.step == 2 for a in probe.alerts)


def test_the_summary_counts_the_steps_that_were_not_finite(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Ten NaN steps of fifty: the end of the run says how many, and from where on."""
    torch.manual_seed(0)
    model = Model(Layer("torch.softmax"))
    with caplog.at_level(logging.INFO, "stability_probe"), sp.watch(model) as probe:
        for step in range(1, 51):
            loss = loss_of(model, tokens())
            bad = step > 30 and step % 2 == 1
            probe.step(loss=loss * float("nan") if bad else loss, skipped=bad)
    firing = [a for a in probe.alerts if a.state is State.FIRING]
    assert {a.rule for a in firing} == {"nonfinite_loss", "skipped_update"}
    assert firing[0].step == 31
    summary = caplog.records[-1].getMessage()
    assert "first at step 31" in summary
    assert "10 of 50" in summary


@pytest.mark.slow
def test_heads_that_are_one_hot_and_learn_are_no_collapse() -> None:
    """Previous-token and sink heads of healthy models have entropy 0 and stay so."""
    g = torch.Generator().manual_seed(0)
    model = Attention(attend, HEADS)
    eye = torch.eye(12, D) * 30
    with sp.watch(model, strict=True) as probe:
        for step in range(150):
            share = min(1.0, step / 60)  # they become so while the loss falls
            q = torch.randn(2, HEADS, 12, D, generator=g)
            q[:, :2] = q[:, :2] * (1 - share) + share * eye
            k = torch.randn(2, HEADS, 12, D, generator=g) * 0.2
            k[:, :2] = eye[:, :]
            model(q.requires_grad_(), k)
            probe.step(loss=4.0 * 0.97**step)
    worst = {a.severity for a in probe.alerts}
    assert worst <= {Severity.INFO, Severity.WARNING}
    assert not [a for a in probe.alerts if a.severity is Severity.CRITICAL]
