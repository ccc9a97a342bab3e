"""Made-up runs, and what a figure shows: its lines, crosses, ticks and words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stability_probe.records import Alert, Severity, State

Points = list[tuple[float, float | None]]


@dataclass(frozen=True)
class MadeUpRun:
    """As a loaded run, without a file."""

    scalars: pd.DataFrame
    table: pd.DataFrame
    alerts: tuple[Alert, ...] = ()

    def frame(self, *, bounds: bool = True) -> pd.DataFrame:
        return self.table


def make_run(
    losses: Mapping[int, float | None],
    statistics: Mapping[str, Mapping[int, list[list[float]]]],
    alerts: Sequence[Alert] = (),
    **scalars: Mapping[int, float],
) -> MadeUpRun:
    """A run from {step: loss} and {statistic: {step: [layer][head]}}."""
    table: dict[str, list[Any]] = {"step": list(losses), "loss": list(losses.values())}
    for name, column in scalars.items():
        table[name] = [column.get(step, np.nan) for step in losses]
    rows: dict[tuple[int, int, int], dict[str, float]] = {}
    for name, by_step in statistics.items():
        for step, layers in by_step.items():
            for layer, heads in enumerate(layers):
                for head, value in enumerate(heads):
                    rows.setdefault((step, layer, head), {})[name] = value
    long = pd.DataFrame(
        [
            {"step": step, "layer": f"blocks.{layer}.attn", "head": head, **values}
            for (step, layer, head), values in sorted(rows.items())
        ],
        columns=["step", "layer", "head", *statistics],
    )
    long["layer"] = pd.Categorical(long["layer"], categories=long["layer"].unique())
    long = long.astype(dict.fromkeys(statistics, np.float32))
    return MadeUpRun(pd.DataFrame(table).astype({"loss": float}), long, tuple(alerts))


def alert(step: int, rule: str, severity: str, **fields: Any) -> Alert:
    return Alert(step=step, rule=rule, severity=Severity(severity), **fields)


def resolved(step: int, rule: str, severity: str, **fields: Any) -> Alert:
    return alert(step, rule, severity, state=State.RESOLVED, **fields)


def lines(axes: Axes, name: str) -> list[Points]:
    """The (x, y) points of every line of that name; NaN as None."""
    found = [line for line in axes.get_lines() if line.get_label() == name]
    return [
        [
            (float(x), None if np.isnan(y) else float(y))
            for x, y in zip(*map(np.asarray, line.get_data()), strict=True)
        ]
        for line in found
    ]


def line(axes: Axes, name: str) -> Points:
    """The points of the one line of that name."""
    [points] = lines(axes, name)
    return points


def steps_of(axes: Axes, name: str) -> list[float]:
    """The steps at which marks or vertical lines of that name stand."""
    return sorted({x for points in lines(axes, name) for x, _ in points})


def words(figure: Figure) -> str:
    """All text of the figure."""
    texts = [figure.get_suptitle()]
    for axes in figure.axes:
        texts += [axes.get_title(loc="left"), *(t.get_text() for t in axes.texts)]
    return "\n".join(texts)


def drawn(figure: Figure, folder: Path) -> None:
    """The figure renders: nothing in it waits to fail."""
    figure.savefig(folder / "figure.png", dpi=30)
    assert (folder / "figure.png").stat().st_size > 1_000
