"""When will a growing number reach a limit, if it goes on growing as it did?

    ln x = a + b t + noise,  steps left = ln(limit / x) / b

A straight line through the logarithms of the newest samples (ordinary least squares), with the
interval that two standard errors of its slope span; extrapolation of logits in this way is in
Wortsman et al. 2023, arXiv:2309.14322.

Shape suffixes: N samples, C columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

LEAST = 8  # samples of a column for a slope to be worth something
ERRORS = 2.0  # standard errors of the slope on each side


@dataclass(frozen=True, slots=True, eq=False)
class Slopes:
    """Growth of the logarithm per step, [C]; NaN where there are too few samples.

    Attributes:
        middle: the fitted slope.
        low: two standard errors below.
        high: two standard errors above.
    """

    middle: Float64
    low: Float64
    high: Float64


def log_slopes(steps_N: npt.NDArray[np.int64], samples_NC: Float64) -> Slopes:
    """Fit the logarithm of each column against the steps.

    Args:
        steps_N: optimizer steps, rising.
        samples_NC: positive values; what is not positive or not finite counts as missing.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        log_NC = np.log(samples_NC)
        known_NC = np.isfinite(log_NC)
        count_C = np.count_nonzero(known_NC, axis=0)
        y_NC = np.where(known_NC, log_NC, 0.0)
        t_NC = np.where(known_NC, steps_N[:, None] - float(steps_N[-1]), 0.0)
        t_NC = np.where(known_NC, t_NC - t_NC.sum(axis=0) / count_C, 0.0)
        y_NC = np.where(known_NC, y_NC - y_NC.sum(axis=0) / count_C, 0.0)
        spread_C = (t_NC**2).sum(axis=0)
        slope_C = (t_NC * y_NC).sum(axis=0) / spread_C
        left_C = ((y_NC - slope_C * t_NC) ** 2).sum(axis=0) / (count_C - 2)
        error_C = ERRORS * np.sqrt(left_C / spread_C)
    slope_C = np.where(count_C >= LEAST, slope_C, np.nan)
    return Slopes(slope_C, slope_C - error_C, slope_C + error_C)


def steps_left(distance: float, slope: float) -> float:
    """Steps until a logarithm has gone so far at a slope; infinite where it does not grow."""
    return distance / slope if slope > 0 else np.inf
