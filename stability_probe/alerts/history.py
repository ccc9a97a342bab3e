"""What the rules may look at: the newest record and bounded windows of the past.

Everything the rules know comes through `History.update`, record by record, so that a run
watched live and one read from disk are judged alike.
Shape suffixes: L layers, O layers in the newest record, H heads.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from stability_probe.alerts.comparable import PATIENCE, Kind, kind_of
from stability_probe.alerts.gather import gather
from stability_probe.detect.growth import Growth, GrowthTest
from stability_probe.detect.loss import LossTrack
from stability_probe.detect.median import row_medians
from stability_probe.detect.series import SMOOTHING, Series, Span
from stability_probe.records import FirstBad, Observation, StepRecord, StepScalars

Float64 = npt.NDArray[np.float64]

GRADIENT = "grad_"  # how `FirstBad.tensor` begins where it is a gradient
_SKIPS_KEPT = 10_000  # records whose being skipped is remembered one by one


@dataclass(frozen=True, slots=True)
class _Frame:
    """One measured record, by layer."""

    step: int
    layers: dict[str, Observation]


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
        fresh_bad: the newest record's `first_bad` entries that no earlier record had.
        bad_at: the step of the newest record with a fresh entry of a forward that masking cannot
            explain.
        bad_gradient_at: the step of the newest record with a fresh entry of a gradient.
        updates: records so far, skipped or not.
        skips: those whose update was skipped.
        loss_given: whether any loss has been given since the run began.
        names: layer names by column, in order of appearance.
        indices: the layers' places in the model, by column.
        logits: per layer, the median over heads of the largest logit.
        entropy: per layer, the median over heads of `entropy_ratio`.
    """

    def __init__(self, *, keep: Span) -> None:
        """Remember a little more than `keep`, the longest window of any rule."""
        self._keep = keep
        self.logits, self.entropy = Series(keep=keep), Series(keep=keep)
        self._train_loss, self._eval_loss = (LossTrack(keep=2 * keep.steps) for _ in range(2))
        self.step, self.first, self.start = 0, 0, 0
        self._phase: str | None = None
        self.record = StepRecord(StepScalars(step=0))
        self.measured: StepRecord | None = None
        self.fresh_bad: tuple[FirstBad, ...] = ()
        self.bad_at: int | None = None
        self.bad_gradient_at: int | None = None
        self.updates, self.skips = 0, 0
        self._skipped: deque[tuple[int, bool]] = deque()
        self.loss_given = False
        self.names: list[str] = []
        self.indices: list[int] = []
        self._columns: dict[str, int] = {}
        self._kinds: list[Kind | None] = []
        self._frames: deque[_Frame] = deque()
        self._seen_bad: dict[tuple[str, str], int] = {}
        self._growth: dict[GrowthTest, Growth] = {}

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
        self._note_update(scalars)
        self._note_bad(scalars.first_bad)
        if record.measured:
            self._measure(record)

    @property
    def fresh(self) -> bool:
        """Whether the newest record was measured."""
        return self.record.measured

    def was_skipped(self, step: int) -> bool:
        """Whether the update of a step was skipped, as far as that is remembered."""
        return any(skipped for at, skipped in reversed(self._skipped) if at == step)

    def bad_gradient_before(self, step: int) -> tuple[str, int] | None:
        """Layer and step of a gradient that was not finite at the last update before `step`."""
        last = next((s for s, skipped in reversed(self._skipped) if s < step and not skipped), None)
        found = [
            layer
            for (layer, tensor), at in self._seen_bad.items()
            if at == last and tensor.startswith(GRADIENT)
        ]
        return None if last is None or not found else (found[0], last)

    def loss(self, *, within: int) -> LossTrack:
        """The loss to judge by: of the fixed evaluation batch once that reaches back so far."""
        evaluated = self._eval_loss
        if evaluated.past(self.step, within=within) is not None or self._train_loss.value is None:
            return evaluated
        return self._train_loss

    def growth(self, test: GrowthTest) -> Growth:
        """The growth of each layer's logits at the newest measured record."""
        if test not in self._growth:
            self._growth[test] = test(self.logits)
        return self._growth[test]

    def window_start(self, layer: str, test: GrowthTest) -> int:
        """The first step of a layer's window; while it is too short, the oldest one kept."""
        column = self._columns.get(layer)
        if self.measured is None or column is None:
            return self.step
        growth = self.growth(test)
        return int(growth.since_L[column] if growth.armed_L[column] else self._frames[0].step)

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
        rows: list[Float64] = []
        for frame in reversed(self._frames):
            if frame.step > step:
                continue
            if frame.step <= step - SMOOTHING and (rows or not smooth):
                break
            seen = frame.layers.get(layer)
            if seen is None or statistic not in seen.values or (kind and not kind.covers(seen)):
                continue
            row_H = seen.values[statistic].astype(np.float64)
            if rows and len(row_H) != len(rows[0]):
                break
            rows.append(np.where(np.isfinite(row_H), row_H, np.nan))
            if not smooth:
                break
        return row_medians(np.array(rows).T) if rows else np.empty(0)

    def _restart(self, scalars: StepScalars) -> None:
        self.start, self._phase = scalars.step, scalars.phase
        self.measured, self.bad_at, self.bad_gradient_at = None, None, None
        self._growth.clear()
        for track in (self.logits, self.entropy, self._train_loss, self._eval_loss):
            track.clear()
        self._frames.clear()
        self._kinds = [None] * len(self._kinds)

    def _rewind(self, step: int) -> None:
        self.start = min(self.start, step)
        while self._skipped and self._skipped[-1][0] >= step:
            self.skips -= self._skipped.pop()[1]
            self.updates -= 1
        self.measured, self.bad_at, self.bad_gradient_at = None, None, None
        self._growth.clear()
        for track in (self.logits, self.entropy, self._train_loss, self._eval_loss):
            track.rewind(step)
        while self._frames and self._frames[-1].step >= step:
            self._frames.pop()

    def _note_update(self, scalars: StepScalars) -> None:
        self._skipped.append((scalars.step, scalars.skipped))
        self.updates += 1
        self.skips += scalars.skipped
        if len(self._skipped) > _SKIPS_KEPT:
            self._skipped.popleft()

    def _note_bad(self, first_bad: tuple[FirstBad, ...]) -> None:
        self.fresh_bad = tuple(
            bad for bad in first_bad if self._seen_bad.get((bad.layer, bad.tensor)) != bad.step
        )
        for bad in self.fresh_bad:
            self._seen_bad[bad.layer, bad.tensor] = bad.step
        backward = [bad.tensor.startswith(GRADIENT) for bad in self.fresh_bad]
        if any(backward):
            self.bad_gradient_at = self.step
        if not all(b or bad.explained for b, bad in zip(backward, self.fresh_bad, strict=True)):
            self.bad_at = self.step

    def _measure(self, record: StepRecord) -> None:
        self.measured = record
        self._growth.clear()
        observations = record.observations
        columns_O = [self._column(observation) for observation in observations]
        kinds_O = [
            kind if kind and kind.covers(observation) else None
            for kind, observation in zip(self._kinds_at(columns_O), observations, strict=True)
        ]
        logits_OH = gather(observations, [kind.statistic if kind else "" for kind in kinds_O])
        known_O: list[bool] = np.asarray(np.isfinite(logits_OH).any(axis=1)).tolist()
        for column, observation, known in zip(columns_O, observations, known_O, strict=True):
            self._reconsider(column, observation, known=known)
        entropy_OH = self.now("entropy_ratio")
        entropy_OH[[kind is None for kind in kinds_O]] = np.nan
        for series, values_OH in ((self.logits, logits_OH), (self.entropy, entropy_OH)):
            row_L = np.full(len(self.names), np.nan)
            finite_OH = np.where(np.isfinite(values_OH), values_OH, np.nan)
            row_L[columns_O] = row_medians(finite_OH)
            series.append(record.step, row_L)
        self._remember(record)

    def _column(self, observation: Observation) -> int:
        """The layer's column; a layer seen for the first time gets the next one."""
        column = self._columns.setdefault(observation.layer, len(self.names))
        if column == len(self.names):
            self.names.append(observation.layer)
            self.indices.append(observation.layer_index)
            self._kinds.append(None)
        if self._kinds[column] is None:
            self._kinds[column] = kind_of(observation)
        return column

    def _kind(self, layer: str) -> Kind | None:
        return self._kinds[self._columns[layer]] if layer in self._columns else None

    def _kinds_at(self, columns_O: list[int]) -> list[Kind | None]:
        return [self._kinds[column] for column in columns_O]

    def _reconsider(self, column: int, observation: Observation, *, known: bool) -> None:
        """Judge a layer by another kind of sample once that is all it gives."""
        kind = self._kinds[column]
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
            self._kinds[column] = other
            self.logits.forget(column)
            self.entropy.forget(column)

    def _remember(self, record: StepRecord) -> None:
        """Keep the record for as long as the series keep its step."""
        self._frames.append(_Frame(record.step, {o.layer: o for o in record.observations}))
        while self._frames[0].step < self.logits.steps[0]:
            self._frames.popleft()
