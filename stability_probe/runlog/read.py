"""Reads a run directory: the recorded run as records, alerts and tables."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from stability_probe.errors import RunNotFoundError
from stability_probe.records import Alert, Level, RunHeader, StepRecord
from stability_probe.runlog.salvage import StoredStep, Stream, Warn
from stability_probe.runlog.scan import run_files, scan
from stability_probe.runlog.schema import (
    FOLDER,
    HEADER_FILE,
    SCHEMA_VERSION,
    decode_header,
)
from stability_probe.runlog.unpack import UNREADABLE, observations, read_batch

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from matplotlib.figure import Figure

MAX_HEADER = 2**24  # bytes of run.json
_SCALARS = ("step", "loss", "grad_norm", "eval_loss", "learning_rate")
_MAX_DEPTH, _MAX_FOLDERS, _MAX_LISTED = 4, 5000, 10  # of the search for runs below a directory


def load(run: str | Path, *, rank: int | None = None) -> Run:
    """Opens a recorded run, also while another process writes it.

    Whatever can be read is read; `Run.warnings` says what could not. Nothing read is executed.

    Args:
        run: the run's directory, or the `plugins/stability_probe` in it.
        rank: whose records, where several ranks wrote their own; by default the lowest.

    Raises:
        RunNotFoundError: there is no run in the directory.
    """
    path, folder = _locate(Path(run))
    ranks = tuple(sorted({name.rank for name in run_files(folder)}))
    if rank is None:
        rank = ranks[0] if ranks else 0
    elif rank not in ranks:
        raise RunNotFoundError(f"got rank {rank} for {path}, expected one of {list(ranks)}.")
    warnings = [f"{name}: not part of a run, left alone" for name in _foreign(folder)]
    if others := [r for r in ranks if r != rank]:
        warnings.append(f"ranks {others} wrote records too: load(run, rank={others[0]})")
    found = scan(folder, rank, warnings.append)
    header = _header(folder, found.streams, warnings.append)
    return Run(path, header, found.alerts, rank, ranks, found.steps, warnings)


@dataclass(frozen=True, eq=False)
class Run:
    """A recorded run, as one rank wrote it.

    Steps that were run again after a resume are those of the last time. The record batches stay
    on the disk until `records` or `frame` asks for them.

    Attributes:
        path: the run's directory.
        header: what was watched, and how.
        alerts: in the order they were raised; those of superseded steps are kept and flagged.
        rank: whose records these are.
        ranks: all that wrote into the directory.
    """

    path: Path
    header: RunHeader
    alerts: tuple[Alert, ...]
    rank: int
    ranks: tuple[int, ...]
    _steps: tuple[StoredStep, ...] = field(repr=False)
    _warnings: list[str] = field(repr=False)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What could not be read, and why."""
        return tuple(self._warnings)

    @cached_property
    def scalars(self) -> pd.DataFrame:
        """One row a step, measured or not.

        Columns: step, loss, grad_norm, eval_loss, learning_rate, skipped, phase, wall_time
        (seconds since the epoch). Both a missing number and one that really is NaN are NaN here;
        `records` keeps them apart.
        """
        import pandas as pd

        steps = [stored.line.scalars for stored in self._steps]
        kinds = {"step": "int64", "skipped": "bool", "phase": "object"}
        names = (*_SCALARS, "skipped", "phase", "wall_time")
        columns = {
            name: pd.Series([getattr(s, name) for s in steps], dtype=kinds.get(name, "float64"))
            for name in names
        }
        return pd.DataFrame(columns)

    def frame(self, *, histograms: bool = False, bounds: bool = True) -> pd.DataFrame:
        """The statistics of all measured steps, one row a (step, layer, head).

        Columns: step, layer (canonical name, categorical in the order of the layers), head, and
        one float32 column for each statistic that was ever present, NaN where it is absent or
        was not measured. Sorted by step, layer index and head.

        Args:
            histograms: also `entropy_hist`, as a column of arrays [16] or None.
            bounds: also the steps at which only bounds were taken. They are most of the steps
                of a long run: without them they are not even read.
        """
        from stability_probe.runlog.table import long_table

        batches = (
            (batch, stored.stream.head)
            for stored, batch in self._batches(bounds=bounds)
            if batch is not None and stored.stream is not None
        )
        return long_table(batches, histograms=histograms)

    def records(self) -> Iterator[StepRecord]:
        """All steps in their order, measured or not, exactly as they were written.

        A measured step whose observations are lost comes without them, one whose scalars are
        lost with the step's number alone.
        """
        for stored, batch in self._batches():
            line, stream = stored.line, stored.stream
            if batch is None or stream is None or line.batch is None:
                yield StepRecord(line.scalars, level=line.level)
            else:
                found = observations(batch, stream.head, line.batch)
                yield StepRecord(line.scalars, found, line.level)

    def plot(self, path: str | Path | None = None) -> Figure:
        """The overview of the run, saved to `path` (PNG, SVG, ...) where that is given."""
        from stability_probe.views.plots import overview

        figure = overview(self)
        if path is not None:
            figure.savefig(path)
        return figure

    def _batches(
        self, *, bounds: bool = True
    ) -> Iterator[tuple[StoredStep, pa.RecordBatch | None]]:
        """Each step with its record batch, None where there is none.

        `bounds`: also those at which only bounds were taken.
        """
        for stored in self._steps:
            if not bounds and stored.line.level is Level.BRACKET:
                continue
            try:
                yield stored, _read_batch(stored)
            except UNREADABLE as error:
                lost = f"step {stored.step}: its observations cannot be read ({error})"
                if lost not in self._warnings:
                    self._warnings.append(lost)
                yield stored, None


def _read_batch(stored: StoredStep) -> pa.RecordBatch | None:
    place = stored.line.batch
    if stored.stream is None or place is None:
        return None
    with stored.stream.path.open("rb") as file:
        file.seek(place.offset)
        return read_batch(file.read(place.size), stored.stream.head)


def _locate(run: Path) -> tuple[Path, Path]:
    """The run's directory and the folder with its files."""
    for folder in (run / FOLDER, run):
        if _is_run(folder):
            inside = folder.parts[-len(FOLDER.parts) :] == FOLDER.parts
            return (folder.parents[1] if inside else folder), folder
    below = list(islice(_runs_below(run), _MAX_LISTED))
    hint = f"Runs below it: {', '.join(below)}." if below else "No run lies below it."
    raise RunNotFoundError(
        f"got {run}, which {'holds no run' if run.is_dir() else 'is no directory'}: expected "
        f"{HEADER_FILE} or observations in {run / FOLDER}. {hint} Pass a run's directory."
    )


def _is_run(folder: Path) -> bool:
    return folder.is_dir() and ((folder / HEADER_FILE).is_file() or bool(run_files(folder)))


def _runs_below(directory: Path) -> Iterator[str]:
    walk = os.walk(directory)
    for path, folders, _ in islice(walk, _MAX_FOLDERS):
        here = Path(path)
        if _is_run(here / FOLDER):
            yield str(here)
        if len(here.relative_to(directory).parts) >= _MAX_DEPTH:
            folders.clear()
        folders.sort()


def _foreign(folder: Path) -> list[str]:
    """The entries that belong to nothing this project writes. Drafts start with a dot."""
    known = {HEADER_FILE, *map(str, run_files(folder))}
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.name not in known and not path.name.startswith((".", "summary-"))
    )


def _header(folder: Path, streams: Sequence[Stream], warn: Warn) -> RunHeader:
    try:
        with (folder / HEADER_FILE).open("rb") as file:
            header = decode_header(file.read(MAX_HEADER))
    except UNREADABLE as error:
        warn(f"{HEADER_FILE}: cannot be read ({error}); the streams' own headers are used")
        header = RunHeader()
        for stream in reversed(streams):
            with contextlib.suppress(*UNREADABLE):
                return decode_header(stream.head.header)
    if header.schema_version > SCHEMA_VERSION:
        warn(
            f"{HEADER_FILE}: schema version {header.schema_version}, this is version "
            f"{SCHEMA_VERSION}; what it has in addition is not read"
        )
    return header
