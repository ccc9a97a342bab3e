"""Which samples of a layer may be compared with each other.

A maximum over one sequence and one over 32 differ by up to 2.6 times with heavy-tailed norms,
and a logit before a soft-cap is another number than one after it. Mixing them would look
like growth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stability_probe.records import Observation
from stability_probe.stats.catalogue import MAX_LOGIT

Float32 = npt.NDArray[np.float32]

PATIENCE = 8  # samples of another kind in a row before a layer is judged by that kind


@dataclass(slots=True)
class Kind:
    """What one layer's logit samples are samples of.

    Attributes:
        statistic: the logit statistic that is read.
        sequences: sequences pooled into a sample; up to a factor of two is the same kind.
        rows: query rows pooled into a sample, likewise; 0 where that is not known.
        ranks: ranks pooled into a sample.
        strangers: how many of the newest samples in a row were of another kind.
    """

    statistic: str
    sequences: int
    ranks: int
    rows: int = 0
    strangers: int = 0

    def covers(self, observation: Observation) -> bool:
        """Whether an observation pools about as much as the layer's other samples."""
        return (
            observation.ranks == self.ranks
            and _alike(observation.sequences, self.sequences)
            and (not observation.rows or not self.rows or _alike(observation.rows, self.rows))
        )


def _alike(one: int, two: int) -> bool:
    return one == two or max(one, two) <= 2 * min(one, two)


def kind_of(observation: Observation) -> Kind | None:
    """The kind of an observation's logits; None where it has none."""
    for name in MAX_LOGIT:
        if _known(observation.values, name):
            return Kind(name, observation.sequences, observation.ranks, observation.rows)
    return None


def _known(values: Mapping[str, Float32], name: str) -> bool:
    return name in values and bool(np.isfinite(values[name]).any())
