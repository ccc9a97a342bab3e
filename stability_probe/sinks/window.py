"""One number a tag for all that happened since the last written point.

A chart that shows every hundredth value hides a spike of one step. A point here is the extremum
of its whole window instead, so the spike is in the chart however far apart the points are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Fold = Literal["max", "min", "sum", "mean"]

_COMBINE: Mapping[Fold, Callable[[float, float], float]] = {
    "max": max,
    "min": min,
    "sum": lambda a, b: a + b,
    "mean": lambda a, b: a + b,
}


@dataclass(slots=True)
class _Cell:
    fold: Fold
    value: float
    count: int = 1

    def result(self) -> float:
        return self.value / self.count if self.fold == "mean" else self.value


class Window:
    """Folds values into one a tag, until `drain` empties it."""

    def __init__(self) -> None:
        self._cells: dict[str, _Cell] = {}

    def add(self, tag: str, value: float | None, *, fold: Fold) -> None:
        """Fold one value in. None, NaN and infinity are absent and leave no trace."""
        if value is None or not math.isfinite(value):
            return
        cell = self._cells.get(tag)
        if cell is None:
            self._cells[tag] = _Cell(fold, value)
            return
        cell.value = _COMBINE[fold](cell.value, value)
        cell.count += 1

    def drain(self) -> dict[str, float]:
        """The folded values, in the order in which the tags came. The window is empty after."""
        cells, self._cells = self._cells, {}
        return {tag: cell.result() for tag, cell in cells.items()}

    def __bool__(self) -> bool:
        return bool(self._cells)
