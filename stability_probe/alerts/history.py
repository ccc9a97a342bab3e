"""What the rules may look at: the newest record and bounded windows of the past.

Everything the rules know comes through `History.update`, record by record, so that a run
watched live and one read from disk are judged alike.
Shape suffixes: L layers, O layers in the newest record, H heads (the most of any layer; a
layer with fewer has NaN).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from stability_probe.alerts.comparable import PATIENCE, Kind, kind_of
from stability_probe.alerts.frames import Frames
from stability_probe.alerts.gather import gather
from stability_probe.alerts.updates import Updates
from stability_probe.detect.growth import Growth, GrowthTest
from stability_probe.detect.limit import Limit
from stability_probe.detect.loss import LossTrack
from stability_probe.detect.past import Past
from stability_probe.detect.span import Span
from stability_probe.records import Observation, StepRecord, StepScalars

Float64 = npt.NDArray[np.float64]

HYSTERESIS = 20  # samples for which a state lasts between the two values of a limit


class History:
    """The past of one run, as far as rules need it.

    A change of `StepScalars.phase` starts every baseline again. A step that is not after the
    one before (the run went back to a checkpoint) takes the steps from there on out of the
    windows.

    Attributes:
        step: the newest record's step.
        first: the first step of the run.
        start: the first step of the phase.
        record: the newest record; without observations where it was not measured.
        measured: the newest record that was measured; None before the first of the phase.
        updates: skipped updates and values that are not finite.
        loss_given: whether any loss has been given since the run began.
        names: layer names by row, in order of appearance.
        indices: the layers' places in the model, by row.
        width: the most heads of any layer; columns are layers times it.
        logits: per layer and head, the largest logit.
        entropy: per layer and head, `entropy_ratio`.
    """

    def __init__(self, *, keep: Span) -> None:
        """Remember a little more than `keep`, the longest window of any rule."""
        self.logits, self.entropy = Past(keep=keep), Past(keep=keep)
        self._train_loss, self._eval_loss = (LossTrack(keep=2 * keep.steps) for _ in range(2))
        self.step, self.first, self.start = 0, 0, 0
        self._phase: str | None = None
        self.record = StepRecord(StepScalars(step=0))
        self.measured: StepRecord | None = None
        self.updates = Updates()
        self.loss_given = False
        self.names: list[str] = []
        self.indices: list[int] = []
        self.width = 1
        self._rows: dict[str, int] = {}
        self._kinds: list[Kind | None] = []
        self._frames = Frames()
        self._growth: dict[GrowthTest, Growth] = {}
        self._beyond: dict[Limit, npt.NDArray[np.bool_]] = {}

    def update(self, record: StepRecord) -> None:
        """Take the next record of the run."""
        scalars = record.scalars
        if self._phase is None:
            self.first = scalars.step
        if scalars.phase != self._phase:
            self._restart(scalars)
        elif scalars.step <= self.step:
            self._rewind(scalars.step)
        # bounds are no samples: a rule sees such a step as one that was not measured
        self.step = scalars.step
        self.record = record if record.measured else replace(record, observations=())
        self._train_loss.update(scalars.step, scalars.loss)
        self._eval_loss.update(scalars.step, scalars.eval_loss)
        self.loss_given |= scalars.loss is not None or scalars.eval_loss is not None
        self.updates.note(scalars)
        if record.measured:
            self._measure(record)

    @property
    def fresh(self) -> bool:
        """Whether the newest record was measured."""
        return self.record.measured

    def loss(self, *, within: int) -> LossTrack:
        """The loss to judge by: of the fixed evaluation batch once that reaches back so far."""
        evaluated = self._eval_loss
        if evaluated.past(self.step, within=within) is not None or self._train_loss.value is None:
            return evaluated
        return self._train_loss

    @property
    def losses(self) -> tuple[LossTrack, LossTrack]:
        """The training loss and the loss of the fixed evaluation batch, given or not."""
        return self._train_loss, self._eval_loss

    def growth(self, test: GrowthTest) -> Growth:
        """The growth of each head's logits at the newest measured record."""
        if test not in self._growth:
            self._growth[test] = test(self.logits, heads=self.width)
        return self._growth[test]

    def beyond(self, limit: Limit) -> npt.NDArray[np.bool_]:
        """Whether each head's entropy ratio is beyond a limit, by its newest samples, [L, H]."""
        if limit not in self._beyond:
            newest_NC = self.entropy.near.smooth[-HYSTERESIS:]
            self._beyond[limit] = limit(newest_NC).reshape(-1, self.width)
        return self._beyond[limit]

    def by_head(self, column_C: npt.NDArray[np.float64]) -> Float64:
        """A row of columns as layers and heads, [L, H]."""
        return column_C.reshape(-1, self.width)

    def window_start(self, layer: str, test: GrowthTest) -> int:
        """The first step of a layer's window; while it is too short, the oldest one kept."""
        row = self._rows.get(layer)
        if self.measured is None or row is None:
            return self.step
        growth = self.growth(test)
        return growth.since(row) if growth.armed_L[row] else self._frames.oldest

    def statistic(self, layer: str) -> str | None:
        """The logit statistic that the layer is judged by; None while it has none."""
        kind = self._kind(layer)
        return None if kind is None else kind.statistic

    def now(self, statistic: str) -> Float64:
        """One statistic of the newest record's layers, in its order, [O, H]; NaN is absent."""
        observations = self.record.observations
        return gather(observations, [statistic] * len(observations))

    def heads(self, layer: str, statistic: str, *, step: int, smooth: bool = True) -> Float64:
        """One statistic per head about a step, [H]; empty where it was not recorded.

        Args:
            layer: the layer's name.
            statistic: the statistic's name.
            step: the step, not the last one that counts.
            smooth: the median of the 10 steps up to it, else the latest sample alone.
        """
        kind = self._kind(layer)
        return self._frames.heads(layer, statistic, step=step, smooth=smooth, kind=kind)

    def _restart(self, scalars: StepScalars) -> None:
        self.start, self._phase, self.measured = scalars.step, scalars.phase, None
        self.updates.forget_bad()
        self._growth.clear()
        self._beyond.clear()
        for track in (self.logits, self.entropy, self._train_loss, self._eval_loss, self._frames):
            track.clear()
        self._kinds = [None] * len(self._kinds)

    def _rewind(self, step: int) -> None:
        self.start, self.measured = min(self.start, step), None
        self._growth.clear()
        self._beyond.clear()
        for track in (self.logits, self.entropy, self._train_loss, self._eval_loss):
            track.rewind(step)
        self._frames.rewind(step)
        self.updates.rewind(step)

    def _measure(self, record: StepRecord) -> None:
        self.measured = record
        self._growth.clear()
        self._beyond.clear()
        observations = record.observations
        rows_O = [self._row(observation) for observation in observations]
        kinds_O = [
            kind if kind and kind.covers(observation) else None
            for kind, observation in zip(
                [self._kinds[row] for row in rows_O], observations, strict=True
            )
        ]
        logits_OH = gather(observations, [kind.statistic if kind else "" for kind in kinds_O])
        known_O: list[bool] = np.asarray(np.isfinite(logits_OH).any(axis=1)).tolist()
        for row, observation, known in zip(rows_O, observations, known_O, strict=True):
            self._reconsider(row, observation, known=known)
        entropy_OH = self.now("entropy_ratio")
        entropy_OH[[kind is None for kind in kinds_O]] = np.nan
        self._widen(max(logits_OH.shape[1], entropy_OH.shape[1]))
        for past, values_OH in ((self.logits, logits_OH), (self.entropy, entropy_OH)):
            values_LH = np.full((len(self.names), self.width), np.nan)
            values_LH[rows_O, : values_OH.shape[1]] = values_OH
            past.append(record.step, values_LH.ravel())
        near = self.logits.near.steps[0]
        self._frames.append(record, near=int(near), far=self.logits.far.steps)

    def _widen(self, heads: int) -> None:
        """Make room for layers with more heads than any had before."""
        if heads <= self.width:
            return
        for past in (self.logits, self.entropy):
            columns = np.arange(past.near.raw.shape[1])
            layer, head = np.divmod(columns, self.width)
            past.spread(layer * heads + head, len(columns) // self.width * heads)
        self.width = heads

    def _row(self, observation: Observation) -> int:
        """The layer's row; a layer seen for the first time gets the next one."""
        row = self._rows.setdefault(observation.layer, len(self.names))
        if row == len(self.names):
            self.names.append(observation.layer)
            self.indices.append(observation.layer_index)
            self._kinds.append(None)
        if self._kinds[row] is None:
            self._kinds[row] = kind_of(observation)
        return row

    def _kind(self, layer: str) -> Kind | None:
        return self._kinds[self._rows[layer]] if layer in self._rows else None

    def _reconsider(self, row: int, observation: Observation, *, known: bool) -> None:
        """Judge a layer by another kind of sample once that is all it gives."""
        kind = self._kinds[row]
        if kind is None:
            return
        if known:
            kind.strangers = 0
            return
        other = kind_of(observation)
        if other is None or (other.statistic == kind.statistic and kind.covers(observation)):
            return
        kind.strangers += 1
        if kind.strangers >= PATIENCE:
            self._kinds[row] = other
            columns = slice(row * self.width, (row + 1) * self.width)
            self.logits.forget(columns)
            self.entropy.forget(columns)
