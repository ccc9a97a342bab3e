"""The probe around a loop: steps, phases, sentinel, alerts, sinks, files."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from tiny_models import Attention, Model, MultiHead, loss_of, tokens
from torch import Tensor, nn

import stability_probe as sp
from stability_probe.alerts.history import History
from stability_probe.alerts.rule import Verdict
from stability_probe.alerts.skipped_update import SkippedUpdate
from stability_probe.errors import BackendError
from stability_probe.records import Alert, Level, Origin, Severity, StepRecord
from stability_probe.runlog import read as log_reader
from stability_probe.sinks import Event


class Recorder:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = 0

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed += 1

    @property
    def records(self) -> list[StepRecord]:
        return [e for e in self.events if isinstance(e, StepRecord)]


def train_step(model: nn.Module, probe: sp.Probe, **numbers: object) -> None:
    loss = loss_of(model, tokens())
    loss.backward()
    probe.step(loss=loss, **numbers)  # type: ignore[arg-type]


def test_steps_count_from_one_and_may_be_given() -> None:
    sink = Recorder()
    model = Model(Attention())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    with sp.watch(model, sinks=[sink], optimizer=optimizer, strict=True) as probe:
        for numbers in (
            {},
            {"grad_norm": torch.tensor([2.0]), "eval_loss": 3.0},
            {"step": 10, "skipped": True},
            {},
        ):
            optimizer.step()
            train_step(model, probe, **numbers)
    scalars = [r.scalars for r in sink.records]
    assert [s.step for s in scalars] == [1, 2, 10, 11]
    assert [s.skipped for s in scalars] == [False, False, True, False]
    assert (scalars[1].grad_norm, scalars[1].eval_loss) == (2.0, 3.0)
    assert scalars[0].grad_norm is None
    assert {s.learning_rate for s in scalars} == {0.001}
    assert all(s.loss is not None and 3 < s.loss < 5 for s in scalars)
    assert sink.closed == 1


def test_micro_batches_pool_into_the_record_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    model = Model(Attention("sdpa"), Attention("torch.softmax"))
    batch = tokens(4)
    sink = Recorder()
    with sp.watch(model, sinks=[sink], plan=sp.every(1, full_every=1), strict=True) as probe:
        loss_of(model, batch).backward()
        probe.step()
        for micro in batch.split(1):
            loss_of(model, micro).backward()
        probe.step()
    whole, pooled = (r.observations for r in sink.records)
    for one, two in zip(whole, pooled, strict=True):
        assert one.sequences == two.sequences == 4
        assert set(one.values) == set(two.values)
        for name in one.values:
            np.testing.assert_allclose(
                one.values[name], two.values[name], rtol=2e-5, atol=1e-6, err_msg=name
            )


def test_levels_follow_the_plan_and_a_mark_makes_it_dense_again() -> None:
    sink = Recorder()
    model = Model(Attention())
    plan = sp.Plan(dense=3, every=5, full_every=100, escalation=0)
    with sp.watch(model, sinks=[sink], plan=plan, strict=True) as probe:
        for step in range(1, 21):
            if step == 12:
                probe.mark("longer context")
            train_step(model, probe)
    level = {r.step: r.level for r in sink.records}
    measured = [s for s, lvl in level.items() if lvl.whole]
    assert measured == [1, 2, 3, 5, 10, 12, 13, 14, 15, 20]
    assert [s for s, lvl in level.items() if lvl is Level.FULL] == [1, 12]
    assert [r.scalars.phase for r in sink.records] == [""] * 11 + ["longer context"] * 9
    assert all(r.measured == r.level.whole for r in sink.records)


@pytest.mark.parametrize(
    "plan", [sp.Plan(dense=0, full_every=10**6), sp.Plan(full_every=10**6)], ids=["sparse", "dense"]
)
def test_a_mark_amid_a_step_leaves_the_step_as_it_was_begun(plan: sp.Plan) -> None:
    """Micro-batches of two levels do not merge; the rest of the step is measured as its start."""
    sink, model = Recorder(), Model(Attention())
    with sp.watch(model, sinks=[sink], plan=plan, strict=True) as probe:
        for step in range(1, 5):
            loss_of(model, tokens())
            if step == 3:
                probe.mark("longer context")
                loss_of(model, tokens())
            probe.step()
    levels = [r.level for r in sink.records]
    assert levels == [Level.FULL, levels[1], levels[1], Level.FULL]
    assert [len(r.observations) for r in sink.records] == [1] * 4
    assert [o.rows for r in sink.records for o in r.observations] == [36, 36, 72, 36]


def test_a_first_mark_amid_a_step_leaves_a_resumed_run_its_dense_start() -> None:
    sink, model = Recorder(), Model(Attention())
    with sp.watch(model, sinks=[sink], plan=sp.Plan(dense=3), strict=True) as probe:
        for step in range(5001, 5007):
            loss_of(model, tokens())
            if step == 5001:
                probe.mark("longer context")
            probe.step(step=step)
    assert [r.step for r in sink.records if r.measured] == [5001, 5002, 5003]


def test_steps_may_count_from_zero(tmp_path: Path) -> None:
    sink, model = Recorder(), Model(Attention())
    with sp.watch(model, tmp_path, sinks=[sink], strict=True) as probe:
        for step in range(3):
            loss_of(model, tokens())
            probe.step(step=step)
    assert [r.step for r in sink.records] == [0, 1, 2]
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 1


class Raising(SkippedUpdate):
    """A rule that fails from step 12 on."""

    def evaluate(self, history: History, step: int) -> Verdict:
        if step >= 12:
            raise RuntimeError("a fault of the rule")
        return {}


def test_a_rule_that_raises_does_not_stop_the_plan() -> None:
    sink, model = Recorder(), Model(Attention())
    plan = sp.Plan(dense=0, escalation=0, full_every=10**6)
    with sp.watch(model, sinks=[sink], plan=plan, rules=[Raising()]) as probe:
        for _ in range(40):
            loss_of(model, tokens())
            probe.step()
    assert [r.step for r in sink.records if r.measured] == [1, 10, 20, 30, 40]


def test_every_step_has_its_loss_a_bracket_and_one_heads_maximum() -> None:
    sink, model = Recorder(), Model(Attention("sdpa"), Attention("torch.softmax"))
    plan = sp.Plan(dense=0, escalation=0)
    with sp.watch(model, sinks=[sink], plan=plan, strict=True) as probe:
        for _ in range(25):
            train_step(model, probe)
    assert [r.step for r in sink.records if r.measured] == [1, 10, 20]
    assert all(r.scalars.loss is not None for r in sink.records)
    for record in sink.records:
        for seen in record.observations:
            assert (seen.sequences, seen.rows, seen.ranks) == (3, 36, 1)
            low, high = (seen.values[f"max_logit_{end}"] for end in ("low", "high"))
            assert (low <= high).all()
            if record.measured:
                assert "entropy" in seen.values
                continue
            turn = seen.values["rotating_max_logit"]
            assert set(seen.values) == {"max_logit_low", "max_logit_high", "rotating_max_logit"}
            here = np.flatnonzero(~np.isnan(turn)).tolist()
            assert here == [record.step % len(turn)]
    frame = probe.frame()
    assert sorted(frame["step"].unique()) == list(range(1, 26))


def test_a_loop_that_counts_in_tens_is_measured_as_its_numbers_say() -> None:
    sink, model = Recorder(), Model(Attention())
    with sp.watch(model, sinks=[sink], plan=sp.every(40, full_every=10**6), strict=True) as probe:
        for step in range(10, 410, 10):
            loss_of(model, tokens())
            probe.step(step=step)
    # it takes three steps to see how the loop counts
    assert [r.step for r in sink.records if r.measured][1:] == list(range(40, 401, 40))


def test_one_sequence_a_step_is_a_class_of_its_own() -> None:
    sink, model = Recorder(), Model(Attention())
    with sp.watch(model, sinks=[sink], plan=sp.rotating(5), strict=True) as probe:
        for _ in range(12):
            train_step(model, probe)
    classes = {r.step: {(o.sequences, o.rows) for o in r.observations} for r in sink.records}
    assert {step for step, kinds in classes.items() if kinds == {(3, 36)}} == {1, 5, 10}
    assert all(kinds in ({(3, 36)}, {(1, 12)}) for kinds in classes.values())


def test_danger_is_measured_fully_from_the_next_step_on() -> None:
    sink, model = Recorder(), Model(Attention())
    plan, batch = sp.Plan(dense=0, every=5, full_every=10**6, escalation=4), tokens()
    with sp.watch(model, sinks=[sink], plan=plan, rules=[], strict=True) as probe:
        for step in range(1, 41):
            if step == 18:
                with torch.no_grad():
                    model.blocks[0].attention.qkv.weight.mul_(12.0)
            loss_of(model, batch)
            probe.step()
    full = [r.step for r in sink.records if r.level is Level.FULL]
    # the bracket of step 18 tells; the danger of the measured steps after it keeps it up
    assert full[:5] == [1, 19, 20, 21, 22]
    assert full[1:] == list(range(19, full[-1] + 1))
    assert full[-1] < 40


def test_the_backend_is_checked_at_once_and_a_forced_one_that_cannot_read_is_told() -> None:
    model = Model(Attention())
    with pytest.raises(BackendError, match="backend is 'cuda'; expected 'auto', 'torch' or 'tr"):
        sp.watch(model, backend="cuda")
    with sp.watch(model, backend="torch", strict=True) as probe:
        train_step(model, probe)
        assert probe.latest("entropy")
    with sp.watch(model, backend="triton") as probe:  # on a CPU
        train_step(model, probe)
    (alert,) = [a for a in probe.alerts if a.rule == "probe_fault"]
    assert "backend='triton' cannot read this call" in alert.message


def poison(model: nn.Module, where: str) -> None:
    with torch.no_grad():
        attention = model.blocks[1].attention
        rows = {"q": slice(0, 1), "k": slice(32, 33), "v": slice(64, 65)}[where]
        attention.qkv.weight[rows] = float("nan")


@pytest.mark.parametrize("spelling", ["sdpa", "torch.softmax"])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_no_event_is_missed_between_measured_steps(spelling: str, where: str) -> None:
    sink = Recorder()
    model = Model(Attention(spelling), Attention(spelling), Attention(spelling))
    with sp.watch(model, sinks=[sink], plan=sp.every(10), strict=True) as probe:
        for step in range(1, 25):
            if step == 13:
                healthy = {k: v.clone() for k, v in model.state_dict().items()}
                poison(model, where)
            if step == 14:
                model.load_state_dict(healthy)
            loss_of(model, tokens())
            probe.step()
        alerts = [a for a in probe.alerts if a.rule == "nonfinite"]
    bad = [b for r in sink.records for b in r.scalars.first_bad]
    assert {b.step for b in bad} == {13}
    assert min(bad, key=lambda b: b.layer_index).layer == "blocks.1.attention"
    assert where in {b.tensor for b in bad if b.layer == "blocks.1.attention"}
    firing = [a for a in alerts if a.state == "firing"]
    assert firing[0].step == 13
    assert firing[0].severity is Severity.CRITICAL
    assert firing[0].layer == "blocks.1.attention"


def test_the_flag_is_up_before_the_optimizer_steps() -> None:
    model = Model(Attention(), Attention())
    with sp.watch(model, plan=sp.every(10), strict=True) as probe:
        assert not bool(probe.nonfinite_flag())
        loss_of(model, tokens())
        assert not bool(probe.nonfinite_flag())
        probe.step()
        poison(model, "q")
        loss_of(model, tokens())
        assert bool(probe.nonfinite_flag())
        probe.step()
        assert not bool(probe.nonfinite_flag())


def test_a_fully_padded_sample_is_no_critical_event() -> None:
    """nn.MultiheadAttention with weights gives NaN for it by design; it is told, not cried."""

    class Padded(MultiHead):
        def forward(self, batch: Tensor) -> Tensor:
            x = self.embedding(batch)
            padding = torch.zeros(batch.shape, dtype=torch.bool)
            padding[0] = True
            y, _ = self.attention(x, x, x, key_padding_mask=padding, need_weights=True)
            return self.head(x + y)

    model = Padded(need_weights=True, dropout=0.0)
    with sp.watch(model, plan=sp.every(3), strict=True) as probe:
        for _ in range(6):
            loss = torch.nn.functional.cross_entropy(
                model(tokens())[1:].flatten(0, 1), tokens()[1:].flatten()
            )
            probe.step(loss=loss)
        assert not [a for a in probe.alerts if a.severity is Severity.CRITICAL]
        assert float(probe.latest("nonfinite")["attention"].sum()) == 0


def test_the_run_directory_and_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    torch.manual_seed(0)
    model = Model(Attention("sdpa"), Attention("torch.softmax"))
    with sp.watch(model, tmp_path / "run", strict=True) as probe:
        for _ in range(12):
            train_step(model, probe)
        frame = probe.frame()
    run = sp.load(tmp_path / "run")
    pd.testing.assert_frame_equal(run.frame(), frame)
    assert list(run.scalars.step) == list(range(1, 13))
    assert [layer.name for layer in run.header.layers] == [
        "blocks.0.attention",
        "blocks.1.attention",
    ]
    assert [layer.seam for layer in run.header.layers] == ["sdpa", "softmax"]
    assert len(frame) == 12 * 2 * 4
    assert frame.qk_abs_max_logit.notna().all()
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    tags = events.Tags()["scalars"]
    assert "stability/max_logit" in tags
    assert "stability.entropy/layer.0" in tags
    assert not run.warnings


def test_frames_in_memory_and_on_disk_are_the_same(tmp_path: Path) -> None:
    frames = []
    for logdir in (None, tmp_path):
        torch.manual_seed(0)
        model = Model(Attention(), Attention("torch.softmax"))
        with sp.watch(model, logdir, strict=True, plan=sp.every(2, full_every=4)) as probe:
            for _ in range(9):
                train_step(model, probe)
            frames.append(probe.frame())
    pd.testing.assert_frame_equal(*frames)


def test_a_frame_may_leave_out_the_steps_with_bounds_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, read = Model(Attention()), []
    with sp.watch(model, tmp_path, strict=True, plan=sp.every(4)) as probe:
        for _ in range(9):
            train_step(model, probe)
    run = sp.load(tmp_path)
    whole = run.frame()
    batch_of = log_reader._read_batch
    monkeypatch.setattr(log_reader, "_read_batch", lambda s: (read.append(s.step), batch_of(s))[1])
    frame = run.frame(bounds=False)
    assert read == [1, 4, 8]
    expected = whole[whole["step"].isin(read)].reset_index(drop=True)
    pd.testing.assert_frame_equal(
        frame, expected.drop(columns="rotating_max_logit"), check_like=True
    )
    read.clear()
    run.plot()
    assert read == [1, 4, 8]


def diverge(logdir: Path | None, **options: object) -> sp.Probe:
    """A run whose W_q and W_k are blown up until the scores explode and the loss rises."""
    torch.manual_seed(0)
    model = Model(Attention("torch.softmax"), Attention())
    with sp.watch(model, logdir, strict=True, **options) as probe:  # type: ignore[arg-type]
        for step in range(1, 160):
            if step > 60:
                with torch.no_grad():
                    for block in model.blocks:
                        block.attention.qkv.weight[:64] *= 1.05
            with torch.no_grad():
                loss_of(model.eval(), tokens())
            loss_of(model.train(), tokens())
            probe.step(loss=3.0 + max(0, step - 100) / 50)
    return probe


def test_replay_says_what_live_said(tmp_path: Path) -> None:
    probe = diverge(tmp_path / "run")
    live = [a for a in probe.alerts if a.origin is Origin.RULE]
    rules = {a.rule for a in live if a.state == "firing"}
    assert {"logit_growth", "attention_divergence", "entropy_collapse"} <= rules
    run = sp.load(tmp_path / "run")
    assert list(run.alerts) == list(probe.alerts)
    assert list(sp.replay(tmp_path / "run")) == list(probe.alerts)
    frame = run.frame().merge(run.scalars[["step", "loss"]], on="step")
    assert [a for a in sp.replay(frame) if a.origin is Origin.RULE] == live


def test_replay_is_a_function_whatever_was_imported_first() -> None:
    code = "import stability_probe.replaying, stability_probe as sp; assert callable(sp.replay)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_alerts_reach_the_callback_the_console_and_the_sinks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[Alert] = []
    sink = Recorder()
    with caplog.at_level(logging.INFO, "stability_probe"):
        probe = diverge(None, on_alert=told.append, sinks=[sink])
    assert told == list(probe.alerts) == [e for e in sink.events if isinstance(e, Alert)]
    assert "attention_divergence" in caplog.text
    assert "verified against" in caplog.text  # the coverage table
    after = [r.level for r in sink.records if r.step in {a.step + 1 for a in told}]
    assert Level.FULL in after  # an alert is followed by all the evidence


class Failing(Recorder):
    def emit(self, event: Event) -> None:
        raise OSError(28, "No space left on device")


def test_a_sink_that_fails_is_one_alert_and_hurts_nothing(tmp_path: Path) -> None:
    model = Model(Attention())
    good = Recorder()
    with sp.watch(model, sinks=[Failing(), good]) as probe:
        for _ in range(5):
            train_step(model, probe)
        (alert,) = probe.alerts
    assert alert.rule == "probe_fault"
    assert "Failing" in alert.message
    assert "No space left on device" in alert.message
    assert len(good.records) == 5


def test_a_callback_that_raises_is_told_and_not_called_again() -> None:
    calls = []

    def bad(alert: Alert) -> None:
        calls.append(alert)
        raise RuntimeError("my callback")

    model = Model(Attention())
    with sp.watch(model, sinks=[Failing()], on_alert=bad) as probe:
        for _ in range(3):
            train_step(model, probe)
    assert len(calls) == 1
    assert any("my callback" in a.message for a in probe.alerts)


def test_no_reference_to_the_users_tensors_outlives_the_step() -> None:
    kept: list[weakref.ref[Tensor]] = []

    class Remembering(Attention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = q @ k.mT
            weights = torch.softmax(scores, -1)
            kept.extend(weakref.ref(t) for t in (q, k, v, scores, weights))
            return weights @ v

    model = Model(Remembering(), Remembering())
    with sp.watch(model, strict=True) as probe:
        for _ in range(3):
            train_step(model, probe)
            gc.collect()
            assert not [ref for ref in kept if ref() is not None]


RUN_AND_TELL = """
import sys
sys.path.insert(0, {tests!r})
import torch
from tiny_models import Attention, Model, loss_of, tokens
import stability_probe as sp
torch.manual_seed(0)
torch.set_num_threads(1)
model = Model(Attention(), Attention("torch.softmax"))
probe = sp.watch(model, {logdir!r}, plan=sp.Plan(dense=5, every=3, full_every=7))
while True:
    loss = loss_of(model, tokens())
    loss.backward()
    probe.step(loss=loss)
    print(probe._step, float(loss), flush=True)
"""


def test_kill_9_loses_no_step_whose_call_had_returned(tmp_path: Path) -> None:
    chance = random.Random(0)
    for trial in range(3):
        logdir = tmp_path / str(trial)
        code = RUN_AND_TELL.format(tests=str(Path(__file__).parent), logdir=str(logdir))
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(6)]
        time.sleep(0.1 + chance.random() / 2)
        os.kill(child.pid, signal.SIGKILL)
        lines += child.stdout.readlines()
        child.wait()
        child.stdout.close()
        told = {int(s): float(loss) for s, loss in (x.split() for x in lines if x.endswith("\n"))}
        run = sp.load(logdir)
        scalars = run.scalars.set_index("step").loss
        measured = {s for s in told if s <= 5 or s % 3 == 0 or s % 7 == 0}
        assert len(told) > 5
        assert {s: scalars[s] for s in told} == told
        assert measured <= set(run.frame().step)
