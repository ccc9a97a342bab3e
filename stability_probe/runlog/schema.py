"""What lies in a run directory, and under which names.

    <run>/plugins/stability_probe/
      run.json                                                the header (`RunHeader`), JSON
      events-r<rank>-<start>-<session>-<part>.jsonl           one JSON object a line
      observations-r<rank>-<start>-<session>-<part>.arrows    an Arrow IPC stream, zstd

`<start>` is the step of a file's first event, `<session>` names one process start (hexadecimal
of fixed width, sorts by creation), `<part>` counts the files of a session. A session whose first
step is s supersedes every step >= s of the sessions before it.

**Events.** `{"kind":"step",...}` holds the scalars of one optimizer step, measured or not,
`{"kind":"alert",...}` one alert. Keys at their default are left out. Numbers that are not finite
are the strings "nan", "inf", "-inf" where a number is expected. The last key of a line, `crc`, is
the CRC-32 of all the bytes before `,"crc":`. The step line of a measured step has a `batch`: in
which part its record batch lies, at which offset, of which length and CRC-32, and which
statistics are in it (`missing`: those that a layer lacks). It is written after the batch, so that
it commits the step, and it is the index of the Arrow file.

**Observations.** One record batch a measured step, one row a (layer, head); columns `IDENTITY`,
then one nullable float32 column a statistic (`entropy_hist`: a list of 16). Null is absent or not
measured. `layer` counts in the table of layers in the stream's schema metadata, `LAYERS_KEY`,
where the header lies too: a stream explains itself. Steps with the same set of statistics share a
stream with just these columns, since an empty column costs as much time as a full one; where there
are more than a few sets, the rest share one with every column of the catalogue. A layer without
any value has one row, head -1.
"""

from __future__ import annotations

import os
import re
import secrets
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from stability_probe.records import LayerInfo, Level, RunHeader, SiteReport
from stability_probe.runlog import values as js
from stability_probe.stats.catalogue import CATALOGUE, HISTOGRAM_BINS

SCHEMA_VERSION = 1
FOLDER = Path("plugins") / "stability_probe"
HEADER_FILE = "run.json"
HISTOGRAM, BINS = "entropy_hist", HISTOGRAM_BINS
LEVELS = tuple(Level)  # the column `level` counts in it

IDENTITY: Mapping[str, pa.DataType] = {
    "step": pa.int64(),
    "layer": pa.int32(),
    "layer_index": pa.int32(),
    "head": pa.int16(),
    "sequences": pa.int32(),
    "ranks": pa.int32(),
    "query_rows": pa.int64(),
    "level": pa.int8(),
}
VERSION_KEY = b"stability_probe.schema_version"
HEADER_KEY = b"stability_probe.header"
LAYERS_KEY = b"stability_probe.layers"
CRC_KEY = b"stability_probe.crc"  # of the columns and of the other keys

EXTENSION: Mapping[str, str] = {"events": "jsonl", "observations": "arrows"}
_NAME = re.compile(
    r"(?P<kind>events|observations)-r(?P<rank>\d{1,9})-(?P<start>-?\d{1,19})"
    r"-(?P<session>[0-9a-f]{32})-(?P<part>\d{1,9})\.(?:jsonl|arrows)"
)


class FileName(NamedTuple):
    """The name of one file of a run; sorts by rank, then session, then part."""

    rank: int
    session: str
    part: int
    kind: str  # "events" or "observations"
    start: int

    def __str__(self) -> str:
        """The name on disk."""
        place = f"r{self.rank}-{self.start}-{self.session}-{self.part:04d}"
        return f"{self.kind}-{place}.{EXTENSION[self.kind]}"

    @classmethod
    def parse(cls, name: str) -> FileName | None:
        """The inverse of `str`; None where the name is not one of a run's files."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        rank, part, start = int(found["rank"]), int(found["part"]), int(found["start"])
        parsed = cls(rank, found["session"], part, found["kind"], start)
        return parsed if str(parsed) == name else None


def new_session(names: Iterable[str]) -> str:
    """A session that sorts after those of the file `names`, also when the clock went back."""
    latest = max((f.session[:16] for f in map(FileName.parse, names) if f), default="0")
    stamp = min(max(time.time_ns(), int(latest, 16) + 1), 2**64 - 1)
    return f"{stamp:016x}{os.getpid() & 0xFFFFFFFF:08x}{secrets.token_hex(4)}"


def stream_schema(
    statistics: Sequence[str], layers: Sequence[tuple[int, str]], header: RunHeader
) -> pa.Schema:
    """The schema of an observation stream.

    Args:
        statistics: names of the statistics' columns, in order.
        layers: (layer index, canonical name); the column `layer` counts in it.
        header: lies in the metadata, should run.json be lost.
    """
    fields = [pa.field(name, kind, nullable=False) for name, kind in IDENTITY.items()]
    fields += [pa.field(name, statistic_type(name)) for name in statistics]
    metadata = {
        VERSION_KEY: str(SCHEMA_VERSION).encode(),
        HEADER_KEY: encode_header(replace(header, coverage=())),  # that is in run.json alone
        LAYERS_KEY: js.dump({"layers": [[index, name] for index, name in layers]}),
    }
    plain = pa.schema(fields, metadata=metadata)
    return plain.with_metadata(metadata | {CRC_KEY: str(schema_crc(plain)).encode()})


def in_order(statistics: Iterable[str]) -> tuple[str, ...]:
    """The names in the catalogue's order; those it does not know at the end."""
    place = {name: i for i, name in enumerate(CATALOGUE)}
    return tuple(sorted(statistics, key=lambda name: (place.get(name, len(place)), name)))


def statistic_type(name: str) -> pa.DataType:
    """The Arrow type of a statistic's column."""
    return pa.list_(pa.float32(), BINS) if name == HISTOGRAM else pa.float32()


def schema_crc(schema: pa.Schema) -> int:
    """CRC-32 over the columns' names and types, and over the metadata without its own entry."""
    columns = [f"{field.name}:{field.type}" for field in schema]
    entries = sorted((k, v) for k, v in (schema.metadata or {}).items() if k != CRC_KEY)
    return zlib.crc32(repr((columns, entries)).encode())


def decode_layers(schema: pa.Schema) -> tuple[tuple[int, str], ...]:
    """The table of layers in a stream's metadata: (layer index, canonical name).

    Raises:
        ValueError: the metadata does not hold one.
    """
    table = js.as_list(js.parse((schema.metadata or {}).get(LAYERS_KEY, b"")).get("layers"))
    return tuple((js.as_int(index), js.as_text(name)) for index, name in map(js.as_list, table))


def encode_header(header: RunHeader) -> bytes:
    """The header as JSON."""
    fields = {
        "schema_version": int(header.schema_version),
        "created": js.from_float(header.created),
        "layers": [asdict(layer) for layer in header.layers],
        "statistics": {name: dict(about) for name, about in header.statistics.items()},
        "versions": dict(header.versions),
        "plan": header.plan,
        "coverage": [asdict(r) | {"error": js.from_float(r.error)} for r in header.coverage],
    }
    return js.dump(fields, indent=1)


def decode_header(data: bytes) -> RunHeader:
    """The inverse of `encode_header`. Unknown keys are ignored, missing ones at their default.

    Raises:
        ValueError: the bytes are not a run's header.
    """
    fields = js.parse(data)
    statistics = js.as_map(fields.get("statistics", {}))
    return RunHeader(
        schema_version=js.as_int(fields.get("schema_version")),
        created=js.as_number(fields.get("created", 0.0)),
        layers=tuple(map(_decode_layer, js.as_list(fields.get("layers", [])))),
        statistics={name: _texts(about) for name, about in statistics.items()},
        versions=_texts(fields.get("versions", {})),
        plan=js.as_text(fields.get("plan", "")),
        coverage=tuple(map(_decode_site, js.as_list(fields.get("coverage", [])))),
    )


def _decode_layer(value: Any) -> LayerInfo:
    fields = js.as_map(value)
    return LayerInfo(
        name=js.as_text(fields.get("name")),
        index=js.as_int(fields.get("index")),
        heads=js.as_int(fields.get("heads", 0)),
        seam=js.as_text(fields.get("seam", "")),
        module=js.as_text(fields.get("module", "")),
    )


def _decode_site(value: Any) -> SiteReport:
    fields = js.as_map(value)

    def text(name: str) -> str:
        return js.as_text(fields.get(name, ""))

    def count(name: str) -> int:
        return js.as_int(fields.get(name, 0))

    return SiteReport(
        text("layer"), text("module"), text("seam"), count("heads"), text("sees"),
        count("calls"), text("attends"), count("key_heads"), text("verified"),
        js.as_float(fields.get("error")), text("reason"),
    )  # fmt: skip


def _texts(value: Any) -> dict[str, str]:
    return {name: js.as_text(text) for name, text in js.as_map(value).items()}
