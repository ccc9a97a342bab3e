"""Where the general way of shrinking or feeding does not fit a model type: what fits instead."""

from __future__ import annotations

from typing import Any

CONFIG: dict[str, dict[str, Any]] = {}


def applied(model_type: str, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the type's own entries put over it; nested ones are merged."""
    return _merged(config, CONFIG.get(model_type, {}))


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        inside = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = _merged(out[key], value) if inside else value
    return out
