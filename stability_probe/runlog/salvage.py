"""An observations file and its index, the step lines: which batches are there, which are lost."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from stability_probe.records import StepScalars
from stability_probe.runlog.lines import BatchPlace, StepLine
from stability_probe.runlog.pack import END_OF_STREAM
from stability_probe.runlog.schema import SCHEMA_VERSION
from stability_probe.runlog.unpack import (
    UNREADABLE,
    StreamHead,
    label,
    level_of,
    read_batch,
    read_head,
)

MAX_HEAD = 2**24  # bytes
MAX_CHUNK = 2**26  # bytes read at a time, so also of one record batch

Warn = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Stream:
    """An observations file whose head could be read."""

    path: Path
    head: StreamHead


@dataclass(frozen=True, slots=True)
class StoredStep:
    """A step's line, and the stream in which its record batch lies if it was measured."""

    line: StepLine
    stream: Stream | None = None

    @property
    def step(self) -> int:
        """Number of the optimizer step."""
        return self.line.scalars.step


@dataclass(frozen=True, slots=True)
class Salvaged:
    """What is left of an observations file."""

    stream: Stream
    offsets: frozenset[int]  # of the batches that are as their lines say
    orphans: tuple[StoredStep, ...]  # batches without a line: no scalars
    unfinished: int | None  # step of a last batch without a line: it may be in the making


def salvage(
    path: Path, places: Sequence[BatchPlace], *, part: int, settled: int, warn: Warn
) -> Salvaged | None:
    """Checks a file against its step lines, and finds the batches that have lost theirs.

    Args:
        path: of the file.
        places: what the step lines say of it.
        part: number of the file.
        settled: bytes that the file had before the lines were read. What came after it has its
            line by now, or soon.
        warn: told what cannot be read.

    Returns:
        None where nothing can be read.
    """
    try:
        with path.open("rb") as file:
            stream = Stream(path, read_head(file.read(MAX_HEAD)))
            offsets = frozenset(p.offset for p in places if _is_intact(file, p, stream.head))
            spans = _gaps(stream.head.size, places, settled)
            orphans = [s for span in spans for s in _orphans(file, span, stream, part, warn)]
    except UNREADABLE as error:
        warn(f"{path.name}: cannot be read ({error})")
        return None
    damaged = [p.offset for p in places if p.offset not in offsets]
    if damaged:
        warn(f"{path.name}: {len(damaged)} damaged batches, the first at byte {damaged[0]}")
    if stream.head.version > SCHEMA_VERSION:
        warn(
            f"{path.name}: written by schema version {stream.head.version}, this is version "
            f"{SCHEMA_VERSION}; what it has in addition is not read"
        )
    unfinished = None
    if orphans and _end(orphans[-1]) >= settled:
        unfinished = orphans.pop().step
    return Salvaged(stream, offsets, tuple(orphans), unfinished)


def _is_intact(file: BinaryIO, place: BatchPlace, head: StreamHead) -> bool:
    if place.offset < head.size or not 0 < place.size <= MAX_CHUNK:
        return False
    file.seek(place.offset)
    return zlib.crc32(file.read(place.size)) == place.crc


def _gaps(start: int, places: Sequence[BatchPlace], stop: int) -> Iterator[range]:
    """The bytes between the places."""
    for place in sorted(places, key=lambda p: p.offset):
        if start < place.offset <= stop:
            yield range(start, place.offset)
        start = max(start, place.offset + place.size)
    yield range(start, stop)


def _orphans(
    file: BinaryIO, span: range, stream: Stream, part: int, warn: Warn
) -> Iterator[StoredStep]:
    for offset, data in _messages(file, span, stream.path.name, warn):
        try:
            batch = read_batch(data, stream.head)
        except UNREADABLE as error:
            warn(f"{stream.path.name}: no record batch at byte {offset} ({error})")
            continue
        scalars = StepScalars(step=int(label(batch, "step")[0]))
        place = BatchPlace(part, offset, len(data), zlib.crc32(data), statistics=None)
        yield StoredStep(StepLine(scalars, level_of(batch), place), stream)


def _messages(file: BinaryIO, span: range, name: str, warn: Warn) -> Iterator[tuple[int, bytes]]:
    """The Arrow messages in a part of the file, each with its offset."""
    start = span.start
    while start < span.stop:
        file.seek(start)
        chunk = file.read(min(span.stop - start, MAX_CHUNK))
        source, done = pa.BufferReader(chunk), 0
        try:
            while True:
                pa.ipc.read_message(source)
                yield start + done, chunk[done : source.tell()]
                done = source.tell()
        except UNREADABLE:
            if done == 0:
                if chunk != END_OF_STREAM:
                    warn(f"{name}: {span.stop - start} bytes from byte {start} cannot be read")
                return
        start += done


def _end(step: StoredStep) -> int:
    place = step.line.batch
    return place.offset + place.size if place else 0
