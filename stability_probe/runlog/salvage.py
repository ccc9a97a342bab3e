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


def open_stream(path: Path, warn: Warn) -> Stream | None:
    """The stream in a file; None, with a warning, where its head cannot be read."""
    try:
        with path.open("rb") as file:
            stream = Stream(path, read_head(file.read(MAX_HEAD)))
    except UNREADABLE as error:
        warn(f"{path.name}: the head of the stream cannot be read ({error}); its steps are lost")
        return None
    if stream.head.version > SCHEMA_VERSION:
        warn(
            f"{path.name}: written by schema version {stream.head.version}, this is version "
            f"{SCHEMA_VERSION}; what it has in addition is not read"
        )
    return stream


def intact(stream: Stream, places: Sequence[BatchPlace], warn: Warn) -> set[int]:
    """The offsets of those batches whose bytes are the ones that were written."""
    with stream.path.open("rb") as file:
        good = {place.offset for place in places if _is_intact(file, place, stream.head)}
    lost = len(places) - len(good)
    if lost:
        first = next(place.offset for place in places if place.offset not in good)
        warn(f"{stream.path.name}: {lost} record batches are damaged, the first at byte {first}")
    return good


def _is_intact(file: BinaryIO, place: BatchPlace, head: StreamHead) -> bool:
    if place.offset < head.size or not 0 < place.size <= MAX_CHUNK:
        return False
    file.seek(place.offset)
    return zlib.crc32(file.read(place.size)) == place.crc


def without_line(
    stream: Stream, places: Sequence[BatchPlace], *, part: int, settled: int, warn: Warn
) -> Iterator[tuple[StoredStep, bool]]:
    """The batches that no step line knows, since that was lost or never written.

    Args:
        stream: where they lie.
        places: the batches that have a line.
        part: number of the file.
        settled: bytes the file had before the lines were read. What came later has its line
            by now, or soon.
        warn: told of bytes that are not a record batch.

    Yields:
        The step, with no scalars, and whether it ends the file: it may be in the making.
    """
    position, known = stream.head.size, {p.offset: p.size for p in places if p.size > 0}
    with stream.path.open("rb") as file:
        for offset in [*sorted(o for o in known if o < settled), settled]:
            for at, size, message in _messages(file, position, offset, stream.path.name, warn):
                try:
                    batch = read_batch(message, stream.head)
                except UNREADABLE as error:
                    warn(f"{stream.path.name}: no record batch at byte {at} ({error})")
                    continue
                scalars = StepScalars(step=int(label(batch, "step")[0]))
                place = BatchPlace(part, at, size, 0, statistics=None)
                line = StepLine(scalars, level_of(batch), place)
                yield StoredStep(line, stream), at + size >= settled
            position = max(position, offset + known.get(offset, 0))


def _messages(
    file: BinaryIO, start: int, stop: int, name: str, warn: Warn
) -> Iterator[tuple[int, int, pa.Message]]:
    """The Arrow messages between two offsets: offset, size, message."""
    while start < stop:
        file.seek(start)
        chunk = file.read(min(stop - start, MAX_CHUNK))
        source, done = pa.BufferReader(chunk), 0
        try:
            while message := pa.ipc.read_message(source):
                yield start + done, source.tell() - done, message
                done = source.tell()
        except UNREADABLE:
            pass
        if not done:
            if chunk != END_OF_STREAM:
                warn(f"{name}: {stop - start} bytes from byte {start} on cannot be read")
            return
        start += done
