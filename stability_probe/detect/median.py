"""The median that ignores missing samples.

Shape suffixes: N rows, M samples in a row.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]


def row_medians(values_NM: Float64) -> Float64:
    """Median of each row, [N]; a NaN is a missing sample, and a row of them gives NaN.

    The same as `numpy.nanmedian` over axis 1, without its warning and several times faster on
    some dozen rows, because it sorts all rows at once.

    Args:
        values_NM: samples in any unit, finite or NaN, M > 0.
    """
    ordered_NM = np.sort(values_NM, axis=1)  # NaN sorts last
    samples = values_NM.shape[1]
    if not np.isnan(ordered_NM[:, -1]).any():  # the usual case: nothing is missing
        low_N, high_N = ordered_NM[:, (samples - 1) // 2], ordered_NM[:, samples // 2]
    else:
        known_N = samples - np.count_nonzero(np.isnan(values_NM), axis=1)
        rows_N = np.arange(len(values_NM))
        low_N = ordered_NM[rows_N, np.maximum(known_N - 1, 0) // 2]
        high_N = ordered_NM[rows_N, known_N // 2]
    medians_N: Float64 = (low_N + high_N) / 2
    return medians_N
