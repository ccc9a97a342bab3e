"""The observations of one step as one Arrow record batch.

Shape suffixes: R rows of a batch (all heads of all layers), H heads of one layer, N bins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from stability_probe.errors import ShapeError
from stability_probe.runlog.schema import BINS, HISTOGRAM, IDENTITY, LEVELS, statistic_type

if TYPE_CHECKING:
    import numpy.typing as npt

    from stability_probe.records import Float32, Level, Observation

END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
# One thread: the others are the training's.
_OPTIONS = pa.ipc.IpcWriteOptions(
    compression=pa.Codec("zstd", compression_level=1), use_threads=False
)


@dataclass(frozen=True, slots=True)
class RowLabels:
    """The columns that say what a row is. They seldom change from step to step."""

    key: tuple[object, ...]
    heads: tuple[int, ...]  # of each observation
    rows: tuple[int, ...]  # of each observation: its heads, or one where there are none
    columns: tuple[pa.Array, ...]  # `IDENTITY` after the step


_label = attrgetter("layer", "layer_index", "sequences", "ranks", "rows")


def label_key(observations: Sequence[Observation], level: Level) -> tuple[object, ...]:
    """Equal for two steps whose rows have the same labels."""
    return (level, _heads(observations), tuple(map(_label, observations)))


def _heads(observations: Sequence[Observation]) -> tuple[int, ...]:
    return tuple([len(next(iter(o.values.values()), ())) for o in observations])


def label_rows(
    observations: Sequence[Observation], level: Level, positions: Mapping[tuple[int, str], int]
) -> RowLabels:
    """The labels of a step's rows.

    Args:
        observations: of the step; each gives one row a head, in order.
        level: of the step.
        positions: (layer index, canonical name) -> place in the stream's table of layers.
    """
    heads = _heads(observations)
    rows = tuple(max(n, 1) for n in heads)
    per_observation = {
        "layer": [positions[o.layer_index, o.layer] for o in observations],
        "layer_index": [o.layer_index for o in observations],
        "sequences": [o.sequences for o in observations],
        "ranks": [o.ranks for o in observations],
        "query_rows": [o.rows for o in observations],
    }
    labels = {name: np.repeat(of, rows) for name, of in per_observation.items()}
    labels["head"] = np.concatenate([np.arange(n) if n else [-1] for n in heads])
    labels["level"] = np.full(sum(rows), LEVELS.index(level))
    columns = tuple(_column(name, labels[name]) for name in tuple(IDENTITY)[1:])
    return RowLabels(label_key(observations, level), heads, rows, columns)


@dataclass(frozen=True, slots=True)
class Packed:
    """A record batch and which statistics are in it."""

    message: pa.Buffer  # an encapsulated Arrow IPC message
    statistics: tuple[str, ...]
    missing: Mapping[int, tuple[str, ...]]  # observation -> statistics that it lacks


def pack(
    observations: Sequence[Observation],
    *,
    present: frozenset[str],
    step: int,
    labels: RowLabels,
    columns: Sequence[str],
    schema: pa.Schema,
) -> Packed:
    """The record batch of a step.

    Args:
        observations: of the step, as `labels` was made for.
        present: the statistics that any of them has.
        step: number of the optimizer step.
        labels: the columns that say what a row is.
        columns: the stream's statistics, in order; at least those of the observations.
        schema: of the stream, without metadata.

    Raises:
        ShapeError: a statistic that is not one value a head (`entropy_hist`: 16).
    """
    missing = {
        i: tuple(name for name in columns if name in present and name not in o.values)
        for i, o in enumerate(observations)
        if len(o.values) < len(present)
    }
    scalars = [name for name in columns if name in present and name != HISTOGRAM]
    arrays: dict[str, pa.Array] = {}
    if scalars:
        values_SR = _gather(scalars, (), observations, labels).reshape(len(scalars), -1)
        arrays = dict(zip(scalars, map(_nullable, values_SR), strict=True))
    if HISTOGRAM in present:
        arrays[HISTOGRAM] = _histogram(observations, labels)
    total = sum(labels.rows)
    steps = _column("step", np.full(total, step))
    given = [arrays[n] if n in arrays else pa.nulls(total, statistic_type(n)) for n in columns]
    batch = pa.RecordBatch.from_arrays([steps, *labels.columns, *given], schema=schema)
    return Packed(_message(batch), tuple(n for n in columns if n in present), missing)


def _histogram(observations: Sequence[Observation], labels: RowLabels) -> pa.Array:
    hist_RN = _gather([HISTOGRAM], (BINS,), observations, labels)
    valid_R = np.repeat([HISTOGRAM in o.values for o in observations], labels.rows)
    return pa.Array.from_buffers(
        statistic_type(HISTOGRAM),
        len(valid_R),
        [_bits(valid_R)],
        children=[_nullable(hist_RN.ravel())],
    )


def _gather(
    names: Sequence[str],
    width: tuple[int, ...],
    observations: Sequence[Observation],
    labels: RowLabels,
) -> Float32:
    """All rows of the first statistic, then all of the next; NaN where a layer lacks it.

    It runs at every measured step: no Python for each of the layers' statistics.
    """
    gaps = {rows: np.full((rows, *width), np.nan, np.float32) for rows in set(labels.rows)}
    pick = itemgetter(*names)
    picked = []
    for o, heads, rows in zip(observations, labels.heads, labels.rows, strict=True):
        try:
            picked.append(pick(o.values if heads else {}))
        except KeyError:
            gap = dict.fromkeys(names, gaps[rows])
            picked.append(pick(gap | dict(o.values) if heads else gap))
    parts = picked if len(names) == 1 else list(chain.from_iterable(zip(*picked, strict=True)))
    try:
        fits = list(map(len, parts)) == list(labels.rows) * len(names)
        gathered = np.concatenate(parts, dtype=np.float32, casting="same_kind")
    except (TypeError, ValueError) as error:
        raise _shape_error(names, width, observations, labels) from error
    if not fits or gathered.shape[1:] != width:
        raise _shape_error(names, width, observations, labels)
    return gathered


def _shape_error(
    names: Sequence[str],
    width: tuple[int, ...],
    observations: Sequence[Observation],
    labels: RowLabels,
) -> ShapeError:
    wrong = (
        f"got shape {np.shape(o.values[name])} for {name} of {o.layer}, expected {(heads, *width)}"
        for name in names
        for o, heads in zip(observations, labels.heads, strict=True)
        if name in o.values and np.shape(o.values[name]) != (heads, *width)
    )
    return ShapeError(
        f"{next(wrong, 'got values that are not float32')}. Measure all statistics of a layer "
        "for the same heads."
    )


# Arrays are made of buffers: `pa.array` imports pandas, and looks for NaN 20 times as slowly.


def _column(name: str, values_R: npt.NDArray[np.int64]) -> pa.Array:
    kind = IDENTITY[name]
    values = values_R.astype(f"i{kind.byte_width}")
    if not np.array_equal(values, values_R):
        raise OverflowError(f"got {values_R.max()} for {name}, expected what fits {kind}.")
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _nullable(values: Float32) -> pa.Array:
    """The values, with null for NaN."""
    valid = _bits(~np.isnan(values))
    return pa.Array.from_buffers(pa.float32(), len(values), [valid, pa.py_buffer(values)])


def _bits(valid: npt.NDArray[np.bool_]) -> pa.Buffer | None:
    """Arrow's validity bits; None where all are valid."""
    return None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))


def _message(batch: pa.RecordBatch) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=_OPTIONS) as stream:
        stream.write_batch(batch)
    written = sink.getvalue()
    start = batch.schema.serialize().size
    return written.slice(start, written.size - start - len(END_OF_STREAM))
