"""The verdict of a trend rule, layer by layer, worst first.

Shape suffixes: L layers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from stability_probe.alerts.history import History
from stability_probe.alerts.rule import Finding, Verdict

BURN_IN = 30  # steps of a phase before a trend is judged (early learning moves everything)
HOLDS = 2  # samples in a row: where 10 steps pass between two, one sample is not smoothed at all
RESTS = 50  # steps from the end of an episode until the same is news again


def trend_verdict(
    history: History,
    *,
    judged_L: npt.NDArray[np.bool_],
    found_L: npt.NDArray[np.bool_],
    badness_L: npt.NDArray[np.float64],
    finding: Callable[[int], Finding],
) -> Verdict:
    """Findings in order of falling badness, then the judged layers that are calm."""
    names = history.names
    found = np.flatnonzero(found_L & judged_L).tolist()
    found.sort(key=lambda i: (-badness_L[i], history.indices[i]))
    calm = np.flatnonzero(judged_L & ~found_L).tolist()
    verdict: dict[str | None, Finding | None] = {names[i]: finding(i) for i in found}
    return verdict | dict.fromkeys([names[i] for i in calm])
