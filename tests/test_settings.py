"""The ways people train: each is bit-identical to the unwatched run, and recorded as it is."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import Attention, Model, loss_of, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import stability_probe as sp
from stability_probe.plan import every
from stability_probe.records import Alert, Origin, Severity, StepRecord
from stability_probe.sinks.console import ConsoleSink
from stability_probe.transfer import HostCopy
from stability_probe.updates import Update, Updates

Optimizer = torch.optim.Optimizer
Step = Callable[[nn.Module, Optimizer, int], Tensor]


def run(
    step: Step,
    watched: bool,
    *,
    steps: int = 6,
    optimizer_of: Callable[[nn.Module], Optimizer] | None = None,
    **options: Any,
) -> tuple[list[Tensor], list[StepRecord], tuple[Alert, ...]]:
    """Losses, weights and random state of a short run, its records and its alerts."""
    torch.manual_seed(0)
    model = Model(Attention("sdpa", 0.1), Attention("torch.softmax", 0.1))
    make = optimizer_of or (lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2))
    optimizer = make(model)
    probe = None
    if watched:
        options = {"plan": every(2, full_every=4), "strict": True, "optimizer": optimizer} | options
        probe = sp.watch(model, **options)
    traces = []
    for number in range(1, steps + 1):
        traces.append(step(model, optimizer, number).detach())
        if probe is not None:
            probe.step(loss=traces[-1])
    traces += [p.detach().clone() for p in model.parameters()]
    traces.append(torch.get_rng_state())
    if probe is None:
        return traces, [], ()
    probe.close()
    return traces, list(probe._kept), probe.alerts


def compared(step: Step, **options: Any) -> tuple[list[StepRecord], tuple[Alert, ...]]:
    """The records and alerts of a watched run, which must be the unwatched run bit for bit."""
    bare, _, _ = run(step, False, **{k: v for k, v in options.items() if k in _OWN})
    watched, records, alerts = run(step, True, **options)
    assert len(bare) == len(watched)
    assert all(torch.equal(a, b) for a, b in zip(bare, watched, strict=True))
    assert [r.step for r in records] == list(range(1, len(records) + 1))
    return records, alerts


_OWN = ("steps", "optimizer_of")


def sequences(records: list[StepRecord]) -> set[int]:
    return {o.sequences for r in records for o in r.observations}


def update(model: nn.Module, optimizer: Optimizer, loss: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def test_gradient_accumulation() -> None:
    def step(model: nn.Module, optimizer: Optimizer, number: int) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for micro in tokens(8).split(2):
            loss = loss_of(model, micro) / 4
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    records, alerts = compared(step)
    assert len(records) == 6
    assert sequences(records) == {8}
    assert not alerts


def test_several_forwards_before_one_backward() -> None:
    """As in contrastive training: the same modules run twice, and one loss is made of both."""

    def step(model: nn.Module, optimizer: Optimizer, number: int) -> Tensor:
        one, two = model(tokens(3)), model(tokens(3))
        return update(model, optimizer, (one - two).square().mean())

    records, alerts = compared(step)
    assert sequences(records) == {6}
    assert [len(r.observations) for r in records] == [2] * 6
    assert [r.measured for r in records] == [True, True, False, True, False, True]
    assert not alerts


def test_an_evaluation_in_the_middle_is_not_recorded() -> None:
    def step(model: nn.Module, optimizer: Optimizer, number: int) -> Tensor:
        loss = update(model, optimizer, loss_of(model, tokens(3)))
        model.eval()
        with torch.no_grad():
            loss = loss + loss_of(model, tokens(5))
        with torch.inference_mode():
            model(tokens(5))
        model.train()
        return loss

    records, alerts = compared(step)
    assert sequences(records) == {3}
    assert not alerts


def test_an_evaluation_between_forward_and_backward() -> None:
    def step(model: nn.Module, optimizer: Optimizer, number: int) -> Tensor:
        loss = loss_of(model, tokens(3))
        model.eval()
        with torch.no_grad():
            model(tokens(5))
        model.train()
        return update(model, optimizer, loss)

    assert sequences(compared(step)[0]) == {3}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_generation_inside_training_is_dropped(mode: str, reentrant: bool | None) -> None:
    def generate(model: nn.Module) -> None:
        model.train(mode == "train")
        text = tokens(5, 1)
        with torch.no_grad():
            for _ in range(4):
                chosen = model(text)[:, -1].softmax(-1).multinomial(1)
                text = torch.cat([text, chosen], dim=1)
        model.train()

    def step(model: nn.Module, optimizer: Optimizer, number: int) -> Tensor:
        generate(model)
        if reentrant is None:
            return update(model, optimizer, loss_of(model, tokens(3)))
        batch = tokens(3)
        x = model.embedding(batch)
        x = checkpoint(model.blocks, x, use_reentrant=reentrant)
        loss = torch.nn.functional.cross_entropy(model.head(x).flatten(0, 1), batch.flatten())
        return update(model, optimizer, loss)

    records, alerts = compared(step)
    assert sequences(records) == {3}
    assert [len(r.observations) for r in records] == [2] * 6
    assert [r.measured for r in records] == [True, True, False, True, False, True]
    assert not [a for a in alerts if a.rule != "skipped_update"]


def test_a_model_left_in_eval_mode_after_an_evaluation() -> None:
    def step(model: nn.Module, optimizer: Optimizer, number: int) -> Tensor:
        if number == 2:
            model.eval()  # and nobody calls train() again
        return update(model, optimizer, loss_of(model, tokens(3)))

    records, alerts = compared(step, steps=8)
    (alert,) = alerts
    assert (alert.rule, alert.step, alert.origin) == ("blind", 4, Origin.OPERATIONAL)
    assert "eval mode" in alert.message
    assert "model.train()" in alert.remedies[0]
    assert sequences(records) == {3}
    assert not compared(step, steps=8, allow_eval=True)[1]


def test_fine_tuning_a_model_that_was_loaded_in_eval_mode() -> None:
    model = Model(Attention()).eval()
    with pytest.raises(sp.EvalModeError, match=r"model\.train\(\)"):
        sp.watch(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_gradient_accumulation(dtype: torch.dtype) -> None:
    def step(model: nn.Module, optimizer: Optimizer, number: int) -> Tensor:
        optimizer.zero_grad()
        for micro in tokens(4).split(2):
            with torch.autocast("cpu", dtype=dtype):
                loss = loss_of(model, micro) / 2
            loss.backward()
        optimizer.step()
        return loss

    records, alerts = compared(step)
    assert sequences(records) == {4}
    assert not alerts


def fused(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def foreach(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, fused=True)


@pytest.mark.parametrize("optimizer_of", [fused, foreach, sgd])
def test_fused_optimizers(optimizer_of: Callable[[nn.Module], Optimizer]) -> None:
    def step(model: nn.Module, optimizer: Optimizer, number: int) -> Tensor:
        return update(model, optimizer, loss_of(model, tokens(3)))

    records, alerts = compared(step, optimizer_of=optimizer_of)
    assert sequences(records) == {3}
    assert not any(r.scalars.skipped for r in records)
    assert not alerts


def scaled_step(overflows: set[int]) -> Step:
    """A step under a GradScaler; at some steps a gradient is infinite, and only there."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)

    def step(model: nn.Module, optimizer: Optimizer, number: int) -> Tensor:
        if number == 1:  # each run has its own
            scaler.load_state_dict(fresh)
        optimizer.zero_grad()
        loss = loss_of(model, tokens(3))
        handle = None
        if number in overflows:
            handle = model.head.weight.register_hook(lambda g: g * float("inf"))
        scaler.scale(loss).backward()
        if handle is not None:
            handle.remove()
        scaler.step(optimizer)
        scaler.update()
        return loss

    fresh = scaler.state_dict()
    return step


@pytest.mark.parametrize("optimizer_of", [None, fused, foreach])
def test_skipped_updates_of_a_grad_scaler_are_seen_and_counted(
    optimizer_of: Callable[[nn.Module], Optimizer] | None, caplog: pytest.LogCaptureFixture
) -> None:
    overflows = {1, 2, 5}
    with caplog.at_level(logging.INFO, "stability_probe"):
        records, alerts = compared(scaled_step(overflows), steps=9, optimizer_of=optimizer_of)
    assert {r.step for r in records if r.scalars.skipped} == overflows
    (alert,) = [a for a in alerts if a.state == "firing"]
    assert (alert.rule, alert.severity, alert.step) == ("skipped_update", Severity.INFO, 1)
    assert "1 of 1 update skipped so far" in alert.message
    assert "3 of 9 updates skipped" in caplog.text


@pytest.mark.parametrize("optimizer_of", [None, fused])
def test_an_overflow_in_attentions_backward_is_info_while_the_scaler_searches(
    optimizer_of: Callable[[nn.Module], Optimizer] | None, tmp_path: Path
) -> None:
    """The loss scale is too large for float16 gradients at first, as a real scaler's is."""

    def make() -> Step:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=1000)
        state = scaler.state_dict()

        def step(model: nn.Module, optimizer: Optimizer, number: int) -> Tensor:
            if number == 1:
                scaler.load_state_dict(state)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_of(model, tokens(3))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss

        return step

    _, alerts = compared(make(), steps=20, optimizer_of=optimizer_of)
    told = {(a.rule, a.severity) for a in alerts if a.state == "firing"}
    assert told == {("nonfinite", Severity.INFO), ("skipped_update", Severity.INFO)}
    (alert,) = [a for a in alerts if a.rule == "nonfinite" and a.state == "firing"]
    assert "GradScaler" in alert.message
    assert run(make(), True, steps=20, optimizer_of=optimizer_of, logdir=tmp_path)[2] == alerts
    assert tuple(sp.replay(tmp_path)) == alerts


def test_the_user_may_say_it_too_and_without_an_optimizer_nothing_is_guessed() -> None:
    model = Model(Attention())
    with sp.watch(model, strict=True) as probe:
        probe.step()
        probe.step(skipped=True)
        assert [r.scalars.skipped for r in probe._kept] == [False, True]


def test_an_update_the_loop_itself_left_out_is_seen() -> None:
    def step(model: nn.Module, optimizer: Optimizer, number: int) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, tokens(3))
        loss.backward()
        if number != 4:
            optimizer.step()
        return loss

    records, _ = compared(step)
    assert [r.step for r in records if r.scalars.skipped] == [4]


def test_the_rule_tells_once_a_row_and_ends(tmp_path: Path) -> None:
    def step(model: nn.Module, optimizer: Optimizer, number: int) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, tokens(1))
        loss.backward()
        if number not in (10, 11, 12, 90):
            optimizer.step()
        return loss

    _, _, alerts = run(step, True, steps=100, logdir=tmp_path)
    mine = [a for a in alerts if a.rule == "skipped_update"]
    assert [(a.step, a.state) for a in mine] == [(10, "firing"), (62, "resolved"), (90, "firing")]
    assert "1 of 10 updates" in mine[0].message
    assert "4 of 90 updates" in mine[2].message
    assert tuple(sp.replay(tmp_path)) == alerts


def test_a_closed_probe_and_copies_leave_the_optimizer_alone() -> None:
    model = Model(Attention())
    optimizer = fused(model)
    with sp.watch(model, optimizer=optimizer, strict=True) as probe:
        assert len(optimizer._optimizer_step_post_hooks) == 1
        twin = copy.deepcopy(optimizer)
        assert not twin._optimizer_step_post_hooks
        twin.step()
        probe.step()
        assert probe._kept[-1].scalars.skipped  # the twin's step is not the optimizer's
    assert not optimizer._optimizer_step_post_hooks


def test_the_optimizer_inside_a_wrapper_is_watched_and_other_objects_are_not() -> None:
    class Wrapper:
        def __init__(self, optimizer: Optimizer) -> None:
            self.optimizer = optimizer

    inner = torch.optim.SGD(Model(Attention()).parameters(), lr=0.1)
    updates = Updates(Wrapper(inner))
    inner.step()
    assert not updates.take().skipped
    assert updates.take().skipped
    updates.close()
    assert not inner._optimizer_step_post_hooks
    other = Updates(object())
    assert not other.take().skipped
    other.close()


def test_an_optimizer_that_takes_no_hook_is_one_alert() -> None:
    class Strange(Optimizer):
        def __init__(self) -> None:
            self.param_groups = [{"lr": 0.1}]

    model = Model(Attention())
    with sp.watch(model, optimizer=Strange()) as probe:
        for _ in range(3):
            loss_of(model, tokens()).backward()
            probe.step()
        assert not any(r.scalars.skipped for r in probe._kept)
    (alert,) = probe.alerts
    assert alert.rule == "probe_fault"
    assert "watching the optimizer" in alert.message


def test_one_real_update_between_two_steps_is_enough() -> None:
    yes, no = (HostCopy(torch.tensor([x])) for x in (1.0, 0.0))
    assert Update(known=True, found_inf=(yes, yes)).skipped
    assert not Update(known=True, found_inf=(yes, no)).skipped
    assert not Update(known=True, made=True, found_inf=(yes,)).skipped
    assert not Update(known=False).skipped


@pytest.mark.parametrize(("skipped", "level"), [(1, "INFO"), (4, "WARNING")])
def test_the_console_counts_skipped_updates_at_the_end(
    skipped: int, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    from stability_probe.records import StepScalars

    sink = ConsoleSink()
    with caplog.at_level(logging.INFO, "stability_probe"):
        for step in range(1, 41):
            sink.emit(StepRecord(StepScalars(step=step, skipped=step <= skipped)))
        sink.close()
    last = caplog.records[-1]
    assert (last.getMessage(), last.levelname) == (f"{skipped} of 40 updates skipped", level)


def test_an_overflow_in_the_layers_between_is_not_blamed_on_attention() -> None:
    """A float16 MLP that overflows, as T5's did: the next attention only received it."""
    torch.manual_seed(0)
    model = Model(Attention("torch.softmax"), Attention("torch.softmax")).half()
    with torch.no_grad():
        mlp = model.blocks[0].mlp
        for linear, value in ((mlp[0], 300.0), (mlp[2], 3e4)):
            linear.weight.copy_(linear.weight.sign() * value)
    with sp.watch(model, strict=True) as probe:
        loss_of(model, tokens()).backward()
        probe.step()
        alert = next(a for a in probe.alerts if a.rule == "nonfinite")
    assert alert.severity is Severity.CRITICAL
    assert alert.layer == "blocks.1.attention"
    assert "blocks.1.attention received non-finite inputs" in alert.message
    assert alert.cause == (
        "The first non-finite value came from outside attention, between blocks.0.attention and "
        "blocks.1.attention."
    )
