"""stability_probe: watches attention while a transformer trains, and warns before it diverges.

    import stability_probe as sp

    with sp.watch(model, "runs/exp1") as probe:
        for batch in loader:
            loss = train_step(batch)
            probe.step(loss=loss)

Importing this package imports neither torch nor anything else that is slow: names load on use.
"""

from __future__ import annotations

import importlib
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stability_probe.errors import (
        AlreadyWatchedError,
        BackendError,
        EvalModeError,
        LogDirectoryError,
        NoAttentionError,
        ProbeClosedError,
        RunNotFoundError,
        ShapeError,
        StabilityProbeError,
    )
    from stability_probe.plan import Plan, every, rotating
    from stability_probe.probe import Probe, watch
    from stability_probe.records import Alert, Level, Severity, State
    from stability_probe.replaying import replay
    from stability_probe.runlog.read import Run, load
    from stability_probe.stats.measure import measure

_HOMES = {
    "Alert": "records",
    "AlreadyWatchedError": "errors",
    "BackendError": "errors",
    "EvalModeError": "errors",
    "Level": "records",
    "LogDirectoryError": "errors",
    "NoAttentionError": "errors",
    "Plan": "plan",
    "Probe": "probe",
    "ProbeClosedError": "errors",
    "Run": "runlog.read",
    "RunNotFoundError": "errors",
    "Severity": "records",
    "ShapeError": "errors",
    "StabilityProbeError": "errors",
    "State": "records",
    "every": "plan",
    "load": "runlog.read",
    "measure": "stats.measure",
    "replay": "replaying",
    "rotating": "plan",
    "watch": "probe",
}

__all__ = [
    "Alert",
    "AlreadyWatchedError",
    "BackendError",
    "EvalModeError",
    "Level",
    "LogDirectoryError",
    "NoAttentionError",
    "Plan",
    "Probe",
    "ProbeClosedError",
    "Run",
    "RunNotFoundError",
    "Severity",
    "ShapeError",
    "StabilityProbeError",
    "State",
    "every",
    "load",
    "measure",
    "replay",
    "rotating",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    state = random.getstate()  # a library that draws when it is imported (rich) must not show
    try:
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    finally:
        random.setstate(state)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
