"""What a run's header says of the run."""

from __future__ import annotations

import platform
from importlib import metadata

from stability_probe.plan import Plan
from stability_probe.records import LayerInfo, RunHeader, SiteReport
from stability_probe.stats.catalogue import CATALOGUE


def run_header(
    layers: tuple[LayerInfo, ...],
    plan: Plan,
    *,
    created: float,
    coverage: tuple[SiteReport, ...] = (),
) -> RunHeader:
    """The header of a run with these layers, created at so many seconds since the epoch."""
    return RunHeader(
        created=created,
        layers=layers,
        statistics={
            s.name: {"unit": s.unit, "pooling": s.pooling, "danger": s.danger}
            for s in CATALOGUE.values()
        },
        versions={
            "stability-probe": metadata.version("stability-probe"),
            "torch": metadata.version("torch"),
            "python": platform.python_version(),
        },
        plan=str(plan),
        coverage=coverage,
    )
