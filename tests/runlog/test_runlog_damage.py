from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from runlog_cases import HEADER, assert_same, record, same_observation, same_scalars

from stability_probe.records import Alert, RunHeader, Severity, StepRecord
from stability_probe.runlog import RunWriter, load
from stability_probe.runlog import salvage as salvage_module
from stability_probe.runlog.schema import FOLDER, FileName, encode_header

MEASURED = (1, 2, 3, 5, 6)
RECORDS = [record(step, layers=1, measured=step in MEASURED) for step in range(1, 7)]
WARNING = Alert(step=3, rule="r", severity=Severity.WARNING, message="m")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    writer = RunWriter(tmp_path / "run", HEADER)
    for written in RECORDS:
        writer.emit(written)
    writer.emit(WARNING)
    writer.close()
    return tmp_path / "run"


def files(run: Path) -> tuple[Path, Path]:
    (events,) = (run / FOLDER).glob("*.jsonl")
    (observations,) = (run / FOLDER).glob("*.arrows")
    return events, observations


def places(events: Path) -> dict[int, tuple[int, int]]:
    """step -> where its record batch begins and ends."""
    lines = [json.loads(line) for line in events.read_bytes().splitlines()]
    found = {line["step"]: line["batch"] for line in lines if "batch" in line}
    return {step: (b["offset"], b["offset"] + b["size"]) for step, b in found.items()}


def check_nothing_invented(run: Path, *, intact: set[int]) -> list[StepRecord]:
    """Whatever is read was written; the steps `intact` are wholly there; the rest is warned of."""
    opened = load(run)
    got = list(opened.records())
    for r in got:
        original = RECORDS[r.step - 1]
        bare = type(r.scalars)(r.step)
        assert same_scalars(r.scalars, original.scalars) or r.scalars == bare
        assert not r.observations or len(r.observations) == len(original.observations)
        assert all(map(same_observation, r.observations, original.observations))
    assert_same([r for r in got if r.step in intact], [RECORDS[s - 1] for s in sorted(intact)])
    assert opened.alerts in ((), (WARNING,))
    if any(map(_is_less, got)):
        assert opened.warnings
    return got


def _is_less(r: StepRecord) -> bool:
    original = RECORDS[r.step - 1]
    return not same_scalars(r.scalars, original.scalars) or (
        len(r.observations) < len(original.observations)
    )


def cuts(size: int, end: int) -> Iterator[int]:
    """Every byte down to `end`, then some."""
    return chain(range(size - 1, end, -1), range(end, -1, -37))


def test_events_cut_at_any_byte_lose_only_what_is_cut(run: Path) -> None:
    events, _ = files(run)
    whole = events.read_bytes()
    ends = np.cumsum([len(line) for line in whole.splitlines(keepends=True)])
    for cut in cuts(len(whole), len(whole) - 600):
        events.write_bytes(whole[:cut])
        steps = {step for step in range(1, 7) if ends[step - 1] - 1 <= cut}
        got = check_nothing_invented(run, intact=steps)
        # Those that lost their line still have observations, but for the one that ends the file.
        lost = {step for step in MEASURED if step not in steps and step != 6}
        assert {r.step for r in got} >= steps | lost


def test_observations_cut_at_any_byte_lose_only_what_is_cut(run: Path) -> None:
    events, observations = files(run)
    whole, where = observations.read_bytes(), places(events)
    for cut in cuts(len(whole), where[6][0] - 9):
        observations.write_bytes(whole[:cut])
        steps = {step for step in range(1, 7) if step not in where or where[step][1] <= cut}
        got = check_nothing_invented(run, intact=steps)
        assert [r.step for r in got] == [1, 2, 3, 4, 5, 6]


def test_flipped_bits_lose_at_most_the_step_they_hit(run: Path) -> None:
    events, observations = files(run)
    lines = events.read_bytes().splitlines(keepends=True)
    starts = np.cumsum([0, *map(len, lines)])
    where = places(events)
    rng = random.Random(3)
    for path in [events] * 150 + [observations] * 150:
        whole = path.read_bytes()
        at = rng.randrange(len(whole))
        flipped = bytearray(whole)
        flipped[at] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        if path == events:
            # A line's end may turn into something else, which glues it to the next one.
            hit = {int(np.searchsorted(starts, at, "right")), *_glued(starts, at)}
        elif at < where[1][0]:
            hit = set(MEASURED)
        else:
            hit = {step for step, (start, stop) in where.items() if start <= at < stop}
        check_nothing_invented(run, intact=set(range(1, 7)) - hit)
        path.write_bytes(whole)


def _glued(starts: np.ndarray, at: int) -> set[int]:
    return {int(np.searchsorted(starts, at + 1, "right"))} if at + 1 in starts else set()


def test_many_flipped_bits_and_foreign_bytes_never_raise(run: Path) -> None:
    rng = random.Random(4)
    everything = [*files(run), run / FOLDER / "run.json"]
    for _ in range(60):
        wholes = {path: path.read_bytes() for path in everything}
        for path, whole in wholes.items():
            flipped = bytearray(whole)
            for _ in range(rng.randrange(12)):
                flipped[rng.randrange(len(flipped))] = rng.randrange(256)
            start = rng.randrange(len(flipped))
            del flipped[start : start + rng.choice([0, 0, 1, 50])]
            path.write_bytes(flipped)
        opened = load(run)
        with_line = [r for r in opened.records() if r.scalars.loss is not None]
        for r in with_line:  # a step that has lost its line has lost its checksum too
            assert same_scalars(r.scalars, RECORDS[r.step - 1].scalars)
            assert all(map(same_observation, r.observations, RECORDS[r.step - 1].observations))
        opened.frame()
        for path, whole in wholes.items():
            path.write_bytes(whole)
    for path in everything:
        path.write_bytes(rng.randbytes(5000))
    assert list(load(run).records()) == []
    assert len(load(run).warnings) == 3


def test_without_events_the_observations_are_still_read(run: Path) -> None:
    events, _ = files(run)
    events.unlink()
    opened = load(run)
    got = list(opened.records())
    assert [r.step for r in got] == [1, 2, 3, 5, 6]
    for r in got:
        assert all(map(same_observation, r.observations, RECORDS[r.step - 1].observations))
        assert r.level is RECORDS[r.step - 1].level
    assert opened.warnings == ("5 steps have lost their line (scalars, checksum), the first is 1",)


def test_without_observations_the_scalars_are_still_read(run: Path) -> None:
    _, observations = files(run)
    observations.unlink()
    opened = load(run)
    got = list(opened.records())
    assert [r.scalars for r in got] == [r.scalars for r in RECORDS]
    assert "5 measured steps" in opened.warnings[0]
    assert opened.frame().empty


def test_observations_that_vanish_after_load_are_a_warning(run: Path) -> None:
    opened = load(run)
    files(run)[1].unlink()
    assert [r.scalars for r in opened.records()] == [r.scalars for r in RECORDS]
    assert [w.split(":")[0] for w in opened.warnings] == [f"step {s}" for s in MEASURED]
    assert opened.frame().empty
    assert len(opened.warnings) == 5


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b'{"layers": 3}', b"\xff\xfe", b"[" * 100_000]
)
def test_a_broken_header_is_replaced_by_the_streams_own(run: Path, damage: bytes) -> None:
    (run / FOLDER / "run.json").write_bytes(damage)
    opened = load(run)
    assert opened.header == HEADER
    assert_same(list(opened.records()), RECORDS)
    assert [w.split(":")[0] for w in opened.warnings] == ["run.json"]


def test_a_lost_header_is_replaced_by_the_streams_own(run: Path) -> None:
    (run / FOLDER / "run.json").unlink()
    assert load(run).header == HEADER


def test_a_newer_version_is_read_as_far_as_it_is_understood(run: Path) -> None:
    newer = json.loads(encode_header(HEADER)) | {"schema_version": 99, "colour": "blue"}
    (run / FOLDER / "run.json").write_text(json.dumps(newer))
    events, _ = files(run)
    body = b'{"kind":"weather","rain":true'
    with events.open("ab") as file:
        file.write(body + b',"crc":%d}\n' % zlib.crc32(body))
    opened = load(run)
    assert opened.header.schema_version == 99
    assert opened.header.layers == HEADER.layers
    assert_same(list(opened.records()), RECORDS)
    assert "version 99" in "".join(opened.warnings)
    assert "'weather'" in "".join(opened.warnings)
    assert len(opened.warnings) == 2


def test_foreign_files_are_left_alone_and_named(run: Path) -> None:
    folder = run / FOLDER
    for name in ("notes.txt", "events-r0.jsonl", f"observations-r0-1-{'0' * 32}-1.arrows"):
        (folder / name).write_text("import os; os.abort()")
    (folder / str(FileName(0, "f" * 32, 0, "events", 1))).mkdir()
    opened = load(run)
    assert_same(list(opened.records()), RECORDS)
    assert len([w for w in opened.warnings if "not part of a run" in w]) == 4


def test_a_stream_of_another_program_is_not_read(run: Path) -> None:
    name = FileName(0, "f" * 32, 0, "observations", 1)
    table = pa.table({"step": [1], "head": [0]})
    with pa.ipc.new_stream(run / FOLDER / str(name), table.schema) as stream:
        stream.write_table(table)
    opened = load(run)
    assert_same(list(opened.records()), RECORDS)
    assert [w for w in opened.warnings if w.startswith(str(name))]


def test_a_batch_that_would_unpack_to_too_much_is_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stability_probe.runlog.unpack.MAX_UNPACKED", 100)
    opened = load(run)
    assert all(not r.observations for r in opened.records())
    assert any("more than 100 bytes" in w for w in opened.warnings)


def test_a_bomb_is_refused_by_what_it_claims(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "bomb", HEADER)
    writer.emit(record(1, layers=1, heads=30_000))
    writer.emit(record(2, layers=1))
    writer.close()
    events, observations = files(tmp_path / "bomb")
    start, stop = places(events)[1]
    data = bytearray(observations.read_bytes())
    # The first compressed buffer, the column of steps, says how large it is: 30000 int64.
    at = data.index((240_000).to_bytes(8, "little"), start, stop)
    data[at : at + 8] = (2**40).to_bytes(8, "little")
    observations.write_bytes(data)
    lines = events.read_bytes().splitlines()
    old = b'"crc":%d' % json.loads(lines[0])["batch"]["crc"]
    body = lines[0].replace(old, b'"crc":%d' % zlib.crc32(data[start:stop]))
    body = body.rpartition(b',"crc":')[0]
    events.write_bytes(body + b',"crc":%d}\n' % zlib.crc32(body) + lines[1] + b"\n")
    opened = load(tmp_path / "bomb")
    got = list(opened.records())
    assert [len(r.observations) for r in got] == [0, 1]
    assert [w for w in opened.warnings if "more than" in w]


def test_a_long_line_is_bounded(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stability_probe.runlog.scan.MAX_LINE", 1000)
    events, _ = files(run)
    with events.open("ab") as file:
        file.write(b"x" * 10_500)
    opened = load(run)
    assert_same(list(opened.records()), RECORDS)
    assert "11 lines cannot be read" in opened.warnings[0]


def test_a_stream_larger_than_a_chunk_is_read_without_its_lines(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, observations = files(run)
    largest = max(stop - start for start, stop in places(events).values())
    monkeypatch.setattr(salvage_module, "MAX_CHUNK", largest + 10)
    assert observations.stat().st_size > 3 * largest
    events.unlink()
    assert [r.step for r in load(run).records()] == [1, 2, 3, 5, 6]


def test_lines_in_a_random_order_of_keys_or_of_wrong_types_never_raise(run: Path) -> None:
    events, _ = files(run)
    line = json.loads(events.read_bytes().splitlines()[0])
    del line["crc"]
    strange: list[object] = [None, [], {}, "x", 1.5, True, -1, 2**70, "nan", [[1, 2]], {"a": {}}]
    bodies = []
    for target in (line, line["batch"]):
        for key in list(target):
            kept = target[key]
            for value in strange:
                target[key] = value
                bodies.append(json.dumps(line).encode()[:-1])
            target[key] = kept
    alert = {"kind": "alert", "rule": "r", "severity": "info", "step": 1}
    for key in Alert.__dataclass_fields__:
        bodies += [json.dumps(alert | {key: value}).encode()[:-1] for value in strange]
    lines = [body + b',"crc":%d}\n' % zlib.crc32(body) for body in bodies]
    for some in (lines, lines[::-1]):
        events.write_bytes(b"".join(some))
        opened = load(run)
        list(opened.records())
        opened.frame()
        assert len(opened.scalars) == len(list(opened.records()))
        assert opened.warnings


def test_a_run_of_headers_only_is_empty(tmp_path: Path) -> None:
    RunWriter(tmp_path, RunHeader()).close()
    opened = load(tmp_path)
    assert (list(opened.records()), opened.alerts, opened.warnings) == ([], (), ())
