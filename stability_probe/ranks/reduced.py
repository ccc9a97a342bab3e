"""A pooled step as the record of the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from stability_probe.ranks.layout import Layout
from stability_probe.ranks.packing import Merged
from stability_probe.records import FirstBad, Level, Observation, StepRecord, StepScalars
from stability_probe.stats.accumulators import MAXIMA, MINIMA, Accumulators
from stability_probe.stats.finish import finish


@dataclass(frozen=True, slots=True, eq=False)
class Reduced:
    """One step over all ranks."""

    layout: Layout
    merged: Merged

    def record(
        self,
        own: StepScalars,
        here: Sequence[Observation] = (),
        bad_here: Sequence[FirstBad] = (),
    ) -> StepRecord:
        """The record of the step.

        Args:
            own: this rank's; taken over is what all ranks have alike (step, phase, ...).
            here: this rank's observations. Those of layers that are not pooled follow the
                others, as what one rank has seen.
            bad_here: this rank's first non-finite values, for the same layers.
        """
        ranks_H, full_H, _ = self.merged.counts
        full = bool(ranks_H.any() and (ranks_H == full_H).all())
        pooled, shift = self.layout.by_name, len(self.layout.layers)
        own_seen = [
            replace(o, layer_index=shift + o.layer_index) for o in here if o.layer not in pooled
        ]
        own_bad = [
            replace(b, layer_index=shift + b.layer_index) for b in bad_here if b.layer not in pooled
        ]
        observations = (*self._observations(full=full), *own_seen)
        numbers = self.merged.numbers
        scalars = replace(
            own,
            first_bad=(*self.merged.first_bad, *own_bad),
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
