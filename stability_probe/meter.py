"""Pools the calls of one optimizer step into one measurement.

Micro-batches merge, as do the calls of one layer with the same index.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from stability_probe.finite import known_finite
from stability_probe.handover import Handover, HeadBlock, hand_over
from stability_probe.records import AttentionCall, FirstBad, Level, Observation
from stability_probe.sentinel import (
    any_bad,
    bad_steps,
    call_is_finite,
    call_witness,
    gradient_witness,
    pooled,
    table,
    told,
    value_witness,
)
from stability_probe.stats.accumulate import accumulate
from stability_probe.stats.accumulators import Accumulators, concatenate, merge
from stability_probe.stats.backend import Backend, check_backend
from stability_probe.stats.finish import finish
from stability_probe.stats.glance import glance, glanced
from stability_probe.stats.part import sequence_of
from stability_probe.stopwatch import Stopwatch
from stability_probe.transfer import HostCopy

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Pool:
    """What one layer's calls at one step came to so far; None where nothing came."""

    accumulators: Accumulators | None = None
    glance: Tensor | None = None  # [3, heads], see `stats.glance`
    witness: Tensor | None = None  # [6], see `sentinel`
    gradients: dict[str, Tensor] = field(default_factory=dict)  # kind -> witness, 0-dim
    sequences: int = 0
    rows: int = 0

    def add(self, other: _Pool) -> None:
        """Takes in another pool of the same layer."""
        self.sequences += other.sequences
        self.rows += other.rows
        if other.glance is not None:
            self.glance = (
                other.glance if self.glance is None else torch.maximum(self.glance, other.glance)
            )
        if other.accumulators is not None:
            mine = self.accumulators
            self.accumulators = (
                other.accumulators if mine is None else merge(mine, other.accumulators)
            )
        if other.witness is not None:
            self.witness = pooled(self.witness, other.witness)

    @property
    def watched(self) -> tuple[Tensor | None, dict[str, Tensor]]:
        """What the sentinel keeps of it: a row of its table."""
        return self.witness, self.gradients

    @property
    def any_tensor(self) -> Tensor | None:
        """One of the sentinel's tensors, to know the device by."""
        return next(iter(self.gradients.values()), None) if self.witness is None else self.witness


@dataclass(slots=True, eq=False)
class _Slot:
    """One layer, over the whole run."""

    name: str
    place: tuple[int, int]  # of its module in the model, of the call in the module's forward
    index: int = -1  # among the layers; known when its first step ends
    pool: _Pool = field(default_factory=_Pool)
    first_bad: Tensor | None = None  # [11], steps, on the layer's device
    explained: bool = False  # rows without a visible key could make its output non-finite
    block: HeadBlock = field(default_factory=lambda: HeadBlock("", 0))  # its heads

    def note(self, call: AttentionCall) -> None:
        """Takes over what a call says of the layer."""
        self.explained |= bool(call.masks) or call.seam == "softmax"
        heads = _heads(call)
        self.block = HeadBlock(
            self.name, heads, call.head_offset, call.all_heads or heads, replica=call.replica
        )


@dataclass(frozen=True, slots=True)
class _Measured:
    """One layer of a measurement."""

    name: str
    index: int
    heads: int
    sequences: int
    rows: int


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The statistics of the layers on one device, heads side by side."""

    layers: tuple[_Measured, ...]
    columns: tuple[tuple[str, int], ...]  # statistic and its width per head
    copy: HostCopy  # [heads of all layers, width of all columns]

    def observations(self) -> list[Observation]:
        table = self.copy.numpy()
        found, row = [], 0
        for layer in self.layers:
            rows, column, values = table[row : row + layer.heads], 0, {}
            for statistic, width in self.columns:
                cells = rows[:, column : column + width]
                values[statistic] = (cells[:, 0] if width == 1 else cells).copy()
                column += width
            found.append(
                Observation(layer.name, layer.index, values, layer.sequences, rows=layer.rows)
            )
            row += layer.heads
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Measurement:
    """A step's statistics and sentinel, on their way to the host."""

    level: Level
    parts: tuple[_Part, ...] = ()
    bad: tuple[tuple[tuple[_Slot, ...], HostCopy], ...] = ()
    handovers: tuple[Handover, ...] = ()  # for other ranks, where they were asked for

    @property
    def exact(self) -> bool:
        """Whether it holds statistics, and not only bounds."""
        return bool(self.parts) and self.level.exact

    @property
    def ready(self) -> bool:
        """Whether reading would not wait for a device."""
        copies = (*(p.copy for p in self.parts), *(copy for _, copy in self.bad))
        return all(copy.ready for copy in copies) and all(h.ready for h in self.handovers)

    def observations(self) -> tuple[Observation, ...]:
        """The statistics of each layer, in layer order; empty at a step not measured."""
        found = [o for part in self.parts for o in part.observations()]
        return tuple(sorted(found, key=lambda o: o.layer_index))

    def first_bad(self) -> tuple[FirstBad, ...]:
        """The first non-finite value of each layer and kind since the sentinel was last read."""
        return tuple(
            FirstBad(s.name, s.index, kind, step, kind == "output" and s.explained)
            for slots, copy in self.bad
            for s, row in zip(slots, copy.numpy(), strict=True)
            for kind, step in told(row.tolist())
        )


class Meter:
    """Takes attention calls in and gives one measurement a step out.

    Attributes:
        level: how much of the calls is measured from now on.
        turn: the step's number, which says whose turn it is where a part is measured.
        latest: statistic -> layer -> [heads], of the last step with exact statistics.
    """

    def __init__(self, stopwatch: Stopwatch | None = None, backend: Backend = "auto") -> None:
        """Start with everything measured.

        Args:
            stopwatch: times what is done in the user's step.
            backend: what reads the scores; see `stats.backend.score`.

        Raises:
            BackendError: there is no such backend.
        """
        check_backend(backend)
        self._backend = backend
        self._stopwatch = stopwatch or Stopwatch(on=False)
        self.level = Level.FULL
        self.turn = 0
        self.latest: dict[str, dict[str, Tensor]] = {}  # statistic -> layer -> [heads]
        self._slots: dict[tuple[str, int], _Slot] = {}
        self._lock = threading.Lock()

    # In: what the capture tells

    @property
    def measuring(self) -> bool:
        """Whether exact statistics are taken at this step."""
        return self.level.exact

    @property
    def begun(self) -> bool:
        """Whether a call of the step under way has been taken in."""
        with self._lock:
            return any(slot.pool.rows for slot in self._slots.values())

    def call(self, call: AttentionCall) -> None:
        """Reduces a call at once; none of its tensors is kept."""
        given = call.q_BHQD if call.scores_BHQK is None else call.scores_BHQK
        with self._stopwatch.running(None if given is None else given.device):
            self._call(call)

    def _call(self, call: AttentionCall) -> None:
        pool = _Pool(witness=None if call_is_finite(call) else call_witness(call))
        if self.level is Level.BRACKET:
            pool.glance = glance(call, self.turn)
        elif self.measuring:
            call = sequence_of(call, self.turn) if self.level is Level.SEQUENCE else call
            pool.accumulators = accumulate(
                call, full=self.level is Level.FULL, backend=self._backend
            )
        pool.sequences, pool.rows = _sequences(call), _rows(call)
        with self._lock:
            slot = self._slot(call)
            slot.note(call)
            slot.pool.add(pool)

    def values(self, call: AttentionCall, v: Tensor, output: Tensor) -> None:
        """Watches v and the output of a call that was seen at its softmax."""
        with self._stopwatch.running(v.device):
            if known_finite(v, output):
                return
            pool = _Pool(witness=value_witness(v, output))
        with self._lock:
            slot = self._slot(call)
            slot.pool.add(pool)

    def gradient(self, layer: str, call_index: int, kind: str, gradient: Tensor) -> None:
        """Watches a gradient of a call that was seen; several threads may call."""
        with self._stopwatch.running(gradient.device):
            if known_finite(gradient):
                return
            fresh = gradient_witness(gradient)
        with self._lock:
            slot = self._slots.get((layer, call_index)) or self._slots.get((layer, 0))
            if slot is not None:
                known = slot.pool.gradients
                known[kind] = pooled(known.get(kind), fresh)

    def _slot(self, call: AttentionCall) -> _Slot:
        key = (call.layer, call.call_index)
        if key not in self._slots:
            name = call.layer if call.call_index == 0 else f"{call.layer}#{call.call_index}"
            self._slots[key] = _Slot(name, (call.layer_index, call.call_index))
        return self._slots[key]

    def _number(self) -> None:
        """Gives the layers that are new their index, in the model's order.

        Not in the order of their calls: a checkpoint's recomputation goes from the last layer to
        the first.
        """
        known = [slot for slot in self._slots.values() if slot.index >= 0]
        new = sorted((s for s in self._slots.values() if s.index < 0), key=lambda s: s.place)
        for index, slot in enumerate(new, start=len(known)):
            slot.index = index
        ordered = sorted(self._slots.items(), key=lambda item: item[1].index)
        self._slots = dict(ordered)

    # Out: what the probe asks

    @property
    def layers(self) -> dict[str, int]:
        """Layer names and their index, in the model's order."""
        return {slot.name: slot.index for slot in self._slots.values()}

    @property
    def blocks(self) -> tuple[HeadBlock, ...]:
        """Which heads of each layer are seen here, in the model's order."""
        return tuple(slot.block for slot in self._slots.values())

    def nonfinite_flag(self) -> Tensor | None:
        """Device bool, 0-dim: whether a value or gradient of this step so far is not finite.

        Rows without any visible key count too. None where nothing was seen that could be.
        """
        with self._lock:
            pools = [slot.pool for slot in self._slots.values()]
        groups = _by_device(pools, lambda pool: pool.any_tensor)
        flags = [any_bad(table([pool.watched for pool in group])) for group in groups]
        return torch.stack([f.to(flags[0].device) for f in flags]).any() if flags else None

    @torch.no_grad()
    def drain(self, step: int, *, read_sentinel: bool, for_ranks: bool = False) -> Measurement:
        """Ends the step: takes what was pooled.

        Args:
            step: the step that the forwards since the last drain led to.
            read_sentinel: also bring the sentinel to the host, and start it anew.
            for_ranks: also bring the accumulators, which other ranks' can be merged with.
        """
        with self._lock:
            self._number()
            slots = list(self._slots.values())
            taken = [(slot, slot.pool) for slot in slots]
            for slot in slots:
                slot.pool = _Pool()
        for group in _by_device(taken, lambda pair: pair[1].any_tensor):
            _note_bad(group, step)
        measured = [(s, p, p.accumulators) for s, p in taken if p.accumulators]
        glanced_at = [(s, p, p.glance) for s, p in taken if p.glance is not None]
        if measured:
            self.latest = {}
        parts = [
            *(self._finished(g) for g in _by_device(measured, lambda m: m[2].maxima)),
            *(_glanced(g) for g in _by_device(glanced_at, lambda m: m[2])),
        ]
        bad = _take_bad(slots) if read_sentinel or measured else ()
        handovers = _handovers(measured) if for_ranks else ()
        return Measurement(self.level, tuple(parts), bad, handovers)

    def _finished(self, group: Sequence[tuple[_Slot, _Pool, Accumulators]]) -> _Part:
        """All layers of a device finished at once, their heads side by side, in one copy."""
        together = concatenate([accumulators for _, _, accumulators in group])
        values = finish(together, full=self.level is Level.FULL)
        heads = [accumulators.maxima.shape[-1] for _, _, accumulators in group]
        for statistic, tensor in values.items():
            by_layer = self.latest.setdefault(statistic, {})
            for (slot, _, _), rows in zip(group, torch.split(tensor, heads), strict=True):
                by_layer[slot.name] = rows
        return _part(group, heads, values)


def _glanced(group: Sequence[tuple[_Slot, _Pool, Tensor]]) -> _Part:
    """As `Meter._finished`, of layers that were only glanced at."""
    heads = [table.shape[-1] for _, _, table in group]
    return _part(group, heads, glanced(torch.cat([table for _, _, table in group], dim=1)))


def _part(
    group: Sequence[tuple[_Slot, _Pool, object]], heads: list[int], values: dict[str, Tensor]
) -> _Part:
    layers = [
        _Measured(slot.name, slot.index, h, pool.sequences, pool.rows)
        for (slot, pool, _), h in zip(group, heads, strict=True)
    ]
    flat = [tensor.reshape(tensor.shape[0], -1) for tensor in values.values()]
    columns = [(name, f.shape[1]) for name, f in zip(values, flat, strict=True)]
    return _Part(tuple(layers), tuple(columns), HostCopy(torch.cat(flat, dim=1)))


def _handovers(measured: Sequence[tuple[_Slot, _Pool, Accumulators]]) -> tuple[Handover, ...]:
    """The accumulators of the layers, device by device."""
    return tuple(
        hand_over(
            [replace(s.block, sequences=p.sequences, rows=p.rows) for s, p, _ in group],
            [accumulators for _, _, accumulators in group],
        )
        for group in _by_device(measured, lambda m: m[2].maxima)
    )


def _sequences(call: AttentionCall) -> int:
    """How many sequences a call holds."""
    if call.sequences is not None:
        return call.sequences
    matrix = call.scores_BHQK if call.q_BHQD is None else call.q_BHQD
    return 0 if matrix is None else matrix.shape[0]


def _rows(call: AttentionCall) -> int:
    """How many query rows of each head a call holds."""
    matrix = call.scores_BHQK if call.q_BHQD is None else call.q_BHQD
    return 0 if matrix is None else matrix.shape[0] * matrix.shape[2]


def _heads(call: AttentionCall) -> int:
    """How many heads a call holds."""
    matrix = call.scores_BHQK if call.q_BHQD is None else call.q_BHQD
    return 0 if matrix is None else matrix.shape[1]


def _note_bad(group: Sequence[tuple[_Slot, _Pool]], step: int) -> None:
    """Keeps, on the device, the first step at which each kind was not finite."""
    fresh = bad_steps(table([pool.watched for _, pool in group]), step)
    for (slot, _), row in zip(group, fresh.unbind(), strict=True):
        slot.first_bad = row if slot.first_bad is None else torch.minimum(slot.first_bad, row)


def _take_bad(slots: Sequence[_Slot]) -> tuple[tuple[tuple[_Slot, ...], HostCopy], ...]:
    """The sentinel's rows on their way to the host; the slots start anew."""
    taken = []
    for group in _by_device(slots, lambda slot: slot.first_bad):
        rows = torch.stack([slot.first_bad for slot in group if slot.first_bad is not None])
        taken.append((tuple(group), HostCopy(rows)))
        for slot in group:
            slot.first_bad = None
    return tuple(taken)


def _by_device(items: Sequence[T], tensor_of: Callable[[T], Tensor | None]) -> list[list[T]]:
    """Groups items by the device of their tensor; those without one are left out."""
    groups: dict[torch.device, list[T]] = {}
    for item in items:
        if (tensor := tensor_of(item)) is not None:
            groups.setdefault(tensor.device, []).append(item)
    return list(groups.values())
