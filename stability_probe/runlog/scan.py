"""What one rank wrote into a run directory, be it whole, torn, damaged or still growing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from stability_probe.records import Alert
from stability_probe.runlog.lines import StepLine, decode_line
from stability_probe.runlog.salvage import (
    StoredStep,
    Stream,
    Warn,
    intact,
    open_stream,
    without_line,
)
from stability_probe.runlog.schema import FileName

MAX_LINE = 2**22  # bytes


@dataclass(frozen=True, slots=True)
class Scan:
    """What was found of one rank."""

    steps: tuple[StoredStep, ...]  # in their order, superseded ones left out
    alerts: tuple[Alert, ...]  # in the order they were raised, superseded ones flagged
    streams: tuple[Stream, ...]


@dataclass(frozen=True, slots=True)
class _Session:
    steps: Mapping[int, StoredStep]
    alerts: Sequence[Alert]
    streams: Sequence[Stream]


def run_files(folder: Path) -> dict[FileName, Path]:
    """The files of events and observations in a folder, sorted by rank, session and part."""
    named = ((FileName.parse(path.name), path) for path in folder.iterdir())
    return dict(sorted((name, path) for name, path in named if name and path.is_file()))


def scan(folder: Path, rank: int, warn: Warn) -> Scan:
    """Reads one rank's files; the record batches themselves stay on the disk."""
    before = {n: p.stat().st_size for n, p in run_files(folder).items() if n.rank == rank}
    lines = {n: list(_read_lines(folder / str(n), warn)) for n in before if n.kind == "events"}
    # Listed again: a line may know of a file that was not there a moment ago.
    files = [n for n in run_files(folder) if n.rank == rank]
    sessions = [
        _read_session(folder, list(names), lines, before, warn)
        for _, names in groupby(files, key=attrgetter("session"))
    ]
    return _merge(sessions)


def _read_lines(path: Path, warn: Warn) -> Iterator[StepLine | Alert]:
    position, bad = 0, 0
    problem = ""
    try:
        with path.open("rb") as file:
            for line in iter(lambda: file.readline(MAX_LINE), b""):
                try:
                    yield decode_line(line.removesuffix(b"\n"))
                except UNREADABLE as error:
                    bad += 1
                    torn = not line.endswith(b"\n")
                    reason = "it is torn, or was being written" if torn else str(error)
                    problem = problem or f"the first at byte {position}: {reason}"
                position += len(line)
    except OSError as error:
        warn(f"{path.name}: cannot be read ({error})")
    if bad:
        warn(f"{path.name}: {bad} lines cannot be read, {problem}")


def _read_session(
    folder: Path,
    names: Sequence[FileName],
    lines: Mapping[FileName, Sequence[StepLine | Alert]],
    sizes: Mapping[FileName, int],
    warn: Warn,
) -> _Session:
    found = [line for name in names for line in lines.get(name, ())]
    known = [line for line in found if isinstance(line, StepLine)]
    streams: dict[int, Stream] = {}
    good: set[tuple[int, int]] = set()  # part, offset
    extra: list[StoredStep] = []
    for name in names:
        if name.kind != "observations" or not (folder / str(name)).stat().st_size:
            continue
        stream = open_stream(folder / str(name), warn)
        if stream is None:
            continue
        streams[name.part] = stream
        places = [x.batch for x in known if x.batch is not None and x.batch.part == name.part]
        good |= {(name.part, offset) for offset in intact(stream, places, warn)}
        settled = sizes.get(name, 0)
        batches = without_line(stream, places, part=name.part, settled=settled, warn=warn)
        for step, last in batches:
            if last and found:
                warn(f"{name}: step {step.step} was not finished, or was being written")
            else:
                extra.append(step)
    ...
