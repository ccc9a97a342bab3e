from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from runlog_cases import HEADER, assert_same, record

from stability_probe.errors import RunNotFoundError
from stability_probe.records import Level, Observation, RunHeader, StepRecord, StepScalars
from stability_probe.runlog import RunWriter, load
from stability_probe.runlog.schema import FOLDER

F = np.float32


def write(path: Path, *records: StepRecord) -> Path:
    writer = RunWriter(path, RunHeader())
    for r in records:
        writer.emit(r)
    writer.close()
    return path


def test_a_run_is_found_by_its_directory_or_the_folder_in_it(tmp_path: Path) -> None:
    run = write(tmp_path / "exp", record(1))
    for given in (run, str(run), run / FOLDER, str(run / FOLDER)):
        opened = load(given)
        assert opened.path == run
        assert_same(list(opened.records()), [record(1)])
    copy = (run / FOLDER).rename(tmp_path / "copy")
    assert_same(list(load(copy).records()), [record(1)])
    assert load(copy).path == copy


def test_a_missing_run_is_an_error_that_names_the_runs_below(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError, match=r"is no directory.*No run lies below"):
        load(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunNotFoundError, match="is no directory"):
        load(tmp_path / "file")
    (tmp_path / "empty" / FOLDER).mkdir(parents=True)
    with pytest.raises(RunNotFoundError, match="holds no run"):
        load(tmp_path / "empty")
    write(tmp_path / "a" / "exp1")
    write(tmp_path / "exp2")
    with pytest.raises(RunNotFoundError) as caught:
        load(tmp_path)
    for told in (tmp_path / FOLDER, tmp_path / "a" / "exp1", tmp_path / "exp2"):
        assert str(told) in str(caught.value)
    assert str(tmp_path / "empty") not in str(caught.value)


def test_a_rank_that_wrote_nothing_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, record(1))
    with pytest.raises(RunNotFoundError, match=r"got rank 3 .* expected one of \[0\]"):
        load(tmp_path, rank=3)


def test_the_frame_is_long_sorted_and_has_what_was_ever_present(tmp_path: Path) -> None:
    b = Observation("b", 1, {"entropy": np.array([1, np.nan], F), "keys": np.array([5, 6], F)})
    a = Observation("a", 0, {"entropy": np.array([2], F), "mask_leak": np.array([np.nan], F)})
    hist = np.arange(16, dtype=F).reshape(1, 16)
    wide = Observation("a", 0, {"entropy_hist": hist, "scale": np.array([0.5], F)})
    none = Observation("c", 2, {})
    run = write(
        tmp_path,
        StepRecord(StepScalars(1), (b, a), Level.DEFAULT),
        StepRecord(StepScalars(2)),
        StepRecord(StepScalars(3), (wide, none), Level.FULL),
    )
    expected = pd.DataFrame(
        {
            "step": np.array([1, 1, 1, 3]),
            "layer": pd.Categorical(["a", "b", "b", "a"], categories=["a", "b", "c"]),
            "head": np.array([0, 0, 1, 0], np.int16),
            "entropy": np.array([2, 1, np.nan, np.nan], F),
            "scale": np.array([np.nan, np.nan, np.nan, 0.5], F),
            "keys": np.array([np.nan, 5, 6, np.nan], F),
        }
    )
    frame = load(run).frame()
    pd.testing.assert_frame_equal(frame, expected, check_categorical=False)
    assert list(frame["layer"].cat.categories) == ["a", "b", "c"]
    with_hist = load(run).frame(histograms=True)
    assert with_hist.drop(columns="entropy_hist").equals(frame)
    assert list(with_hist["entropy_hist"][:3]) == [None] * 3
    np.testing.assert_array_equal(with_hist["entropy_hist"][3], hist[0])


def test_layers_of_one_index_stay_apart_and_in_order(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = Observation("x", 0, {"entropy": rng.normal(size=50).astype(F)})
    y = Observation("y", 0, {"entropy": rng.normal(size=70).astype(F)})
    z = Observation("z", -1, {"entropy": rng.normal(size=40).astype(F)})
    frame = load(write(tmp_path, StepRecord(StepScalars(1), (y, x, x, z)))).frame()
    assert frame["layer"].tolist() == ["z"] * 40 + ["y"] * 70 + ["x"] * 100
    expected = np.concatenate([o.values["entropy"] for o in (z, y, x, x)])
    np.testing.assert_array_equal(frame["entropy"], expected)


def test_a_frame_without_measured_steps_is_empty(tmp_path: Path) -> None:
    frame = load(write(tmp_path, record(1, measured=False))).frame()
    assert list(frame.columns) == ["step", "layer", "head"]
    assert frame.empty


def test_scalars_have_one_row_a_step(tmp_path: Path) -> None:
    given = [
        StepScalars(1, loss=2.5, grad_norm=float("inf"), wall_time=1.5),
        StepScalars(2, eval_loss=1.0, learning_rate=1e-3, skipped=True, phase="b"),
        StepScalars(5, loss=float("nan"), phase="b"),
    ]
    scalars = load(write(tmp_path, *map(StepRecord, given))).scalars
    nan = np.nan
    expected = pd.DataFrame(
        {
            "step": [1, 2, 5],
            "loss": [2.5, nan, nan],
            "grad_norm": [np.inf, nan, nan],
            "eval_loss": [nan, 1.0, nan],
            "learning_rate": [nan, 1e-3, nan],
            "skipped": [False, True, False],
            "phase": pd.Series(["", "b", "b"], dtype=object),
            "wall_time": [1.5, 0.0, 0.0],
        }
    )
    pd.testing.assert_frame_equal(scalars, expected)


def test_plot_hands_the_run_to_the_overview(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass
    class Figure:
        saved: list[object]

        def savefig(self, path: object) -> None:
            self.saved.append(path)

    seen: list[object] = []

    def overview(run: object) -> Figure:
        seen.append(run)
        return Figure([])

    plots = types.ModuleType("stability_probe.views.plots")
    plots.overview = overview  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "stability_probe.views.plots", plots)
    run = load(write(tmp_path, record(1)))
    assert run.plot().saved == []  # type: ignore[attr-defined]
    assert run.plot("x.png").saved == ["x.png"]  # type: ignore[attr-defined]
    assert seen == [run, run]


def test_the_header_says_what_was_written(tmp_path: Path) -> None:
    RunWriter(tmp_path, HEADER).close()
    assert load(tmp_path).header == HEADER
