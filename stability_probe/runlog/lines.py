"""One line of the events file: a step's scalars or an alert, sealed with a checksum.

`schema.py` describes the lines.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from stability_probe.records import (
    Alert,
    FirstBad,
    Level,
    Origin,
    Severity,
    State,
    StepRecord,
    StepScalars,
)
from stability_probe.runlog import values as js

T = TypeVar("T")
_SEAL = b',"crc":'


@dataclass(frozen=True, slots=True)
class BatchPlace:
    """Where the record batch of a measured step lies, and which statistics it holds."""

    part: int  # of the same session
    offset: int  # bytes
    size: int  # bytes
    crc: int  # CRC-32 of these bytes
    statistics: tuple[str, ...] | None  # None, when read: no line says so
    missing: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # observation -> lacks


@dataclass(frozen=True, slots=True)
class StepLine:
    """A step as the events file knows it."""

    scalars: StepScalars
    level: Level = Level.SENTINEL
    batch: BatchPlace | None = None


def encode_step(record: StepRecord, batch: BatchPlace | None) -> bytes:
    """The line of a step; `batch` where it was measured."""
    s = record.scalars
    fields: dict[str, Any] = {"kind": "step", "step": int(s.step)}
    numbers = {name: js.from_float(getattr(s, name)) for name in _NUMBERS}
    fields |= {name: number for name, number in numbers.items() if number is not None}
    if s.skipped:
        fields["skipped"] = True
    if s.phase:
        fields["phase"] = s.phase
    if s.first_bad:
        fields["first_bad"] = [[getattr(b, name) for name in _FIRST_BAD] for b in s.first_bad]
    fields["wall_time"] = js.from_float(s.wall_time)
    fields["level"] = record.level
    if batch is not None:
        fields["batch"] = {name: getattr(batch, name) for name in batch.__slots__}
    return _seal(fields)


def encode_alert(alert: Alert) -> bytes:
    """The line of an alert."""
    numbers = {"value": js.from_float(alert.value), "limit": js.from_float(alert.limit)}
    heads = [int(head) for head in alert.heads]
    fields = alert.to_dict() | numbers | {"step": int(alert.step), "heads": heads}
    return _seal({"kind": "alert"} | fields)


def decode_line(line: bytes) -> StepLine | Alert:
    """The inverse of `encode_step` and `encode_alert`, without the line's end.

    Raises:
        ValueError: the line is torn, altered, or of a kind unknown to this version.
    """
    body, seal, crc = line.rpartition(_SEAL)
    if not seal or crc != b"%d}" % zlib.crc32(body):
        raise ValueError("the checksum is not that of the line")
    fields = js.parse(body + b"}")
    kind = fields.get("kind")
    if kind == "step":
        return _decode_step(fields)
    if kind == "alert":
        return _decode_alert(fields)
    raise ValueError(f"a line of an unknown kind, {kind!r:.40}")


def _seal(fields: Mapping[str, Any]) -> bytes:
    body = js.dump(fields)[:-1]
    return b"%b%b%d}\n" % (body, _SEAL, zlib.crc32(body))


_NUMBERS = ("loss", "grad_norm", "eval_loss", "learning_rate")
_FIRST_BAD = ("layer", "layer_index", "tensor", "step", "explained")


def _decode_step(fields: dict[str, Any]) -> StepLine:
    scalars = StepScalars(
        step=js.as_int(fields.get("step")),
        loss=js.as_float(fields.get("loss")),
        grad_norm=js.as_float(fields.get("grad_norm")),
        eval_loss=js.as_float(fields.get("eval_loss")),
        learning_rate=js.as_float(fields.get("learning_rate")),
        skipped=js.as_bool(fields.get("skipped", False)),
        phase=js.as_text(fields.get("phase", "")),
        first_bad=tuple(_decode_first_bad(b) for b in js.as_list(fields.get("first_bad", []))),
        wall_time=js.as_number(fields.get("wall_time", 0.0)),
    )
    level = Level(js.as_text(fields.get("level")))
    batch = fields.get("batch")
    return StepLine(scalars, level, None if batch is None else _decode_place(batch))


def _decode_first_bad(value: Any) -> FirstBad:
    layer, layer_index, tensor, step, explained = js.as_list(value)
    return FirstBad(
        js.as_text(layer),
        js.as_int(layer_index),
        js.as_text(tensor),
        js.as_int(step),
        js.as_bool(explained),
    )


def _decode_place(value: Any) -> BatchPlace:
    fields = js.as_map(value)
    missing = js.as_map(fields.get("missing", {}))
    return BatchPlace(
        part=js.as_int(fields.get("part")),
        offset=js.as_int(fields.get("offset")),
        size=js.as_int(fields.get("size")),
        crc=js.as_int(fields.get("crc")),
        statistics=_texts(fields.get("statistics")),
        missing={int(position): _texts(names) for position, names in missing.items()},
    )


def _decode_alert(fields: dict[str, Any]) -> Alert:
    known = {name: check(fields[name]) for name, check in _ALERT.items() if name in fields}
    try:
        return Alert.from_dict(known)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not an alert: {error}") from error


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(js.as_text, js.as_list(value)))


def _ints(value: Any) -> tuple[int, ...]:
    return tuple(map(js.as_int, js.as_list(value)))


def _optional(check: Callable[[Any], T]) -> Callable[[Any], T | None]:
    return lambda value: None if value is None else check(value)


_ALERT: Mapping[str, Callable[[Any], Any]] = {
    "step": js.as_int,
    "rule": js.as_text,
    "severity": Severity,
    "state": State,
    "layer": _optional(js.as_text),
    "layer_index": _optional(js.as_int),
    "heads": _ints,
    "statistic": _optional(js.as_text),
    "value": js.as_float,
    "limit": js.as_float,
    "window": _optional(_ints),
    "cause": js.as_text,
    "remedies": _texts,
    "message": js.as_text,
    "origin": Origin,
    "superseded": js.as_bool,
}
