"""Measured records that are still looked back at, to say what grew and why.

Shape suffix: H heads.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stability_probe.alerts.comparable import Kind
from stability_probe.detect.median import row_medians
from stability_probe.detect.series import SMOOTHING
from stability_probe.records import Observation, StepRecord

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Frame:
    """One measured record, by layer."""

    step: int
    layers: dict[str, Observation]


class Frames:
    """The records of the near past, and of the steps at which the far past is kept."""

    def __init__(self) -> None:
        self._frames: deque[_Frame] = deque()

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def oldest(self) -> int:
        """The step of the oldest record of the near or far past; the frames are not empty."""
        return self._frames[0].step

    def clear(self) -> None:
        """Forget every record."""
        self._frames.clear()

    def append(self, record: StepRecord, *, near: int, far: set[int]) -> None:
        """Keep a record, and of the others those from `near` on and those of the steps `far`."""
        self._frames.append(_Frame(record.step, {o.layer: o for o in record.observations}))
        stale = [frame for frame in self._frames if frame.step < near and frame.step not in far]
        if stale:
            gone = {frame.step for frame in stale}
            self._frames = deque(f for f in self._frames if f.step not in gone)

    def rewind(self, step: int) -> None:
        """Forget the records from `step` on."""
        while self._frames and self._frames[-1].step >= step:
            self._frames.pop()

    def heads(
        self, layer: str, statistic: str, *, step: int, smooth: bool, kind: Kind | None
    ) -> Float64:
        """One statistic per head about a step, [H]; empty where it was not recorded.

        Args:
            layer: the layer's name.
            statistic: the statistic's name.
            step: the step, not the last one that counts.
            smooth: the median of the 10 steps up to it, else the latest sample alone.
            kind: of the samples that count; None for any.
        """
        rows: list[Float64] = []
        for frame in reversed(self._frames):
            if frame.step > step:
                continue
            if frame.step <= step - SMOOTHING and (rows or not smooth):
                break
            seen = frame.layers.get(layer)
            if seen is None or statistic not in seen.values or (kind and not kind.covers(seen)):
                continue
            row_H = seen.values[statistic].astype(np.float64)
            if rows and len(row_H) != len(rows[0]):
                break
            rows.append(np.where(np.isfinite(row_H), row_H, np.nan))
            if not smooth:
                break
        return row_medians(np.array(rows).T) if rows else np.empty(0)
