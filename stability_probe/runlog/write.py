"""Writes a run directory: every record is in the kernel before `emit` returns.

A record is put together in memory and handed over in one write to an unbuffered descriptor, so
that a killed process loses at most the record it was writing, and a machine that loses power at
most the last `SYNC_SECONDS`.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from stability_probe.errors import LogDirectoryError, ProbeClosedError
from stability_probe.records import Alert, RunHeader, StepRecord
from stability_probe.runlog.append import AppendFile
from stability_probe.runlog.lines import BatchPlace, encode_alert, encode_step
from stability_probe.runlog.schema import (
    FOLDER,
    HEADER_FILE,
    FileName,
    encode_header,
    in_order,
    new_session,
)
from stability_probe.runlog.stream import ObservationStream
from stability_probe.stats.catalogue import CATALOGUE

SYNC_SECONDS = 30.0
MAX_STREAMS = 4  # sets of statistics with a file of their own; the others share a wide one


class RunWriter:
    """Appends step records and alerts to `<logdir>/plugins/stability_probe`.

    A sink: `emit` and `close`. Emit from one thread at a time, step records in the order of
    their steps. A step that is not above the last one means that the run went back: it and all
    that follows supersede what was written from that step on, as a new process would.

    Args:
        logdir: the run's directory; made where it is missing.
        header: what readers must know; rank 0 writes it at once.
        rank: of this process, in the names of its files.

    Raises:
        LogDirectoryError: the directory cannot be made or written.
    """

    def __init__(self, logdir: str | Path, header: RunHeader, *, rank: int = 0) -> None:
        self.folder = Path(logdir) / FOLDER
        self._header = header
        self._rank = rank
        self._closed = False
        self._events: AppendFile | None = None
        self._streams: dict[frozenset[str], ObservationStream] = {}
        self._wide = frozenset(CATALOGUE)
        self._last_step: int | None = None
        self._synced = time.monotonic()
        try:
            self._write_header()
            self._begin_session()
        except OSError as error:
            raise LogDirectoryError(
                f"got {error} for the log directory {logdir}, expected a directory that this "
                "process may make and write to. Choose another one, or free the disk."
            ) from error

    def emit(self, event: StepRecord | Alert | RunHeader) -> None:
        """Writes one event; it is in the kernel on return.

        Raises:
            OSError: it could not be written, wholly or in part. What was written before stays
                readable, and the next `emit` starts new files.
            ShapeError: a statistic that does not have one value a head; nothing was written.
            ProbeClosedError: after `close`.
        """
        if self._closed:
            raise ProbeClosedError("got an event after close(). Open a new RunWriter to go on.")
        try:
            self._write(event)
            if time.monotonic() - self._synced > SYNC_SECONDS:
                self._sync()
        except OSError:
            self._abandon_files()
            raise

    def close(self) -> None:
        """Puts everything on the disk and ends the files; again is harmless.

        Raises:
            OSError: the last records may not be on the disk.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._sync()
        finally:
            self._close_files()

    def _write(self, event: StepRecord | Alert | RunHeader) -> None:
        if isinstance(event, RunHeader):
            self._header = event
            self._write_header()
        elif isinstance(event, Alert):
            self._append_line(event.step, encode_alert(event))
        else:
            self._write_step(event)

    def _write_step(self, record: StepRecord) -> None:
        if self._last_step is not None and record.step <= self._last_step:
            self._close_files()
            self._begin_session()
        place = self._write_batch(record) if record.observations else None
        self._append_line(record.step, encode_step(record, place))
        self._last_step = record.step

    def _write_batch(self, record: StepRecord) -> BatchPlace:
        present = frozenset[str]().union(*(o.values for o in record.observations))
        names = present
        if names not in self._streams and len(self._streams) >= MAX_STREAMS:
            names = self._wide = self._wide | names
        stream = self._streams.get(names)
        if stream is None or not stream.takes(record.observations):
            stream = self._streams[names] = self._open_stream(names, record, replaces=stream)
        return stream.append(record, present=present)

    def _open_stream(
        self, names: frozenset[str], record: StepRecord, *, replaces: ObservationStream | None
    ) -> ObservationStream:
        layers = [(layer.index, layer.name) for layer in self._header.layers]
        if replaces is not None:
            replaces.end()
            layers += replaces.layers
        layers += [(o.layer_index, o.layer) for o in record.observations]
        part = self._part
        return ObservationStream(
            self._open("observations", record.step),
            part=part,
            statistics=in_order(names),
            layers=tuple(dict.fromkeys(layers)),
            header=self._header,
        )

    def _append_line(self, step: int, line: bytes) -> None:
        if self._events is None:
            self._events = self._open("events", step)
        self._events.append(line)

    def _open(self, kind: str, step: int) -> AppendFile:
        if not self.folder.is_dir():  # removed while the run goes on
            self._write_header()
        name = FileName(self._rank, self._session, self._part, kind, step)
        self._part += 1
        return AppendFile(self.folder / str(name))

    def _begin_session(self) -> None:
        there = self.folder.iterdir() if self.folder.is_dir() else ()
        self._session = new_session(path.name for path in there)
        self._part = 0
        self._last_step = None

    def _write_header(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / HEADER_FILE
        draft = path.with_name(f".{HEADER_FILE}.r{self._rank}.{os.getpid()}")
        try:
            with draft.open("wb") as file:
                file.write(encode_header(self._header))
                file.flush()
                os.fsync(file.fileno())
            if self._rank == 0 or not path.exists():
                draft.replace(path)
        finally:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)

    def _sync(self) -> None:
        self._synced = time.monotonic()
        for stream in self._streams.values():
            stream.file.sync()
        if self._events is not None:
            self._events.sync()

    def _close_files(self) -> None:
        for stream in self._streams.values():
            stream.end()
        self._streams.clear()
        if self._events is not None:
            self._events.close()
            self._events = None

    def _abandon_files(self) -> None:
        # Without the mark of the end: a last batch without its line then reads as unfinished.
        for file in (*(stream.file for stream in self._streams.values()), self._events):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()
        self._streams.clear()
        self._events = None
