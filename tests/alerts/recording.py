"""Builds synthetic runs for the tests of the rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from stability_probe.monitor import Monitor
from stability_probe.records import Alert, Level, Observation, State, StepRecord, StepScalars


def observation(layer: str, index: int = 0, **values: Any) -> Observation:
    """One layer's statistics; a scalar stands for one head."""
    arrays = {n: np.atleast_1d(np.asarray(v, dtype=np.float32)) for n, v in values.items()}
    pooled = {n: int(arrays.pop(n)[0]) for n in ("sequences", "ranks", "rows") if n in arrays}
    return Observation(layer, index, arrays, **pooled)


def record(
    step: int, *layers: Observation, level: Level = Level.DEFAULT, **scalars: Any
) -> StepRecord:
    return StepRecord(StepScalars(step=step, **scalars), tuple(layers), level)


def stream(
    steps: Iterable[int],
    layers: Mapping[str, Callable[[int], Mapping[str, Any] | None]],
    *,
    loss: Callable[[int], float | None] = lambda step: 2.0,
    measured: Callable[[int], bool] = lambda step: True,
    scalars: Callable[[int], Mapping[str, Any]] = lambda step: {},
) -> list[StepRecord]:
    """A run; a layer whose function gives None is not in that step's record."""
    records = []
    for step in steps:
        seen = []
        for index, (name, values) in enumerate(layers.items()):
            at_step = values(step) if measured(step) else None
            if at_step is not None:
                seen.append(observation(name, index, **at_step))
        records.append(record(step, *seen, loss=loss(step), **scalars(step)))
    return records


def watch(records: Iterable[StepRecord], rules: Any = None) -> list[Alert]:
    monitor = Monitor(rules)
    return [alert for r in records for alert in monitor.observe(r)]


def told(alerts: Iterable[Alert]) -> list[tuple[int, str, str]]:
    """Step, rule and severity of each firing alert."""
    return [(a.step, a.rule, str(a.severity)) for a in alerts if a.state is State.FIRING]


def over(alerts: Iterable[Alert]) -> list[tuple[int, str]]:
    """Step and rule of each resolved alert."""
    return [(a.step, a.rule) for a in alerts if a.state is State.RESOLVED]


def runaway(step: int, *, start: int = 200, rate: float = 1.02, base: float = 10.0) -> float:
    """A logit that stays and then grows by a rate per step."""
    return base * rate ** max(step - start, 0)
