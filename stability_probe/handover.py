"""A step's accumulators on their way to the host, to be merged with those of other ranks.

Shape suffix: H heads of all layers of a part, side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stability_probe.stats.accumulators import Accumulators, concatenate
from stability_probe.transfer import HostCopy


@dataclass(frozen=True, slots=True)
class HeadBlock:
    """Which heads of one layer a rank has measured.

    Attributes:
        layer: its name.
        heads: how many are here.
        offset: number of the first one among all heads of the layer; None where the layer has
            more heads than are here, and which ones these are is not known.
        all_heads: of the layer, over all ranks.
        sequences: sequences pooled into them.
        rows: query rows of each head, likewise.
        replica: another rank measures the same heads of the same data.
    """

    layer: str
    heads: int
    offset: int | None = 0
    all_heads: int = 0
    sequences: int = 0
    rows: int = 0
    replica: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Handover:
    """The accumulators of the layers on one device.

    Attributes:
        blocks: the layers, in the order of their heads.
        extrema: float32 [maxima, then minima, then the peak; H].
        sums: float64 [sums, H].
    """

    blocks: tuple[HeadBlock, ...]
    extrema: HostCopy
    sums: HostCopy

    @property
    def ready(self) -> bool:
        """Whether reading would not wait for a device."""
        return self.extrema.ready and self.sums.ready


def hand_over(blocks: Sequence[HeadBlock], parts: Sequence[Accumulators]) -> Handover:
    """Starts the copies of accumulators that lie on one device; `parts` as in `blocks`."""
    together = concatenate(parts)
    extrema = torch.cat((together.maxima, together.minima, together.peak))
    return Handover(tuple(blocks), HostCopy(extrema), HostCopy(together.sums))
