"""One rank's measured step as two arrays of fixed layout that merge by maximum and by sum.

Gloo has one operator per all-reduce. Maxima, minima, the peak and the first bad steps share an
int64 maximum: a float32 becomes an integer of the same order, a minimum is negated, and each
member of the peak is kept below the bits of |peak|, so that all come from the rank where that is
largest (on an exact tie from either). Counts, sums and the loss share a float64 sum.

Shape suffixes: H heads of all layers, L layers, C kinds of tensor, R rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from stability_probe.handover import HeadBlock
from stability_probe.ranks.layout import Layout
from stability_probe.records import FirstBad
from stability_probe.sentinel import KINDS
from stability_probe.stats.accumulators import MAXIMA, MINIMA, PEAK, SUMS

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Float32 = npt.NDArray[np.float32]

MEANS = ("loss", "eval_loss")  # numbers of a step that pool as the mean over ranks
LARGEST = ("grad_norm",)  # the same on every rank as a rule; else the largest
COUNTS = ("ranks", "full", "sequences", "rows")  # per head; full: ranks that measured it fully
NOTHING = np.iinfo(np.int64).min  # where no rank has anything to say
HEAD = ("step", "minus_step", "phase_start", "thinning", *LARGEST)
_M, _N, _P = len(MAXIMA), len(MINIMA), len(PEAK)


@dataclass(frozen=True, slots=True, eq=False)
class Contribution:
    """What one rank adds to a pooled step.

    Attributes:
        step: the step.
        phase_start: first step of the newest phase that this rank knows of.
        thinning: the code of how far the plan is to be thinned, where this rank decides it;
            else 0.
        full: every statistic was measured, and not only the default set.
        numbers: those of `MEANS` and `LARGEST` that were given.
        parts: head blocks, with their extrema [R, H] and sums [R, H].
        first_bad: first non-finite values since the last contribution.
    """

    step: int
    phase_start: int
    thinning: int = 0
    full: bool = False
    numbers: Mapping[str, float] = field(default_factory=dict)
    parts: Sequence[tuple[tuple[HeadBlock, ...], Float32, Floats]] = ()
    first_bad: Sequence[FirstBad] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Merged:
    """What all ranks' contributions came to.

    Attributes:
        steps: the smallest and the largest step that a rank sent; equal unless ranks have
            lost each other.
        phase_start: the largest.
        thinning: the largest; 0 where no rank decides.
        numbers: means and maxima over the ranks that gave one.
        counts: [COUNTS, H].
        extrema: float32 [maxima, minima, peak; H], as accumulators have them.
        sums: float64 [sums, H].
        first_bad: earliest over ranks, by layer and kind.
    """

    steps: tuple[int, int]
    phase_start: int
    thinning: int
    numbers: Mapping[str, float]
    counts: Floats
    extrema: Float32
    sums: Floats
    first_bad: tuple[FirstBad, ...]


def pack(layout: Layout, given: Contribution) -> tuple[Ints, Floats]:
    """The two arrays of a contribution; what it lacks is neutral in them."""
    H, L = layout.columns, len(layout.layers)
    extrema = np.full((_M + _N + _P, H), float("-inf"), np.float32)
    extrema[_M : _M + _N], extrema[_M + _N :] = float("inf"), float("nan")
    counts, sums = np.zeros((len(COUNTS), H)), np.zeros((len(SUMS), H))
    for blocks, part_extrema, part_sums in given.parts:
        column = 0
        for block in blocks:
            here = slice(column, column + block.heads)
            column += block.heads
            start = layout.place(block)
            if start is None or block.replica:
                continue
            there = slice(start, start + block.heads)
            extrema[:, there], sums[:, there] = part_extrema[:, here], part_sums[:, here]
            counts[:, there] = np.array([[1], [given.full], [block.sequences], [block.rows]])
    bad = np.full((L, len(KINDS)), NOTHING)
    places = {layer.name: i for i, layer in enumerate(layout.layers)}
    for b in given.first_bad:
        if b.layer in places:
            cell = places[b.layer], KINDS.index(b.tensor)
            bad[cell] = max(bad[cell], -(2 * b.step + b.explained))
    ints = np.concatenate((_head(given), _to_ints(extrema).ravel(), bad.ravel()))
    return ints, np.concatenate((_means(given), counts.ravel(), sums.ravel()))


def unpack(layout: Layout, ints: Ints, floats: Floats) -> Merged:
    """The inverse of `pack`, after both arrays were reduced over the ranks."""
    H, L = layout.columns, len(layout.layers)
    head, ints = ints[: len(HEAD)], ints[len(HEAD) :]
    extrema, bad = np.split(ints, [(_M + _N + _P) * H])
    means, counts, sums = np.split(floats, [2 * len(MEANS), 2 * len(MEANS) + len(COUNTS) * H])
    numbers = {
        name: float(total) / float(n)
        for name, total, n in zip(MEANS, means[::2], means[1::2], strict=True)
        if n
    }
    largest = zip(LARGEST, head[len(HEAD) - len(LARGEST) :], strict=True)
    numbers |= {n: float(_floats64(key)) for n, key in largest if key != NOTHING}
    return Merged(
        steps=(-int(head[1]), int(head[0])),
        phase_start=int(head[2]),
        thinning=int(head[3]),
        numbers=numbers,
        counts=counts.reshape(len(COUNTS), H),
        extrema=_from_ints(extrema.reshape(_M + _N + _P, H)),
        sums=sums.reshape(len(SUMS), H),
        first_bad=tuple(_first_bad(layout, bad.reshape(L, len(KINDS)))),
    )


def _head(given: Contribution) -> Ints:
    largest = [
        _ints64(np.float64(given.numbers[n])) if n in given.numbers else NOTHING for n in LARGEST
    ]
    own = (given.step, -given.step, given.phase_start, given.thinning)
    return np.array([*own, *largest], np.int64)


def _means(given: Contribution) -> Floats:
    pairs = [(given.numbers.get(name, 0.0), float(name in given.numbers)) for name in MEANS]
    return np.array(pairs, np.float64).ravel()


def _first_bad(layout: Layout, bad_LC: Ints) -> list[FirstBad]:
    return [
        FirstBad(layout.layers[i].name, int(i), KINDS[c], int(key) // 2, bool(key % 2))
        for i, c in np.argwhere(bad_LC != NOTHING)
        for key in [-bad_LC[i, c]]
    ]


# Integers of the same order as the floats; NaN is above infinity, as a maximum over tensors has it


def _ints64(x: np.float64 | Floats) -> Ints:
    bits = np.where(np.isnan(x), np.nan, x).astype(np.float64).view(np.int64)
    return np.asarray(bits ^ ((bits >> 63) & np.iinfo(np.int64).max))


def _floats64(key: np.int64 | Ints) -> Floats:
    bits = np.asarray(key, np.int64)
    return (bits ^ ((bits >> 63) & np.iinfo(np.int64).max)).view(np.float64)


def _ordered(x: Float32) -> Ints:
    bits = np.where(np.isnan(x), np.float32(np.nan), x).view(np.int32)
    return (bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))).astype(np.int64)


def _unordered(key: Ints) -> Float32:
    bits = key.astype(np.int32)
    return (bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))).view(np.float32)


def _to_ints(extrema_RH: Float32) -> Ints:
    """Maxima, minima and the peak as rows that merge by maximum."""
    peak = np.ascontiguousarray(extrema_RH[_M + _N :])
    strength = np.where(np.isnan(peak[0]), np.int64(-1), _ordered(np.abs(peak[0])))
    member = peak.view(np.uint32).astype(np.int64)
    return np.concatenate(
        (
            _ordered(extrema_RH[:_M]),
            _ordered(-extrema_RH[_M : _M + _N]),
            np.left_shift(strength, 32) | member,
        )
    )


def _from_ints(keys_RH: Ints) -> Float32:
    """The inverse of `_to_ints`."""
    peak = (keys_RH[_M + _N :] & 0xFFFFFFFF).astype(np.uint32).view(np.float32)
    return np.concatenate(
        (
            _unordered(keys_RH[:_M]),
            -_unordered(keys_RH[_M : _M + _N]),
            np.where(keys_RH[_M + _N :] < 0, np.float32(np.nan), peak),
        )
    )
