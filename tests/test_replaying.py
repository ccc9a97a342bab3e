from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from stability_probe.monitor import Monitor
from stability_probe.records import (
    Alert,
    Observation,
    Origin,
    RunHeader,
    Severity,
    State,
    StepRecord,
    StepScalars,
)
from stability_probe.replaying import FrameError, replay
from stability_probe.runlog.read import load
from stability_probe.runlog.write import RunWriter

STATISTICS = ("qk_abs_max_logit", "entropy_ratio", "nonfinite", "q_norm_max", "k_norm_max")


def live(records, rules=None):
    monitor = Monitor(rules)
    return tuple(alert for r in records for alert in monitor.observe(r))


def as_frame(records):
    """The long frame of a run; steps without attention get a row without layer and head."""
    rows = []
    for r in records:
        s = r.scalars
        scalars = {
            "step": s.step,
            "loss": s.loss,
            "grad_norm": s.grad_norm,
            "eval_loss": s.eval_loss,
            "skipped": s.skipped,
            "phase": s.phase,
        }
        if not r.observations:
            rows.append(scalars)
        for o in r.observations:
            for head in range(o.heads):
                values = {n: v[head] for n, v in o.values.items()}
                place = {"layer": o.layer, "layer_index": o.layer_index, "head": head}
                rows.append({**scalars, **place, **values, "sequences": o.sequences})
    frame = pd.DataFrame(rows)
    for name in ("loss", "grad_norm", "eval_loss"):
        frame[name] = pd.Series([row[name] for row in rows], dtype=object)
    return frame


def run_of(seed, every, hole, bad_step, bad_loss, phase_at):
    """A run with two layers of different widths, one running away, with faults on the way."""
    rng = np.random.default_rng(seed)
    records = []
    for step in range(1, 280):
        grown = 1.03 ** max(step - 120, 0)
        layers = []
        for index, heads in enumerate((2, 4)) if step % every == 0 else ():
            logits = 12.0 * np.exp(0.03 * rng.standard_normal(heads)) * (grown if index else 1)
            values = {
                "qk_abs_max_logit": logits,
                "entropy_ratio": 0.8 / np.sqrt(logits / 12.0),
                "nonfinite": np.full(heads, float(step == bad_step)),
                "q_norm_max": np.sqrt(logits),
                "k_norm_max": np.sqrt(logits),
            }
            if step in hole:
                values["qk_abs_max_logit"] = np.full(heads, np.nan)
            typed = {n: v.astype(np.float32) for n, v in values.items()}
            layers.append(Observation(f"layers.{index}", index, typed, sequences=8))
        scalars = StepScalars(
            step=step,
            loss=math.nan if step == bad_loss else 2.0 + 0.02 * max(step - 170, 0),
            grad_norm=math.inf if step == bad_loss + 3 else 1.0,
            eval_loss=2.0 if step % 7 == 0 else None,
            skipped=step == bad_loss + 3,
            phase="b" if step >= phase_at else "",
        )
        records.append(StepRecord(scalars, tuple(layers)))
    return records


class Recorded:
    def __init__(self, records, alerts=()):
        self._records, self.alerts = records, list(alerts)

    def records(self):
        return iter(self._records)


@settings(deadline=None, max_examples=6, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    seed=st.integers(0, 1000),
    every=st.sampled_from([1, 2, 10]),
    hole=st.frozensets(st.integers(1, 279), max_size=30),
    bad_step=st.integers(1, 279),
    bad_loss=st.integers(1, 270),
    phase_at=st.sampled_from([60, 150, 1000]),
)
def test_replay_of_records_or_frame_equals_live(**options):
    records = run_of(**options)
    expected = live(records)
    assert replay(Recorded(records)) == expected
    frame = as_frame(records)
    assert replay(frame) == expected
    assert replay(frame.sample(frac=1.0, random_state=0)) == expected


def test_a_run_that_diverges_is_told_in_replay():
    records = run_of(0, 1, frozenset(), -1, -1, 1000)
    assert {a.rule for a in replay(as_frame(records))} >= {"logit_growth", "entropy_collapse"}


def test_operational_and_superseded_alerts_are_copied_in_step_order():
    records = run_of(0, 1, frozenset(), -1, -1, 1000)
    judged = live(records)
    blind = Alert(step=3, rule="blind", severity=Severity.WARNING, origin=Origin.OPERATIONAL)
    old = Alert(step=150, rule="logit_growth", severity=Severity.WARNING, superseded=True)
    stale = Alert(step=151, rule="logit_growth", severity=Severity.CRITICAL)
    told = replay(Recorded(records, [old, stale, blind]))
    assert set(told) - set(judged) == {blind, old}
    assert [a.step for a in told] == sorted(a.step for a in told)
    assert tuple(a for a in told if a in judged) == judged


def written(directory, records):
    """A run directory, as the probe leaves it: each record, then the alerts it gave rise to."""
    monitor = Monitor()
    writer = RunWriter(directory, RunHeader(created=1.0))
    for r in records:
        writer.emit(r)
        for alert in monitor.observe(r):
            writer.emit(alert)
    writer.close()


def test_a_run_directory_replays_to_the_alerts_it_holds(tmp_path):
    records = run_of(3, 1, frozenset({40, 41}), 50, 60, 1000)
    written(tmp_path, records)
    assert replay(tmp_path) == replay(str(tmp_path)) == live(records) == load(tmp_path).alerts


def test_a_resumed_run_is_judged_by_the_steps_that_survived(tmp_path):
    records = run_of(3, 1, frozenset(), -1, -1, 1000)
    calm = [StepRecord(StepScalars(step=s, loss=2.0)) for s in range(150, 250)]
    written(tmp_path, records)
    written(tmp_path, calm)
    survived = live([r for r in records if r.step < 150] + calm)
    superseded = [a for a in load(tmp_path).alerts if a.superseded]
    assert superseded
    told = replay(tmp_path)
    assert [a for a in told if a.superseded] == superseded
    assert tuple(a for a in told if not a.superseded) == survived


def test_the_frame_of_a_run_replays_like_the_run(tmp_path):
    records = [r for r in run_of(3, 1, frozenset(), -1, -1, 1000) if r.observations]
    written(tmp_path, records)
    run = load(tmp_path)
    frame = run.frame().merge(run.scalars.drop(columns="wall_time"), on="step")
    assert replay(frame) == live(records) != ()


def test_rules_can_be_given():
    records = run_of(0, 1, frozenset(), 50, -1, 1000)
    assert replay(Recorded(records), rules=()) == ()


def plain(steps=200, layer="a", **columns):
    grown = 1.03 ** np.maximum(np.arange(1, steps + 1) - 100, 0)
    return pd.DataFrame(
        {
            "step": np.arange(1, steps + 1),
            "layer": layer,
            "head": 0,
            "abs_max_logit": 12.0 * grown,
            "loss": 2.0,
            **columns,
        }
    )


def test_layers_may_be_numbers():
    (alert,) = replay(plain(160, layer=7))
    assert (alert.layer, alert.layer_index, alert.statistic) == ("7", 7, "abs_max_logit")


def test_a_categorical_layer_column_says_the_order_of_the_layers():
    order = ["b", "a"]
    frame = plain(160).assign(layer=pd.Categorical(["a"] * 160, categories=order))
    (alert,) = replay(frame)
    assert (alert.layer, alert.layer_index) == ("a", 1)


def test_a_frame_without_loss_is_judged_without():
    alerts = replay(plain().drop(columns="loss"))
    assert {a.rule for a in alerts} == {"loss_missing", "logit_growth"}


def test_a_loss_on_some_rows_of_a_step_is_enough():
    frame = pd.concat([plain(), plain(head=1, loss=np.nan)])
    assert [a.rule for a in replay(frame)] == ["logit_growth"]


def test_a_missing_head_is_absent_and_the_others_keep_their_number():
    frame = plain(160, head=2)
    (alert,) = replay(frame)
    assert alert.heads == (2,)


def test_nan_in_a_float_column_is_not_given_and_in_an_object_column_is_real():
    loss = [2.0] * 9 + [math.nan]
    frame = plain(10)
    assert replay(frame.assign(loss=loss)) == ()
    told = replay(frame.assign(loss=pd.Series(loss, dtype=object)))
    assert [(a.step, a.rule) for a in told] == [(10, "nonfinite_loss")]
    assert replay(frame.assign(loss=pd.array([2.0] * 9 + [None], dtype="Float64"))) == ()
    assert [a.step for a in replay(frame.assign(loss=[2.0] * 9 + [math.inf]))] == [10]


def test_an_empty_frame_gives_no_alerts():
    assert replay(plain(0)) == ()


def test_episodes_resolve_in_replay():
    frame = plain(400, abs_max_logit=[12.0] * 150 + [60.0] * 30 + [12.0] * 220)
    assert [a.state for a in replay(frame)] == [State.FIRING, State.RESOLVED]


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (lambda f: f.drop(columns="head"), ["lacks head", "abs_max_logit", "step, layer, head"]),
        (
            lambda f: f.rename(columns={"abs_max_logit": "logit"}),
            ["no statistic", "qk_abs_max_logit"],
        ),
        (lambda f: pd.concat([f, f[f.step == 7]]), ["Step 7", "'a'", "head 0", "drop_duplicates"]),
        (lambda f: f.assign(abs_max_logit="big"), ["'abs_max_logit'", "numbers", "to_numeric"]),
        (lambda f: f.assign(step=f.step + 0.5), ["'step'", "1.5", "row 0", "whole numbers"]),
        (lambda f: f.assign(step=[math.nan, *f.step[1:]]), ["'step'", "nan"]),
        (lambda f: f.assign(step=f.step - 5), ["'step'", "-4"]),
        (lambda f: f.assign(head="first"), ["'head'", "to_numeric"]),
        (lambda f: f.assign(head=-1), ["'head'", "-1"]),
        (lambda f: f.assign(loss="low"), ["'loss'", "numbers"]),
        (lambda f: f.assign(layer=0.5), ["'layer'", "0.5", "whole numbers"]),
        (lambda f: f.assign(layer=[None, *f.layer[1:]]), ["head but no layer"]),
        (
            lambda f: pd.concat([f, f.assign(head=1, loss=3.0)]),
            ["Step 1", "more than one loss", "2.0", "3.0"],
        ),
        (
            lambda f: f.assign(abs_max_logit=pd.Timestamp("2024-01-01")),
            ["'abs_max_logit'", "datetime"],
        ),
    ],
)
def test_bad_frames_say_what_is_wrong_and_what_to_do(broken, words):
    with pytest.raises(FrameError) as caught:
        replay(broken(plain(20)))
    for word in words:
        assert word in str(caught.value)


def test_another_source_is_refused():
    with pytest.raises(TypeError, match=r"got a list.*run directory.*DataFrame"):
        replay([1, 2, 3])
