"""Growth of the largest logit, split into the factors it is a product of.

    logit = scale x |q| x |k| x cosine

so the growth of a logit is the product of its factors' growths.
Shape suffixes: H heads.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

PEAK_FACTORS = {
    "scale": "scale",
    "|q|": "peak_q_norm",
    "|k|": "peak_k_norm",
    "cosine": "peak_cosine",
}
NORM_FACTORS = {"|q|": "q_norm_max", "|k|": "k_norm_max"}


def growth_factors(
    then: Mapping[str, Float64], now: Mapping[str, Float64], *, statistics: Mapping[str, str]
) -> dict[str, float]:
    """Growth of each factor: the geometric mean over heads of now / then, of absolute values.

    Only heads that have every factor at both times count, so that the growths multiply to the
    growth of the factors' product.

    Args:
        then: statistic to its value per head [H], earlier.
        now: the same, now.
        statistics: factor to the name of its statistic, such as `PEAK_FACTORS`.

    Returns:
        Growth by factor; empty where a statistic was not recorded or no head has them all.
    """
    ratios = []
    for name in statistics.values():
        if name not in then or name not in now or len(then[name]) != len(now[name]):
            return {}
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios.append(np.log(np.abs(now[name] / then[name])))
    logs_FH = np.array(ratios)
    usable_H = np.isfinite(logs_FH).all(axis=0)
    if not usable_H.any():
        return {}
    grown_F = np.exp(logs_FH[:, usable_H].mean(axis=1))
    return {factor: float(g) for factor, g in zip(statistics, grown_F, strict=True)}
