from __future__ import annotations

import json
import tempfile
from dataclasses import fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runlog_cases import (
    HEADER,
    WRITTEN,
    alerts,
    assert_same,
    record,
    runs,
    same_float,
    same_values,
    texts,
)

from stability_probe.errors import ShapeError
from stability_probe.records import (
    Alert,
    FirstBad,
    LayerInfo,
    Level,
    Observation,
    RunHeader,
    Severity,
    StepRecord,
    StepScalars,
)
from stability_probe.runlog import RunWriter, load
from stability_probe.runlog.lines import _ALERT, decode_line, encode_alert, encode_step
from stability_probe.runlog.schema import decode_header, encode_header
from stability_probe.runlog.write import MAX_STREAMS
from stability_probe.stats.catalogue import CATALOGUE


def write(path: Path, events: list[StepRecord | Alert], header: RunHeader = HEADER) -> RunWriter:
    writer = RunWriter(path, header)
    for event in events:
        writer.emit(event)
    writer.close()
    return writer


@settings(deadline=None, max_examples=50)
@given(runs())
def test_records_come_back_as_they_were_written(records: list[StepRecord]) -> None:
    with tempfile.TemporaryDirectory() as path:
        write(Path(path), list(records))
        run = load(path)
        assert_same(list(run.records()), records)
        assert run.warnings == ()


@settings(deadline=None, max_examples=100)
@given(alerts)
def test_alerts_come_back_as_they_were_written(alert: Alert) -> None:
    got = decode_line(encode_alert(alert).removesuffix(b"\n"))
    assert isinstance(got, Alert)
    for f in fields(Alert):
        a, b = getattr(got, f.name), getattr(alert, f.name)
        number = f.name in ("value", "limit")
        assert same_float(a, b) if number else (a == b and type(a) is type(b)), f.name


def test_every_field_of_an_alert_is_read() -> None:
    assert set(_ALERT) == {f.name for f in fields(Alert)}


@settings(deadline=None, max_examples=50)
@given(
    st.builds(
        RunHeader,
        schema_version=st.integers(0, 99),
        created=st.floats(allow_nan=False),
        layers=st.lists(
            st.builds(LayerInfo, texts, st.integers(0, 9), st.integers(0, 9), texts, texts)
        ).map(tuple),
        statistics=st.dictionaries(texts, st.dictionaries(texts, texts)),
        versions=st.dictionaries(texts, texts),
        plan=texts,
    )
)
def test_headers_come_back_as_they_were_written(header: RunHeader) -> None:
    assert decode_header(encode_header(header)) == header


def test_a_header_emitted_later_replaces_the_first(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, RunHeader())
    assert load(tmp_path).header == RunHeader()
    writer.emit(HEADER)
    assert load(tmp_path).header == HEADER
    assert [p.name for p in writer.folder.iterdir()] == ["run.json"]


def test_lines_are_standard_json() -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    scalars = StepScalars(7, loss=float("nan"), grad_norm=float("inf"), eval_loss=-float("inf"))
    line = json.loads(encode_step(StepRecord(scalars), None), parse_constant=refuse)
    assert (line["loss"], line["grad_norm"], line["eval_loss"]) == ("nan", "inf", "-inf")
    assert (line["kind"], line["step"], line["level"]) == ("step", 7, "sentinel")
    assert "learning_rate" not in line


def test_numpy_numbers_are_taken() -> None:
    scalars = StepScalars(np.int64(3), loss=np.float32(0.5))  # type: ignore[arg-type]
    bad = FirstBad("a", np.int32(1), "q", np.int64(3))  # type: ignore[arg-type]
    alert = Alert(
        step=np.int64(3),  # type: ignore[arg-type]
        rule="r",
        severity=Severity.INFO,
        heads=(np.int16(2),),  # type: ignore[arg-type]
        window=(np.int64(1), np.int64(3)),  # type: ignore[arg-type]
        value=np.float32(0.25),  # type: ignore[arg-type]
    )
    step = StepRecord(StepScalars(scalars.step, scalars.loss, first_bad=(bad,)))
    got = decode_line(encode_step(step, None).removesuffix(b"\n"))
    assert not isinstance(got, Alert)
    assert got.scalars == StepScalars(3, 0.5, first_bad=(FirstBad("a", 1, "q", 3),))
    assert decode_line(encode_alert(alert).removesuffix(b"\n")) == alert


def test_plain_arrow_reads_the_same_numbers(tmp_path: Path) -> None:
    records = [record(step) for step in range(1, 6)]
    folder = write(tmp_path, list(records)).folder
    (path,) = folder.glob("*.arrows")
    with pa.ipc.open_stream(path) as stream:
        table = stream.read_all()
    layers = json.loads(table.schema.metadata[b"stability_probe.layers"])["layers"]
    assert layers[table["layer"][0].as_py()] == [0, "blocks.0.attn"]
    assert table["step"].to_pylist() == [s for s in range(1, 6) for _ in range(6)]
    assert table["head"].to_pylist() == [0, 1, 2] * 10
    assert table["layer_index"].to_pylist() == [0, 0, 0, 1, 1, 1] * 5
    assert set(table["sequences"].to_pylist()) == {8}
    for name in WRITTEN:
        expected = np.concatenate([o.values[name] for r in records for o in r.observations])
        assert same_values(table[name].to_numpy(), expected)
    assert load(tmp_path).frame()["entropy"].equals(table["entropy"].to_pandas())


def test_nan_is_null_in_arrow_and_histograms_are_lists(tmp_path: Path) -> None:
    hist = np.arange(32, dtype=np.float32).reshape(2, 16)
    values = {"entropy": np.array([np.nan, 1], np.float32), "entropy_hist": hist}
    other = {"entropy": np.array([2], np.float32)}
    step = StepRecord(StepScalars(1), (Observation("a", 0, values), Observation("b", 1, other)))
    folder = write(tmp_path, [step]).folder
    (path,) = folder.glob("*.arrows")
    with pa.ipc.open_stream(path) as stream:
        table = stream.read_all()
    assert table["entropy"].to_pylist() == [None, 1.0, 2.0]
    assert table["entropy_hist"].to_pylist() == [*hist.tolist(), None]


def test_many_sets_of_statistics_share_few_files(tmp_path: Path) -> None:
    names = tuple(CATALOGUE)
    one = np.ones(2, np.float32)
    records = [
        StepRecord(StepScalars(i), (Observation("a", 0, dict.fromkeys(names[:i], one * i)),))
        for i in range(1, 8)
    ]
    own = StepRecord(StepScalars(9), (Observation("a", 0, {"my_own": one}),), Level.FULL)
    folder = write(tmp_path, [*records, own, *(record(s) for s in range(10, 30))]).folder
    got = list(load(tmp_path).records())
    assert_same(got[:8], [*records, own])
    # The wide one is begun anew for a statistic unknown to the catalogue, and for a new layer.
    assert len(list(folder.glob("*.arrows"))) == MAX_STREAMS + 3


def test_layers_that_come_and_go_do_not_multiply_files(tmp_path: Path) -> None:
    def with_layers(step: int, *layers: int) -> StepRecord:
        full = record(step, layers=4)
        return StepRecord(full.scalars, tuple(full.observations[i] for i in layers), full.level)

    records = [with_layers(1, 0, 1), with_layers(2, 1, 3)]
    records += [with_layers(s, s % 4, (s + 1) % 4) for s in range(3, 23) if s % 4 not in (1, 2)]
    folder = write(tmp_path, list(records), RunHeader()).folder
    assert_same(list(load(tmp_path).records()), records)
    assert len(list(folder.glob("*.arrows"))) == 2  # one more, at step 2


@pytest.mark.parametrize(
    ("values", "got"),
    [
        ({"entropy": np.ones(3), "softmax_slope": np.ones(2)}, "(2,) for softmax_slope of l.0"),
        ({"entropy": np.ones((3, 2))}, "(3, 2) for entropy of l.0, expected (3,)"),
        ({"entropy_hist": np.ones((3, 4))}, "(3, 4) for entropy_hist of l.0, expected (3, 16)"),
        ({"entropy": np.ones(3), "keys": np.ones((3, 2))}, "(3, 2) for keys of l.0, expected (3,)"),
    ],
)
def test_a_wrong_shape_is_refused_and_nothing_is_written(
    tmp_path: Path, values: dict[str, np.ndarray], got: str
) -> None:
    right = {name: np.ones(3, np.float32) for name in values if name != "entropy_hist"}
    wrong = {name: v.astype(np.float32) for name, v in values.items()}
    step = StepRecord(StepScalars(1), (Observation("l.0", 0, wrong), Observation("b", 1, right)))
    writer = RunWriter(tmp_path, HEADER)
    with pytest.raises(ShapeError) as caught:
        writer.emit(step)
    assert got in str(caught.value)
    writer.emit(record(2))
    writer.close()
    run = load(tmp_path)
    assert_same(list(run.records()), [record(2)])
    assert run.warnings == ()
