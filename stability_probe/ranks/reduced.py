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
    """One step over all ranks, the same on each of them.

    Attributes:
        layout: of the layers.
        merged: what all ranks sent.
        level: the lowest of those who measured.
        observations: of the layers in the layout.
    """

    layout: Layout
    merged: Merged
    level: Level
    observations: tuple[Observation, ...]

    @classmethod
    def of(cls, layout: Layout, merged: Merged) -> Reduced:
        """Finishes the statistics of a merged step."""
        ranks_H, full_H, *_ = merged.counts
        full = bool(ranks_H.any() and (ranks_H == full_H).all())
        observations = tuple(_observations(layout, merged, full=full))
        measured = Level.FULL if full else Level.DEFAULT
        return cls(layout, merged, measured if observations else Level.SENTINEL, observations)

    @property
    def common(self) -> StepRecord:
        """What every rank knows of the step: to decide by what comes next."""
        scalars = StepScalars(
            step=self.merged.steps[0],
            first_bad=self.merged.first_bad,
            phase=str(self.merged.phase_start),
        )
        return StepRecord(scalars, self.observations, self.level)

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
        pooled, shift = self.layout.by_name, len(self.layout.layers)
        own_seen = [
            replace(o, layer_index=shift + o.layer_index) for o in here if o.layer not in pooled
        ]
        own_bad = [
            replace(b, layer_index=shift + b.layer_index) for b in bad_here if b.layer not in pooled
        ]
        observations = (*self.observations, *own_seen)
        numbers = self.merged.numbers
        scalars = replace(
            own,
            first_bad=(*self.merged.first_bad, *own_bad),
            loss=numbers.get("loss"),
            grad_norm=numbers.get("grad_norm"),
            eval_loss=numbers.get("eval_loss"),
        )
        level = self.level if self.observations or not own_seen else Level.DEFAULT
        return StepRecord(scalars, observations, level)


def _observations(layout: Layout, merged: Merged, *, full: bool) -> Iterator[Observation]:
    """A layer that no rank measured gives none; a head that none did is absent in it."""
    if not merged.counts.any():
        return
    values = _finished(merged, full=full)
    ranks_H, _, sequences_H, rows_H = merged.counts
    for index, layer in enumerate(layout.layers):
        here = slice(layer.start, layer.start + layer.heads)
        if ranks_H[here].any():
            yield Observation(
                layer.name,
                index,
                {name: of_H[here] for name, of_H in values.items()},
                sequences=int(sequences_H[here].max()),
                ranks=int(ranks_H[here].max()),
                rows=int(rows_H[here].max()),
            )


def _finished(merged: Merged, *, full: bool) -> dict[str, np.ndarray]:
    extrema = torch.from_numpy(merged.extrema)
    maxima, minima, peak = extrema.tensor_split([len(MAXIMA), len(MAXIMA) + len(MINIMA)])
    sums = torch.from_numpy(merged.sums)
    values = finish(Accumulators(maxima, minima, sums, peak), full=full)
    missing_H = merged.counts[0] == 0
    arrays = {name: tensor.numpy() for name, tensor in values.items()}
    for array in arrays.values():
        array[missing_H] = np.nan
    return arrays
