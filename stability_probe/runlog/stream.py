"""One observations file while it is written: an Arrow IPC stream of one set of statistics."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Sequence
from operator import attrgetter

from stability_probe.records import Observation, RunHeader, StepRecord
from stability_probe.runlog.append import AppendFile
from stability_probe.runlog.lines import BatchPlace
from stability_probe.runlog.pack import END_OF_STREAM, RowLabels, label_key, label_rows, pack
from stability_probe.runlog.schema import stream_schema

_layer = attrgetter("layer_index", "layer")


class ObservationStream:
    """Appends the observations of steps whose statistics and layers it knows.

    Args:
        file: an empty file; the schema goes into it with the first batch.
        part: of the file, for `BatchPlace`.
        statistics: the columns, in order.
        layers: (layer index, canonical name) of every layer that may come.
        header: of the run, for the schema's metadata.
    """

    def __init__(
        self,
        file: AppendFile,
        *,
        part: int,
        statistics: Sequence[str],
        layers: Sequence[tuple[int, str]],
        header: RunHeader,
    ) -> None:
        self.file = file
        self.layers = layers
        self._part = part
        self._statistics = statistics
        self._positions = {layer: position for position, layer in enumerate(layers)}
        self._schema = stream_schema(statistics, layers, header)
        self._plain_schema = self._schema.remove_metadata()
        self._labels: RowLabels | None = None

    def takes(self, observations: Sequence[Observation]) -> bool:
        """Whether the layers are among its own."""
        return all(map(self._positions.__contains__, map(_layer, observations)))

    def append(self, record: StepRecord, *, present: frozenset[str]) -> BatchPlace:
        """Writes the observations of a step, which together have the statistics `present`.

        Raises:
            OSError: they could not be written.
            ShapeError: a statistic that does not have one value a head.
        """
        packed = pack(
            record.observations,
            present=present,
            step=record.step,
            labels=self._label(record),
            columns=self._statistics,
            schema=self._plain_schema,
        )
        message = memoryview(packed.message)
        start = b"" if self.file.size else bytes(self._schema.serialize())
        offset = self.file.append(start + message if start else message) + len(start)
        return BatchPlace(
            self._part,
            offset,
            len(message),
            zlib.crc32(message),
            packed.statistics,
            packed.missing,
        )

    def end(self) -> None:
        """Marks the stream's end and closes the file."""
        if self.file.size:
            with contextlib.suppress(OSError):  # a reader takes the file's end for it, too
                self.file.append(END_OF_STREAM)
        self.file.close()

    def _label(self, record: StepRecord) -> RowLabels:
        key = label_key(record.observations, record.level)
        if self._labels is None or self._labels.key != key:
            self._labels = label_rows(record.observations, record.level, self._positions)
        return self._labels
