"""What TensorBoard reads back, against a recomputation that shares nothing with the sink."""

from __future__ import annotations

import math
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from stability_probe.errors import LogDirectoryError
from stability_probe.records import (
    Alert,
    FirstBad,
    LayerInfo,
    Observation,
    RunHeader,
    Severity,
    State,
    StepRecord,
    StepScalars,
)
from stability_probe.sinks import Event, Sink
from stability_probe.sinks.tensorboard import TensorBoardSink
from stability_probe.stats.catalogue import BETWEEN_SET, CATALOGUE, DEFAULT_SET

KEEP_ALL = {"scalars": 0, "tensors": 0}


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance=KEEP_ALL)
    return events.Reload()


def series(source: Path | EventAccumulator, tag: str) -> list[tuple[int, float]]:
    """(step, value) of a scalar, from a folder or from what was read before."""
    events = source if isinstance(source, EventAccumulator) else read(source)
    return [(e.step, e.value) for e in events.Scalars(tag)]


def texts(folder: Path, tag: str) -> list[tuple[int, str]]:
    events = read(folder).Tensors(tag)
    return [(e.step, e.tensor_proto.string_val[0].decode()) for e in events]


def observation(layer: int, **values: list[float]) -> Observation:
    arrays = {name: np.array(v, dtype=np.float32) for name, v in values.items()}
    return Observation(layer=f"blocks.{layer}.attn", layer_index=layer, values=arrays)


def record(step: int, *observations: Observation, **scalars: Any) -> StepRecord:
    return StepRecord(StepScalars(step=step, **scalars), observations)


def logits(step: int, value: float, layers: int = 1) -> StepRecord:
    return record(step, *(observation(i, qk_abs_max_logit=[value, 1.0]) for i in range(layers)))


def header(layers: int) -> RunHeader:
    infos = tuple(LayerInfo(f"blocks.{i}.attn", i, 2) for i in range(layers))
    return RunHeader(layers=infos)


def written(folder: Path, events: Iterable[Event], **options: Any) -> Path:
    sink = TensorBoardSink(folder, **options)
    for event in events:
        sink.emit(event)
    sink.close()
    return folder


def random_run(steps: int, layers: int = 3, heads: int = 4) -> list[StepRecord]:
    rng = np.random.default_rng(7)
    records = []
    for step in range(1, steps + 1):
        seen = []
        for i in range(layers):
            values = {name: rng.normal(size=heads).astype(np.float32) * 9 for name in DEFAULT_SET}
            values["entropy_ratio"][rng.integers(heads)] = np.nan
            values["nonfinite"] = (rng.random(heads) < 0.02).astype(np.float32)
            seen.append(Observation(f"blocks.{i}.attn", i, values))
        measured = tuple(seen) if step % 5 == 1 else ()
        scalars = StepScalars(step=step, loss=float(rng.random()), grad_norm=float(rng.random()))
        records.append(StepRecord(scalars, measured))
    return records


def windows(records: list[StepRecord], steps: Iterable[int]) -> list[list[StepRecord]]:
    """The records of each window, given the steps of the points that end them."""
    split, start = [], 0
    for step in steps:
        split.append([r for r in records if start < r.step <= step])
        start = step
    return split


def gather(window: list[StepRecord], statistic: str, layer: int | None = None) -> Any:
    return np.concatenate(
        [
            o.values[statistic].astype(np.float64)
            for r in window
            for o in r.observations
            if layer is None or o.layer_index == layer
        ]
    )


FOLDS = {"up": np.nanmax, "down": np.nanmin, "both": np.nanmin, "positive": np.nansum}


def test_it_is_a_sink(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    assert isinstance(sink, Sink)
    sink.close()
    sink.close()


def test_every_layer_tag_holds_the_window_extremum(tmp_path: Path) -> None:
    records = random_run(700)
    events = read(written(tmp_path, [header(3), *records]))
    checked = 0
    for statistic in (name for name in DEFAULT_SET if name not in BETWEEN_SET):
        danger = CATALOGUE[statistic].danger
        for layer in range(3):
            tag = f"stability.{statistic}/layer.{layer}"
            if not danger:
                assert tag not in events.Tags()["scalars"]
                continue
            points = series(events, tag)
            steps = [step for step, _ in points]
            expected = [FOLDS[danger](gather(w, statistic, layer)) for w in windows(records, steps)]
            np.testing.assert_allclose([v for _, v in points], expected, rtol=1e-6)
            assert len(points) < 140  # thinned: 140 steps are measured
            checked += 1
    assert checked == 33


def test_the_overview_is_the_worst_of_all_layers_and_loss_is_a_mean(tmp_path: Path) -> None:
    records = random_run(700)
    events = read(written(tmp_path, [header(3), *records]))
    steps = [step for step, _ in series(events, "stability/max_logit")]
    split = windows(records, steps)
    medians = [
        [np.nanmedian(gather([r], "entropy_ratio")) for r in w if r.observations] for w in split
    ]
    bad = [[(gather([r], "nonfinite") > 0).any() for r in w if r.observations] for w in split]
    expected = {
        "max_logit": [gather(w, "qk_abs_max_logit").max() for w in split],
        "logit_gap_max": [gather(w, "logit_gap").max() for w in split],
        "entropy_ratio_min": [np.nanmin(gather(w, "entropy_ratio")) for w in split],
        "entropy_ratio_median": [min(m) for m in medians],
        "softmax_slope_min": [gather(w, "softmax_slope").min() for w in split],
        "fp16_headroom_log2_min": [gather(w, "fp16_headroom_log2").min() for w in split],
        "nonfinite_steps_total": np.cumsum([sum(b) for b in bad]),
        "alerts_total": [0] * len(steps),
        "alert_level": [0] * len(steps),
        "loss": [np.mean([r.scalars.loss for r in w]) for w in split],
        "loss_max": [max(r.scalars.loss for r in w) for w in split],
        "grad_norm": [max(r.scalars.grad_norm for r in w) for w in split],
    }
    for name, values in expected.items():
        points = [v for s, v in series(events, f"stability/{name}") if s <= steps[-1]]
        np.testing.assert_allclose(points, values, rtol=1e-6, err_msg=name)
    overview = [t for t in events.Tags()["scalars"] if t.startswith("stability/")]
    assert sorted(overview) == sorted(f"stability/{name}" for name in expected)


def test_a_spike_of_one_step_is_in_the_chart_of_a_thinned_log(tmp_path: Path) -> None:
    spiked = 7_771
    records = (logits(s, 500.0 if s == spiked else 8.0) for s in range(1, 9_001))
    events = read(written(tmp_path, records))
    for tag in ("stability/max_logit", "stability.qk_abs_max_logit/layer.0"):
        points = series(events, tag)
        assert len(points) < 1000  # TensorBoard's own limit, beyond which it drops at random
        [step] = [step for step, value in points if value == 500.0]
        assert spiked <= step <= spiked * 1.01


def test_points_are_one_per_cent_of_the_run_apart(tmp_path: Path) -> None:
    written(tmp_path, (logits(s, 1.0) for s in range(10, 30_001, 10)))
    steps = np.array([step for step, _ in series(tmp_path, "stability/max_logit")])
    assert list(steps[:100]) == list(range(10, 1001, 10))
    gaps = np.diff(steps)
    assert (gaps <= np.maximum(steps[1:] // 100 + 10, 10)).all()
    assert len(steps) < 500


def test_a_slow_run_is_written_by_the_clock(tmp_path: Path) -> None:
    now = [0.0]
    sink = TensorBoardSink(tmp_path, max_lag_s=60.0, clock=lambda: now[0])
    for step in range(5_000, 5_040):
        now[0] += 10.0
        sink.emit(logits(step, 1.0))
    sink.close()
    steps = [step for step, _ in series(tmp_path, "stability/max_logit")]
    assert steps == [5_000, 5_006, 5_012, 5_018, 5_024, 5_030, 5_036, 5_039]


def test_a_run_without_measurements_still_shows_its_loss(tmp_path: Path) -> None:
    now = [0.0]
    sink = TensorBoardSink(tmp_path, max_lag_s=60.0, clock=lambda: now[0])
    for step in range(1, 11):
        now[0] += 20.0
        sink.emit(record(step, loss=float(step)))
    sink.close()
    assert series(tmp_path, "stability/loss") == [(3, 2.0), (6, 5.0), (9, 8.0), (10, 10.0)]


def test_the_last_window_is_written_on_close(tmp_path: Path) -> None:
    events = [logits(1000, 1.0), logits(1001, 90.0), logits(1002, 2.0)]
    written(tmp_path, events)
    assert series(tmp_path, "stability/max_logit") == [(1000, 1.0), (1002, 90.0)]


@pytest.mark.parametrize("layers", [1, 12, 16, 48, 96, 500])
def test_no_model_makes_more_than_200_tags(tmp_path: Path, layers: int) -> None:
    everything = [
        Observation(f"b.{i}", i, {name: np.ones(2, np.float32) for name in DEFAULT_SET})
        for i in range(layers)
    ]
    scalars = StepScalars(step=1, loss=1.0, grad_norm=1.0)
    alerts = [Alert(step=1, rule="r", severity=s) for s in Severity]
    written(tmp_path, [StepRecord(scalars, tuple(everything)), *alerts])
    tags = read(tmp_path).Tags()
    assert len(tags["scalars"]) + len(tags["tensors"]) <= 200
    assert len([t for t in tags["scalars"] if t.startswith("stability/")]) == 12
    assert f"stability.qk_abs_max_logit/layer.{layers - 1}" in tags["scalars"]


def test_the_overview_sees_a_layer_that_has_no_tag_of_its_own(tmp_path: Path) -> None:
    quiet = [observation(i, qk_abs_max_logit=[1.0]) for i in range(500)]
    hidden = next(
        i
        for i in range(500)
        if f"stability.qk_abs_max_logit/layer.{i}"
        not in read(written(tmp_path / "a", [record(1, *quiet)])).Tags()["scalars"]
    )
    quiet[hidden] = observation(hidden, qk_abs_max_logit=[77.0])
    written(tmp_path / "b", [record(1, *quiet)])
    assert series(tmp_path / "b", "stability/max_logit") == [(1, 77.0)]


def test_nan_and_infinity_are_never_written_as_numbers(tmp_path: Path) -> None:
    nan, inf = math.nan, math.inf
    events = [
        record(1, observation(0, qk_abs_max_logit=[nan, nan], entropy=[nan, 2.0]), loss=nan),
        record(2, observation(0, qk_abs_max_logit=[inf, 3.0], entropy=[nan, nan]), loss=1.0),
        record(3, observation(0), loss=-inf, grad_norm=inf),
    ]
    written(tmp_path, events)
    assert series(tmp_path, "stability/max_logit") == [(2, 3.0)]
    assert series(tmp_path, "stability.entropy/layer.0") == [(1, 2.0)]
    assert series(tmp_path, "stability/loss") == [(2, 1.0)]
    assert "stability/grad_norm" not in read(tmp_path).Tags()["scalars"]
    assert series(tmp_path, "stability/nonfinite_steps_total") == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_what_counts_as_a_nonfinite_step(tmp_path: Path) -> None:
    bad = FirstBad(layer="a", layer_index=0, tensor="q", step=2)
    events = [
        record(1, observation(0, nonfinite=[0.0, 0.0], nonfinite_masked_output=[5.0, 5.0])),
        record(2, observation(0, nonfinite_q=[0.0, 2.0])),
        record(3, observation(0), first_bad=(bad,)),
        record(4, observation(0), first_bad=(bad,)),  # told before
        record(5, observation(0), grad_norm=math.inf, skipped=True),  # a scaler's search
        record(6, observation(0), grad_norm=math.inf),
        record(7, observation(0), loss=math.nan, skipped=True),
    ]
    written(tmp_path, events, nonfinite_steps_total=10)
    values = [value for _, value in series(tmp_path, "stability/nonfinite_steps_total")]
    assert values == [10, 11, 12, 12, 12, 13, 14]


def test_the_largest_logit_is_the_first_present_of_each_layer(tmp_path: Path) -> None:
    seen = [
        observation(0, qk_abs_max_logit=[5.0], abs_max_logit=[900.0], max_logit=[900.0]),
        observation(1, abs_max_logit=[7.0], max_logit=[-1.0]),
        observation(2, qk_abs_max_logit=[math.nan], max_logit=[6.0]),
    ]
    written(tmp_path, [record(1, *seen)])
    assert series(tmp_path, "stability/max_logit") == [(1, 7.0)]


def test_alerts_count_up_and_the_level_follows_what_fires(tmp_path: Path) -> None:
    def alert(step: int, rule: str, severity: Severity, state: State = State.FIRING) -> Alert:
        return Alert(step=step, rule=rule, severity=severity, state=state, layer="a")

    events = [
        logits(1, 1.0),
        logits(2, 1.0),
        alert(2, "growth", Severity.WARNING),
        logits(3, 1.0),
        alert(3, "growth", Severity.CRITICAL),
        alert(3, "other", Severity.INFO),
        logits(4, 1.0),
        alert(4, "growth", Severity.CRITICAL, State.RESOLVED),
        logits(5, 1.0),
        alert(5, "other", Severity.INFO, State.RESOLVED),
        logits(6, 1.0),
    ]
    written(tmp_path, events, alerts_total=100)
    last = dict(series(tmp_path, "stability/alerts_total"))
    assert last == {1: 100, 2: 101, 3: 103, 4: 103, 5: 103, 6: 103}
    levels = dict(series(tmp_path, "stability/alert_level"))  # the newest of a step
    assert levels == {1: 0, 2: 2, 3: 3, 4: 1, 5: 0, 6: 0}


def test_an_alert_writes_what_is_pending_at_once(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.emit(logits(10_000, 1.0))
    sink.emit(logits(10_001, 60.0))  # not due for another hundred steps
    sink.emit(Alert(step=10_001, rule="r", severity=Severity.WARNING))
    assert series(tmp_path, "stability/max_logit") == [(10_000, 1.0), (10_001, 60.0)]
    assert [step for step, _ in texts(tmp_path, "alerts/warning")] == [10_001]
    sink.close()


def test_a_late_alert_never_goes_back_in_steps(tmp_path: Path) -> None:
    events = [logits(1, 1.0), logits(2, 1.0), Alert(step=1, rule="r", severity=Severity.INFO)]
    written(tmp_path, events)
    for tag in ("stability/alerts_total", "stability/alert_level"):
        steps = [step for step, _ in series(tmp_path, tag)]
        assert steps == sorted(steps)
    [(step, text)] = texts(tmp_path, "alerts/info")
    assert step == 2
    assert text.splitlines()[2].startswith("| 1 |")


def test_alerts_of_one_step_share_a_table(tmp_path: Path) -> None:
    events = [
        Alert(step=5, rule="one", severity=Severity.CRITICAL),
        Alert(step=5, rule="two", severity=Severity.CRITICAL),
        Alert(step=6, rule="three", severity=Severity.CRITICAL),
    ]
    written(tmp_path, events)
    tables = texts(tmp_path, "alerts/critical")
    rules = [[line.split("|")[3].strip() for line in t.splitlines()[2:]] for _, t in tables]
    assert [step for step, _ in tables] == [5, 5, 6]
    assert rules == [["one"], ["one", "two"], ["three"]]


def test_descriptions_come_from_the_catalogue(tmp_path: Path) -> None:
    written(tmp_path, [header(2), *(logits(s, 1.0, layers=2) for s in (1, 2))])
    metadata = read(tmp_path).SummaryMetadata("stability.qk_abs_max_logit/layer.1")
    assert CATALOGUE["qk_abs_max_logit"].meaning in metadata.summary_description
    assert "blocks.1.attn" in metadata.summary_description
    assert "largest over" in metadata.summary_description
    assert metadata.plugin_data.plugin_name == "scalars"
    overview = read(tmp_path).SummaryMetadata("stability/max_logit").summary_description
    assert CATALOGUE["qk_abs_max_logit"].meaning in overview


def resumed_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that reached step 80, and one that went on from step 51."""
    monkeypatch.setattr("time.time", lambda: 1_700_000_000.0)  # names the first file
    written(folder, [logits(s, float(s)) for s in range(1, 81)])
    monkeypatch.setattr("time.time", lambda: 1_700_000_100.0)
    written(folder, [logits(s, 1000.0 + s) for s in range(51, 71)], start_step=51)


def test_a_resumed_run_supersedes_its_later_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed_run(tmp_path, monkeypatch)
    steps, values = zip(*series(tmp_path, "stability/max_logit"), strict=True)
    assert steps == tuple(range(1, 71))
    assert values == (*range(1, 51), *range(1051, 1071))


def test_the_server_s_slow_loader_purges_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It takes a run's first START for its beginning: the first process must write one as well.
    resumed_run(tmp_path, monkeypatch)
    events = plugin_event_accumulator.EventAccumulator(str(tmp_path), {"tensors": 0}).Reload()
    steps = [e.step for e in events.Tensors("stability/max_logit")]
    assert steps == list(range(1, 71))


def test_a_folder_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(LogDirectoryError, match=r"cannot write TensorBoard files to .*another one"):
        TensorBoardSink(tmp_path / "file" / "run")


CHILD = """
    import sys, time
    import numpy as np
    from stability_probe.records import *
    from stability_probe.sinks.tensorboard import TensorBoardSink

    assert not {"torch", "tensorflow", "pandas"} & set(sys.modules)
    sink = TensorBoardSink(sys.argv[1])
    def point(step):
        values = {"qk_abs_max_logit": np.array([float(step)], np.float32)}
        return StepRecord(StepScalars(step=step), (Observation("a", 0, values),))
"""


def child(folder: Path, body: str, **options: Any) -> subprocess.CompletedProcess[str]:
    source = textwrap.dedent(CHILD) + textwrap.dedent(body)
    command = [sys.executable, "-c", source, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def test_a_killed_run_loses_no_alert_and_nothing_before_it(tmp_path: Path) -> None:
    body = """
        for step in range(1, 31):
            sink.emit(point(step))
        sink.emit(Alert(step=30, rule="r", severity=Severity.CRITICAL, message="gone"))
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert child(tmp_path, body).returncode == -signal.SIGKILL
    assert series(tmp_path, "stability/max_logit") == [(s, float(s)) for s in range(1, 31)]
    [(step, text)] = texts(tmp_path, "alerts/critical")
    assert step == 30
    assert "gone" in text


def test_a_full_disk_raises_in_emit_and_does_not_hang_close(tmp_path: Path) -> None:
    body = """
        import threading
        threading.excepthook = lambda args: None
        step = 0
        try:
            while step < 10_000:
                step += 1
                sink.emit(point(step))
            raise SystemExit("never failed")
        except OSError as error:
            print("emit raised", error.errno)
        try:
            sink.close()
        except OSError:
            print("close raised")
    """

    def small_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    done = child(tmp_path, body, preexec_fn=small_files)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("emit raised 27")  # EFBIG
    assert len(series(tmp_path, "stability/max_logit")) > 10
