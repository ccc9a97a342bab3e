"""One statistic of many layers as one matrix.

Shape suffixes: O observations, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from stability_probe.records import Observation

Float64 = npt.NDArray[np.float64]

_ABSENT = np.empty(0, dtype=np.float32)


def gather(observations: Sequence[Observation], statistics: Sequence[str]) -> Float64:
    """The named statistic of each observation, one per row, [O, H] with H the most heads.

    NaN where it was not measured, is absent, or the layer has fewer heads. Infinite values
    are kept.

    Args:
        observations: the layers of one record.
        statistics: the name to take from each, as long as the observations.
    """
    rows = [o.values.get(s, _ABSENT) for o, s in zip(observations, statistics, strict=True)]
    widths = {len(row) for row in rows}
    if len(widths) == 1 and widths != {0}:
        return np.concatenate(rows, dtype=np.float64).reshape(len(rows), -1)
    matrix_OH = np.full((len(rows), max(widths, default=0) or 1), np.nan)
    for i, row in enumerate(rows):
        matrix_OH[i, : len(row)] = row
    return matrix_OH
