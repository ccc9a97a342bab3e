from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

import pyarrow as pa
import pytest
from runlog_cases import HEADER, assert_same, record

from stability_probe.errors import LogDirectoryError, ProbeClosedError
from stability_probe.records import Alert, RunHeader, Severity, StepRecord, StepScalars
from stability_probe.runlog import RunWriter, load
from stability_probe.runlog import append as append_module
from stability_probe.runlog import write as write_module
from stability_probe.runlog.schema import FOLDER, FileName, new_session


def other(step: int) -> StepRecord:
    """What a later process recorded for the step."""
    again = record(step + 1000)
    scalars = StepScalars(step, loss=float(step), phase="again")
    return StepRecord(scalars, again.observations, again.level)


def alert(step: int, rule: str = "r") -> Alert:
    return Alert(step=step, rule=rule, severity=Severity.INFO)


def write(path: Path, *events: StepRecord | Alert, rank: int = 0) -> None:
    writer = RunWriter(path, HEADER, rank=rank)
    for event in events:
        writer.emit(event)
    writer.close()


def alert_states(path: Path) -> list[tuple[int, str, bool]]:
    return [(a.step, a.rule, a.superseded) for a in load(path).alerts]


def test_a_resumed_run_supersedes_the_steps_from_its_start_on(tmp_path: Path) -> None:
    first = [record(step) for step in range(1, 9)]
    write(tmp_path, *first[:5], alert(5), *first[5:], alert(6), alert(7))
    write(tmp_path, alert(0, "start"), *(other(step) for step in range(6, 11)), alert(8, "new"))
    run = load(tmp_path)
    assert_same(list(run.records()), [*first[:5], *(other(step) for step in range(6, 11))])
    assert run.warnings == ()
    assert alert_states(tmp_path) == [
        (5, "r", False),
        (6, "r", True),
        (7, "r", True),
        (0, "start", False),  # an alert before the first step supersedes nothing
        (8, "new", False),
    ]
    assert run.scalars["phase"].tolist() == [""] * 5 + ["again"] * 5
    assert run.frame()["step"].unique().tolist() == list(range(1, 11))


def test_each_resume_counts_and_the_last_wins(tmp_path: Path) -> None:
    write(tmp_path, *(record(step) for step in range(1, 9)), alert(8))
    write(tmp_path, *(other(step) for step in range(3, 6)), alert(4))
    write(tmp_path, *(record(step) for step in range(5, 7)), alert(6))
    expected = [record(1), record(2), other(3), other(4), record(5), record(6)]
    assert_same(list(load(tmp_path).records()), expected)
    assert alert_states(tmp_path) == [(8, "r", True), (4, "r", False), (6, "r", False)]


def test_a_resume_that_wrote_no_step_supersedes_nothing(tmp_path: Path) -> None:
    write(tmp_path, record(1), record(2))
    write(tmp_path, alert(0))
    write(tmp_path)
    assert_same(list(load(tmp_path).records()), [record(1), record(2)])


def test_a_gap_after_a_resume_stays_a_gap(tmp_path: Path) -> None:
    write(tmp_path, record(1), record(2))
    write(tmp_path, record(5))
    assert_same(list(load(tmp_path).records()), [record(1), record(2), record(5)])


def test_a_run_that_goes_back_within_a_process_supersedes_itself(tmp_path: Path) -> None:
    first = [record(step) for step in range(1, 6)]
    write(tmp_path, *first, alert(5), other(3), alert(3, "new"), other(4))
    assert_same(list(load(tmp_path).records()), [*first[:2], other(3), other(4)])
    assert alert_states(tmp_path) == [(5, "r", True), (3, "new", False)]


def test_sessions_sort_by_creation_though_the_clock_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, record(1), record(2))
    past = time.time_ns() - 10**15
    monkeypatch.setattr(time, "time_ns", lambda: past)
    write(tmp_path, other(2))
    write(tmp_path, record(2), other(3))
    assert_same(list(load(tmp_path).records()), [record(1), record(2), other(3)])


def test_new_session_is_later_than_any_name() -> None:
    for latest in ("0" * 32, "18ecc2de86abb442000027e77c37954b", "f" * 15 + "0" * 17):
        name = FileName(3, latest, 1, "events", 7)
        assert new_session(["x", str(name)]) > latest
    assert len(new_session([str(FileName(0, "f" * 32, 0, "events", 0))])) == 32


def test_file_names_come_back() -> None:
    for name in (
        FileName(0, "a" * 32, 1, "events", 7),
        FileName(12, "0" * 32, 99999, "observations", -3),
    ):
        assert FileName.parse(str(name)) == name
    for text in ("events-r0-1-x-0.jsonl", f"events-r0-1-{'a' * 32}-0001.arrows", "run.json"):
        assert FileName.parse(text) is None


def test_each_rank_has_its_own_records(tmp_path: Path) -> None:
    write(tmp_path, other(1), alert(1, "one"), rank=1)
    write(tmp_path, record(1), alert(1, "zero"))
    run = load(tmp_path)
    assert (run.rank, run.ranks) == (0, (0, 1))
    assert_same(list(run.records()), [record(1)])
    assert [a.rule for a in run.alerts] == ["zero"]
    assert run.warnings == ("ranks [1] wrote records too: load(run, rank=1)",)
    assert_same(list(load(tmp_path, rank=1).records()), [other(1)])


def test_rank_zero_has_the_last_word_on_the_header(tmp_path: Path) -> None:
    RunWriter(tmp_path, RunHeader(plan="one"), rank=1).close()
    assert load(tmp_path).header.plan == "one"
    RunWriter(tmp_path, RunHeader(plan="zero")).close()
    RunWriter(tmp_path, RunHeader(plan="two"), rank=2).close()
    assert load(tmp_path).header.plan == "zero"


@pytest.mark.parametrize("below", ["file", "file/sub", "run/plugins/stability_probe/x"])
def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "run" / "plugins").mkdir(parents=True)
    (tmp_path / "run" / "plugins" / "stability_probe").write_text("x")
    with pytest.raises(LogDirectoryError, match="expected a directory that this process may"):
        RunWriter(tmp_path / below, HEADER)


def test_a_header_that_cannot_be_replaced_is_an_error(tmp_path: Path) -> None:
    (tmp_path / FOLDER / "run.json").mkdir(parents=True)
    with pytest.raises(LogDirectoryError, match=r"run\.json"):
        RunWriter(tmp_path, HEADER)
    assert [p.name for p in (tmp_path / FOLDER).iterdir()] == ["run.json"]


def test_writing_goes_on_after_the_directory_was_removed(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", HEADER)
    writer.emit(record(1))
    shutil.rmtree(tmp_path / "run")
    failures = 0
    for step in range(2, 8):
        try:
            writer.emit(record(step))
        except OSError:
            failures += 1
    assert failures == 1
    shutil.rmtree(tmp_path / "run")
    for step in (3, 4, 5, 6, 7):  # back, with nowhere to write
        writer.emit(record(step))
    writer.close()
    assert_same(list(load(tmp_path / "run").records()), [record(step) for step in range(3, 8)])
    assert load(tmp_path / "run").header == HEADER


def test_a_write_that_stops_halfway_loses_only_its_own_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kernel write may be short, or fail after some of its bytes; retries are right too."""
    rng = random.Random(5)
    write_all = os.write

    def short(descriptor: int, data: bytes) -> int:
        if rng.random() < 0.1:
            raise OSError(28, "No space left on device")
        return write_all(descriptor, data[: rng.randrange(len(data)) + 1])

    monkeypatch.setattr(os, "write", short)
    monkeypatch.setattr(os, "ftruncate", _fail)
    writer = RunWriter(tmp_path, HEADER)
    for step in range(1, 21):
        while True:
            try:
                writer.emit(record(step))
            except OSError:
                continue
            break
    monkeypatch.undo()
    writer.close()
    run = load(tmp_path)
    assert_same(list(run.records()), [record(step) for step in range(1, 21)])
    assert run.warnings  # of torn tails, which could not be cut off
    assert not [w for w in run.warnings if "lost" in w or "finished" in w]


def _fail(*_: object) -> None:
    raise OSError(5, "Input/output error")


def test_a_failed_write_leaves_no_torn_tail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RunWriter(tmp_path, HEADER)
    writer.emit(record(1))
    write_all = os.write
    calls = iter([1])

    def torn(descriptor: int, data: bytes) -> int:
        if next(calls, None) is None:
            raise OSError(5, "Input/output error")
        return write_all(descriptor, data[:10])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", torn)
        with pytest.raises(OSError, match="Input/output"):
            writer.emit(record(2))
    for path in (tmp_path / FOLDER).glob("*.arrows"):
        with pa.ipc.open_stream(path) as stream:
            assert set(stream.read_all()["step"].to_pylist()) == {1}
    writer.emit(record(3))
    writer.close()
    run = load(tmp_path)
    assert_same(list(run.records()), [record(1), record(3)])
    assert run.warnings == ()


def test_what_is_in_the_kernel_is_put_on_the_disk_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    now = [100.0]
    monkeypatch.setattr(append_module, "_sync", synced.append)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    writer = RunWriter(tmp_path, HEADER)
    for step in range(1, 62):
        writer.emit(record(step))
        now[0] += 1
    assert len(synced) == 2  # both files, once in 30 seconds
    writer.close()
    assert len(synced) == 4


def test_a_disk_that_does_not_sync_raises_and_a_new_file_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RunWriter(tmp_path, HEADER)
    monkeypatch.setattr(append_module, "_sync", _fail)
    monkeypatch.setattr(write_module, "SYNC_SECONDS", -1.0)
    with pytest.raises(OSError, match="Input/output"):
        writer.emit(record(1))
    monkeypatch.undo()
    writer.emit(record(2))
    writer.close()
    assert_same(list(load(tmp_path).records()), [record(1), record(2)])
    assert len(list((tmp_path / FOLDER).glob("*.arrows"))) == 2


def test_close_ends_it_and_leaves_no_descriptor(tmp_path: Path) -> None:
    before = len(list(Path("/dev/fd").iterdir()))
    writer = RunWriter(tmp_path, HEADER)
    writer.emit(record(1))
    writer.close()
    writer.close()
    assert len(list(Path("/dev/fd").iterdir())) == before
    with pytest.raises(ProbeClosedError, match="Open a new RunWriter"):
        writer.emit(record(2))
    assert_same(list(load(tmp_path).records()), [record(1)])


def test_nothing_but_the_header_is_made_before_the_first_event(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, HEADER)
    assert [p.name for p in writer.folder.iterdir()] == ["run.json"]
    writer.emit(record(7, measured=False))
    writer.emit(record(8))
    names = [path.name for path in writer.folder.iterdir()]
    starts = {n.kind: n.start for n in map(FileName.parse, names) if n}
    assert starts == {"events": 7, "observations": 8}
    writer.close()
