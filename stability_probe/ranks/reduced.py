"""A pooled step as the record of the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from stability_probe.ranks.layout import Layout
from stability_probe.ranks.packing import Merged
from stability_probe.records import Level, Observation, StepRecord, StepScalars
from stability_probe.stats.accumulators import MAXIMA, MINIMA, Accumulators
from stability_probe.stats.finish import finish


@dataclass(frozen=True, slots=True, eq=False)
class Reduced:
    """One step over all ranks."""

    layout: Layout
    merged: Merged

    def record(self, own: StepScalars) -> StepRecord:
        """The record; of `own`, this rank's, is what all ranks have alike (step, phase, ...)."""
        ranks_H, full_H, _ = self.merged.counts
        full = bool(ranks_H.any() and (ranks_H == full_H).all())
        observations = tuple(self._observations(full=full))
        numbers = self.merged.numbers
        scalars = replace(
            own,
            first_bad=self.merged.first_bad,
            loss=numbers.get("loss"),
            grad_norm=numbers.get("grad_norm"),
            eval_loss=numbers.get("eval_loss"),
        )
        measured = Level.FULL if full else Level.DEFAULT
        return StepRecord(scalars, observations, measured if observations else Level.SENTINEL)

    def _observations(self, *, full: bool) -> Iterator[Observation]:
        """A layer that no rank measured gives none; a head that none did is absent in it."""
        if not self.merged.counts.any():
            return
        values = self._finished(full=full)
        ranks_H, _, sequences_H = self.merged.counts
        for index, layer in enumerate(self.layout.layers):
            here = slice(layer.start, layer.start + layer.heads)
            if ranks_H[here].any():
                yield Observation(
                    layer.name,
                    index,
                    {name: of_H[here] for name, of_H in values.items()},
                    sequences=int(sequences_H[here].max()),
                    ranks=int(ranks_H[here].max()),
                )

    def _finished(self, *, full: bool) -> dict[str, np.ndarray]:
        extrema = torch.from_numpy(self.merged.extrema)
        maxima, minima, peak = extrema.tensor_split([len(MAXIMA), len(MAXIMA) + len(MINIMA)])
        sums = torch.from_numpy(self.merged.sums)
        values = finish(Accumulators(maxima, minima, sums, peak), full=full)
        missing_H = self.merged.counts[0] == 0
        arrays = {name: tensor.numpy() for name, tensor in values.items()}
        for array in arrays.values():
            array[missing_H] = np.nan
        return arrays
