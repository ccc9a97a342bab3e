"""JSON values that survive the way to the disk and back, and that are checked when read.

JSON has no number that is not finite; here such a number is the string "nan", "inf" or "-inf"
where a number is expected, which every JSON parser accepts. What is read is not trusted: each
function takes a parsed value and gives it with its type, or raises ValueError.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Mapping
from typing import Any

_NOT_FINITE: Mapping[str, float] = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_INT64 = 2**63


def parse(data: bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: the bytes are not JSON, not an object, or nested too deeply.
    """
    try:
        return as_map(json.loads(data))
    except RecursionError as error:
        raise ValueError("JSON nested too deeply") from error


def dump(fields: Mapping[str, Any], *, indent: int | None = None) -> bytes:
    """ASCII JSON; strings with lone surrogates survive too, NumPy integers become plain ones."""
    separators = (",", ":") if indent is None else (",", ": ")
    return json.dumps(
        fields, allow_nan=False, indent=indent, separators=separators, default=operator.index
    ).encode()


def from_float(value: float | None) -> float | str | None:
    """A float as JSON can hold it."""
    if value is None or math.isfinite(value):
        return None if value is None else float(value)
    return str(float(value))


def as_float(value: Any) -> float | None:
    """The inverse of `from_float`; None stays None."""
    if value is None or type(value) is float:
        return value
    if type(value) is int:
        try:
            return float(value)
        except OverflowError as error:
            raise ValueError("a number too large for a float") from error
    if isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    raise _unexpected(value, "a number")


def as_number(value: Any) -> float:
    """The inverse of `from_float` where there is a number."""
    number = as_float(value)
    if number is None:
        raise _unexpected(value, "a number")
    return number


def as_int(value: Any) -> int:
    """A whole number that fits 64 bits."""
    if type(value) is int and -_INT64 <= value < _INT64:
        return value
    raise _unexpected(value, "a whole number")


def as_bool(value: Any) -> bool:
    """True or False."""
    if isinstance(value, bool):
        return value
    raise _unexpected(value, "true or false")


def as_text(value: Any) -> str:
    """A string."""
    if isinstance(value, str):
        return value
    raise _unexpected(value, "a string")


def as_list(value: Any) -> list[Any]:
    """A list."""
    if isinstance(value, list):
        return value
    raise _unexpected(value, "a list")


def as_map(value: Any) -> dict[str, Any]:
    """An object."""
    if isinstance(value, dict):
        return value
    raise _unexpected(value, "an object")


def _unexpected(value: Any, expected: str) -> ValueError:
    return ValueError(f"got {type(value).__name__}, expected {expected}")
