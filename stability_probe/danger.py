"""Whether a record says danger, so that the steps after it should be measured fully.

Danger is no alert: nobody is woken, only more is measured. It is therefore judged coarsely, head by
head, against the few newest measured records of the same phase.

Shape suffix: H heads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stability_probe.records import Level, Observation, StepRecord

Float32 = npt.NDArray[np.float32]

REMEMBERED = 5  # measured records of a layer that a new one is compared with
GROWTH = 1.5  # of a head's largest logit, over the smallest of those records
HIGH_LOGIT = 20.0  # below it, growth is what training does
COLLAPSE = 0.5  # of a head's entropy_ratio, over the largest of those records

_ABSENT = np.full(1, np.nan, np.float32)  # of every head
_LOGITS = ("qk_abs_max_logit", "abs_max_logit", "max_logit_low", "rotating_max_logit")


@dataclass(frozen=True, slots=True, eq=False)
class _Sample:
    """One layer in one measured record, head by head."""

    logit_H: Float32
    entropy_ratio_H: Float32
    overflows: bool


class _Layer:
    """The newest measured records of one layer, and where danger begins after them."""

    def __init__(self, heads: int) -> None:
        self.heads = heads
        self._samples: deque[_Sample] = deque(maxlen=REMEMBERED)
        self._high_logit_H = np.full(heads, np.inf, np.float32)
        self._collapse_H = np.full(heads, -np.inf, np.float32)
        self._overflowed = False

    def is_danger(self, now: _Sample) -> bool:
        fresh = now.overflows and not self._overflowed
        grown_H = now.logit_H >= self._high_logit_H
        collapsed_H = now.entropy_ratio_H <= self._collapse_H
        return fresh or bool(grown_H.any()) or bool(collapsed_H.any())

    def append(self, sample: _Sample) -> None:
        self._samples.append(sample)
        low_H = np.fmin.reduce([then.logit_H for then in self._samples])
        self._high_logit_H = np.maximum(GROWTH * low_H, np.float32(HIGH_LOGIT))  # NaN stays NaN
        high_H = np.fmax.reduce([then.entropy_ratio_H for then in self._samples])
        self._collapse_H = np.float32(COLLAPSE) * high_H
        self._overflowed = any(then.overflows for then in self._samples)


class Dangers:
    """Judges records in their order. What it says depends on them and on nothing else."""

    def __init__(self) -> None:
        """Start with no past."""
        self._phase: str | None = None
        self._known: dict[str, _Layer] = {}
        self._bad: set[tuple[str, str]] = set()

    def judge(self, record: StepRecord) -> bool:
        """Whether a record says danger; it is then a part of the past.

        Danger is a value that is not finite and that no mask explains, of a layer and tensor that
        had none before in the phase; a float16 score beyond its range; a head whose largest logit
        is high and has grown; a head whose entropy has fallen. Records of bounds or of one
        sequence are compared with measured ones from below: what a part is certain to reach, the
        whole reaches.
        """
        if record.scalars.phase != self._phase:
            self._phase, self._known, self._bad = record.scalars.phase, {}, set()
        bad = {(b.layer, b.tensor) for b in record.scalars.first_bad if not b.explained}
        fresh = not bad <= self._bad
        self._bad |= bad
        seen = [self._layer(o, record.level) for o in record.observations]
        return fresh or any(seen)

    def _layer(self, seen: Observation, level: Level) -> bool:
        sample = _sample(seen.values, whole=level.whole)
        if sample is None:
            return False
        known = self._known.get(seen.layer)
        if known is None or known.heads != len(sample.logit_H):
            known = self._known[seen.layer] = _Layer(len(sample.logit_H))
        danger = known.is_danger(sample)
        if level.whole:
            known.append(sample)
        return danger


def _sample(values: Mapping[str, Float32], *, whole: bool) -> _Sample | None:
    logit_H = _largest(values)
    if logit_H is None:
        return None
    entropy_H = values.get("entropy_ratio", _ABSENT) if whole else _ABSENT
    return _Sample(logit_H, entropy_H, _overflows(values))


def _largest(values: Mapping[str, Float32]) -> Float32 | None:
    """What each head's largest logit is known to reach; None where nothing is known."""
    largest_H: Float32 | None = None
    for name in _LOGITS:
        if (value_H := values.get(name)) is not None:
            largest_H = value_H if largest_H is None else np.fmax(largest_H, value_H)
    return largest_H


def _overflows(values: Mapping[str, Float32]) -> bool:
    """Whether scores that the run forms in float16 are beyond its range, or not finite."""
    bad = values.get("nonfinite")
    real, headroom = values.get("fp16_scores"), values.get("fp16_headroom_log2")
    beyond = real is not None and headroom is not None and ((real == 1) & (headroom < 0)).any()
    return bool(beyond) or (bad is not None and bool((bad > 0).any()))
