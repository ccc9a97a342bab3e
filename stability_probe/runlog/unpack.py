"""Arrow bytes that nobody vouches for, back into observations.

Shape suffixes: R rows of a batch (all heads of all layers), N bins.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from stability_probe.records import Level, Observation
from stability_probe.runlog.schema import (
    BINS,
    CRC_KEY,
    HEADER_KEY,
    HISTOGRAM,
    IDENTITY,
    LEVELS,
    VERSION_KEY,
    decode_layers,
    schema_crc,
    statistic_type,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from stability_probe.records import Float32
    from stability_probe.runlog.lines import BatchPlace

_OPTIONS = pa.ipc.IpcReadOptions(use_threads=False)
MAX_UNPACKED = 2**28  # bytes of one record batch; 128 layers x 128 heads fill 4 MB
UNREADABLE = (
    pa.ArrowException,
    EOFError,
    IndexError,
    KeyError,
    MemoryError,
    OSError,
    OverflowError,
    TypeError,
    ValueError,
    struct.error,
)
"""What damaged or foreign bytes may raise."""


@dataclass(frozen=True, slots=True)
class StreamHead:
    """What the first message of an observations file says."""

    schema: bytes  # the message, without its metadata
    statistics: tuple[str, ...]  # the columns that hold one
    layers: tuple[tuple[int, str], ...]  # (layer index, canonical name)
    header: bytes  # of the run, not yet decoded
    version: int
    size: int  # bytes


def read_head(data: bytes) -> StreamHead:
    """Reads the schema at the start of a stream.

    Raises:
        One of `UNREADABLE`: it is damaged, or not one of ours.
    """
    source = pa.BufferReader(data)
    schema = pa.ipc.read_schema(pa.ipc.read_message(source))
    metadata = schema.metadata or {}
    if metadata[CRC_KEY] != b"%d" % schema_crc(schema):
        raise ValueError("the checksum is not that of the schema")
    if any(schema.field(name).type != kind for name, kind in IDENTITY.items()):
        raise ValueError("the columns are not those of this version")
    statistics = tuple(
        field.name
        for field in schema
        if field.name not in IDENTITY and field.type == statistic_type(field.name)
    )
    version = int(metadata[VERSION_KEY])
    return StreamHead(
        schema=bytes(schema.remove_metadata().serialize()),
        statistics=statistics,
        layers=decode_layers(schema),
        header=metadata[HEADER_KEY],
        version=version,
        size=source.tell(),
    )


def read_batch(data: bytes, head: StreamHead) -> pa.RecordBatch:
    """Reads one record batch.

    Raises:
        One of `UNREADABLE`: it is damaged, of another stream, or unpacks to more than
            `MAX_UNPACKED`.
    """
    message = pa.ipc.read_message(pa.py_buffer(data))
    if message.type != "record batch":
        raise ValueError(f"got a {message.type}, expected a record batch")
    if _unpacked_size(message) > MAX_UNPACKED:
        raise ValueError(f"a record batch of more than {MAX_UNPACKED} bytes")
    # A stream of its own, since `pa.ipc.read_record_batch` cannot be kept to one thread.
    with pa.ipc.open_stream(pa.py_buffer(head.schema + data), options=_OPTIONS) as stream:
        batch = stream.read_next_batch()
    batch.validate()
    if batch.num_rows == 0 or any(batch.column(name).null_count for name in IDENTITY):
        raise ValueError("rows without a step, layer or head")
    layer_R = label(batch, "layer")
    if layer_R.min() < 0 or layer_R.max() >= len(head.layers):
        raise ValueError("rows of a layer that the stream does not know")
    return batch


def label(batch: pa.RecordBatch, name: str) -> npt.NDArray[np.int64]:
    """A column of `IDENTITY`, [rows]."""
    return np.asarray(batch.column(name).to_numpy())


def level_of(batch: pa.RecordBatch) -> Level:
    """How much was measured at the batch's step."""
    return LEVELS[max(int(label(batch, "level")[0]), 0)]


def statistic(batch: pa.RecordBatch, name: str) -> Float32:
    """A statistic, [rows] or [rows, 16], NaN where it is null."""
    column = batch.column(name)
    if name != HISTOGRAM:
        return np.asarray(column.to_numpy(zero_copy_only=False))
    values = column.values.to_numpy(zero_copy_only=False)
    return np.asarray(values[: len(column) * BINS]).reshape(-1, BINS)


def observations(
    batch: pa.RecordBatch, head: StreamHead, place: BatchPlace
) -> tuple[Observation, ...]:
    """The observations of one step, as they were written."""
    names = head.statistics if place.statistics is None else place.statistics
    columns = {name: statistic(batch, name) for name in names if name in head.statistics}
    layer_R, head_R = label(batch, "layer"), label(batch, "head")
    sequences_R, ranks_R, rows_R = (label(batch, n) for n in ("sequences", "ranks", "query_rows"))
    return tuple(
        Observation(
            layer=head.layers[layer_R[rows.start]][1],
            layer_index=head.layers[layer_R[rows.start]][0],
            values=_values(columns, rows, number, place, empty=head_R[rows.start] < 0),
            sequences=int(sequences_R[rows.start]),
            ranks=int(ranks_R[rows.start]),
            rows=int(rows_R[rows.start]),
        )
        for number, rows in enumerate(_runs(head_R))
    )


def _runs(head_R: npt.NDArray[np.int64]) -> Iterator[slice]:
    """The rows of each observation: each starts with head 0, or -1 where it has none."""
    starts = [0, *(np.flatnonzero(head_R[1:] <= 0) + 1).tolist(), len(head_R)]
    return map(slice, starts, starts[1:])


def _values(
    columns: dict[str, Float32], rows: slice, number: int, place: BatchPlace, *, empty: bool
) -> dict[str, Float32]:
    stop = rows.start if empty else rows.stop
    values = {name: column[rows.start : stop] for name, column in columns.items()}
    if place.statistics is None:  # no line says what was measured: what has a value, was
        return {name: v for name, v in values.items() if not np.isnan(v).all()}
    lacking = place.missing.get(number, ())
    return {name: v for name, v in values.items() if name not in lacking}


def _unpacked_size(message: pa.Message) -> int:
    """Bytes that a record batch claims to unpack to.

    Each compressed buffer starts with its size as an int64; Arrow reserves that much unasked.
    The places of the buffers are read from the message's flatbuffer (Arrow's Message.fbs),
    which Arrow has verified by then.
    """
    meta, body = memoryview(message.metadata), memoryview(message.body)

    def number(kind: str, at: int) -> int:
        return int(struct.unpack_from("<" + kind, meta, at)[0])

    def field(table: int, index: int) -> int:
        offsets = table - number("i", table)
        entry = 4 + 2 * index
        return number("H", offsets + entry) if entry < number("H", offsets) else 0

    message_table = number("I", 0)
    to_batch = message_table + field(message_table, 2)
    batch = to_batch + number("I", to_batch)
    to_buffers = batch + field(batch, 2)
    buffers = to_buffers + number("I", to_buffers)
    total, compressed = len(body), field(batch, 3)
    for i in range(number("I", buffers)):
        offset, size = struct.unpack_from("<qq", meta, buffers + 4 + 16 * i)
        if size and compressed:
            total += max(struct.unpack_from("<q", body, offset)[0], 0)
    return total
