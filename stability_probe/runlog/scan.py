"""What one rank wrote into a run directory, be it whole, torn, damaged or still growing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from stability_probe.records import Alert
from stability_probe.runlog.lines import StepLine, decode_line
from stability_probe.runlog.salvage import Salvaged, StoredStep, Stream, Warn, salvage
from stability_probe.runlog.schema import FileName
from stability_probe.runlog.unpack import UNREADABLE

MAX_LINE = 2**22  # bytes


@dataclass(frozen=True, slots=True)
class Scan:
    """What one rank wrote.

    Attributes:
        steps: in their order, superseded ones left out. Their batches are still on the disk.
        alerts: in the order they were raised, superseded ones flagged.
        streams: the observations files, in the order they were begun.
    """

    steps: tuple[StoredStep, ...] = ()
    alerts: tuple[Alert, ...] = ()
    streams: tuple[Stream, ...] = ()


def run_files(folder: Path) -> list[FileName]:
    """The files of events and observations in a folder, sorted by rank, session and part."""
    names = (FileName.parse(path.name) for path in folder.iterdir() if path.is_file())
    return sorted(name for name in names if name)


def scan(folder: Path, rank: int, warn: Warn) -> Scan:
    """Reads what one rank wrote.

    Args:
        folder: with the run's files.
        rank: whose files.
        warn: told what cannot be read.
    """
    # The run may be growing: the batches first, then the lines, which are written after them, then
    # the files that the lines tell of. Each is listed anew, since files come into being meanwhile.
    sizes = {n: _size(folder / str(n)) for n in _files(folder, rank, "observations")}
    events = _files(folder, rank, "events")
    lines = {n: list(_read_lines(folder / str(n), warn)) for n in events}
    names = sorted([*lines, *_files(folder, rank, "observations")])
    return _merge(
        [
            _read_session(folder, list(session), lines, sizes, warn)
            for _, session in groupby(names, key=attrgetter("session"))
        ]
    )


def _files(folder: Path, rank: int, kind: str) -> list[FileName]:
    return [name for name in run_files(folder) if name.rank == rank and name.kind == kind]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # a file without a record is removed when it is closed
        return 0


def _merge(sessions: Sequence[Scan]) -> Scan:
    """Each session supersedes the steps of earlier ones from its own first step on."""
    limit: float = math.inf
    steps: list[StoredStep] = []
    alerts: list[Alert] = []
    for session in reversed(sessions):
        steps = [s for s in session.steps if s.step < limit] + steps
        again = [a if a.step < limit else replace(a, superseded=True) for a in session.alerts]
        alerts = again + alerts
        limit = min([limit, *(s.step for s in session.steps[:1])])
    return Scan(tuple(steps), tuple(alerts), tuple(x for s in sessions for x in s.streams))


def _read_session(
    folder: Path,
    names: Sequence[FileName],
    lines_of: Mapping[FileName, Sequence[StepLine | Alert]],
    sizes: Mapping[FileName, int],
    warn: Warn,
) -> Scan:
    lines = [line for name in names for line in lines_of.get(name, ())]
    known = [line for line in lines if isinstance(line, StepLine)]
    files: dict[int, Salvaged] = {}  # by part
    for name in names:
        places = [x.batch for x in known if x.batch and x.batch.part == name.part]
        settled = sizes.get(name, 0)
        if name.kind == "observations" and (places or settled):
            path = folder / str(name)
            file = salvage(path, places, part=name.part, settled=settled, warn=warn)
            if file:
                files[name.part] = file
    steps = {line.scalars.step: _stored(line, files) for line in known}
    steps = _orphans(files, steps, warn) | steps
    lost = sum(1 for x in known if x.batch and steps[x.scalars.step].stream is None)
    if lost:
        warn(f"{lost} measured steps of session {names[0].session} have lost their observations")
    return Scan(
        tuple(steps[step] for step in sorted(steps)),
        tuple(line for line in lines if isinstance(line, Alert)),
        tuple(file.stream for file in files.values()),
    )


def _stored(line: StepLine, files: Mapping[int, Salvaged]) -> StoredStep:
    file = files.get(line.batch.part) if line.batch else None
    if file and line.batch and line.batch.offset in file.offsets:
        return StoredStep(line, file.stream)
    return StoredStep(replace(line, batch=None))


def _orphans(
    files: Mapping[int, Salvaged], steps: Mapping[int, StoredStep], warn: Warn
) -> dict[int, StoredStep]:
    """The steps without a line; a step that failed may have been written again, with one."""
    for file in files.values():
        if file.unfinished is not None and file.unfinished not in steps:
            name = file.stream.path.name
            warn(f"{name}: step {file.unfinished} was not finished, or was being written")
    found = (step for file in files.values() for step in file.orphans)
    orphans = {step.step: step for step in found if step.step not in steps}
    if orphans:
        first = min(orphans)
        warn(f"{len(orphans)} steps have lost their line (scalars, checksum), the first is {first}")
    return orphans


def _read_lines(path: Path, warn: Warn) -> Iterator[StepLine | Alert]:
    position, bad, problem = 0, 0, ""
    try:
        with path.open("rb") as file:
            for line in iter(lambda: file.readline(MAX_LINE), b""):
                try:
                    yield decode_line(line.removesuffix(b"\n"))
                except UNREADABLE as error:
                    whole = line.endswith(b"\n")
                    reason = f"{error}" if whole else "it is torn, or was being written"
                    problem = problem or f"the first at byte {position}: {reason}"
                    bad += 1
                position += len(line)
    except OSError as error:
        warn(f"{path.name}: cannot be read ({error})")
    if bad:
        warn(f"{path.name}: {bad} lines cannot be read, {problem}")
