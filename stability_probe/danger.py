"""Whether a record says danger, so that the steps after it should be measured fully.

Danger is no alert: nobody is woken, only more is measured. It is therefore judged coarsely, head by
head, against the few newest measured records of the same phase.

Shape suffix: H heads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stability_probe.records import Level, Observation, StepRecord

Float32 = npt.NDArray[np.float32]

REMEMBERED = 5  # measured records of a layer that a new one is compared with
GROWTH = 1.5  # of a head's largest logit, over the smallest of those records
HIGH_LOGIT = 20.0  # below it, growth is what training does
COLLAPSE = 0.5  # of a head's entropy_ratio, over the largest of those records

_LOGITS = ("qk_abs_max_logit", "abs_max_logit", "max_logit_low", "rotating_max_logit")


@dataclass(frozen=True, slots=True, eq=False)
class _Sample:
    """One layer in one measured record, head by head."""

    logit_H: Float32
    entropy_ratio_H: Float32
    overflows: bool


class Dangers:
    """Judges records in their order. What it says depends on them and on nothing else."""

    def __init__(self) -> None:
        """Start with no past."""
        self._phase: str | None = None
        self._known: dict[str, deque[_Sample]] = {}
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
        sample = _sample(seen.values)
        if sample is None:
            return False
        past = self._known.setdefault(seen.layer, deque(maxlen=REMEMBERED))
        if past and len(past[0].logit_H) != len(sample.logit_H):
            past.clear()  # another number of heads: another layer by the same name
        danger = _is_danger(sample, past, level)
        if level.whole:
            past.append(sample)
        return danger


def _is_danger(now: _Sample, past: Sequence[_Sample], level: Level) -> bool:
    if now.overflows and not any(then.overflows for then in past):
        return True
    if not past:
        return False
    low_H = np.fmin.reduce([then.logit_H for then in past])
    if ((now.logit_H >= GROWTH * low_H) & (now.logit_H >= HIGH_LOGIT)).any():
        return True
    high_H = np.fmax.reduce([then.entropy_ratio_H for then in past])
    return level.whole and bool((now.entropy_ratio_H <= COLLAPSE * high_H).any())


def _sample(values: Mapping[str, Float32]) -> _Sample | None:
    logit_H = _largest(values)
    if logit_H is None:
        return None
    entropy_H = values.get("entropy_ratio")
    absent_H = np.full_like(logit_H, np.nan) if entropy_H is None else entropy_H
    return _Sample(logit_H, absent_H, _overflows(values))


def _largest(values: Mapping[str, Float32]) -> Float32 | None:
    """What each head's largest logit is known to reach; None where nothing is known."""
    known = [values[name] for name in _LOGITS if name in values]
    return np.fmax.reduce(known) if known else None


def _overflows(values: Mapping[str, Float32]) -> bool:
    """Whether scores that the run forms in float16 are beyond its range, or not finite."""
    bad = values.get("nonfinite")
    real, headroom = values.get("fp16_scores"), values.get("fp16_headroom_log2")
    beyond = real is not None and headroom is not None and ((real == 1) & (headroom < 0)).any()
    return bool(beyond) or (bad is not None and bool((bad > 0).any()))
