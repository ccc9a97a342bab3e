"""A value in attention that is not finite: critical, from the first step on.

Shape suffixes: O layers in the newest record, H heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from stability_probe.alerts.actions import (
    FP32_LOGITS,
    FROM_CHECKPOINT,
    FULLY_MASKED,
    QK_NORM,
    SKIP_BATCH,
)
from stability_probe.alerts.cause import entropy_change, named_heads
from stability_probe.alerts.evidence import collect
from stability_probe.alerts.gather import gather
from stability_probe.alerts.history import History
from stability_probe.alerts.rule import Finding, Verdict, announce
from stability_probe.detect.growth import SHORT_GROWTH, GrowthTest
from stability_probe.detect.series import Span
from stability_probe.records import Alert, FirstBad, Observation, Severity

Float64 = npt.NDArray[np.float64]

TENSORS = ("q", "k", "scores", "v", "output")  # in the order in which causes are counted

_CAUSES = {
    "q": "The queries were not finite when they reached attention: it came from below.",
    "k": "The keys were not finite when they reached attention: it came from below.",
    "v": "The values were not finite when they reached attention: it came from below.",
    "scores": "q and k are finite and their scores are not: q.k overflowed, or a mask added it.",
    "output": "q, k, v and the scores are finite and the output is not: the kernel made it.",
    "": "The record does not say in which tensor.",
}
_EXPLAINED = "It may come from rows that have no visible key (fully masked queries)."
_REMEDIES = {
    "scores": (FP32_LOGITS, QK_NORM, FROM_CHECKPOINT),
    "output": (FULLY_MASKED, FROM_CHECKPOINT),
}


@dataclass(frozen=True, slots=True)
class BadLayer:
    """What is known of one layer's values that are not finite."""

    layer: str
    layer_index: int
    step: int  # the first bad step known
    tensors: tuple[str, ...] = ()  # in the order of TENSORS; empty where not known
    heads: tuple[int, ...] = ()
    count: float | None = None  # values; None where only the sentinel saw it
    explained: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """NaN or infinity in q, k, v, the visible scores, or the output of an attention layer.

    From the `nonfinite` counts of measured steps and from the sentinel that watches the steps
    between (`StepScalars.first_bad`). There is no warm-up. Of several bad layers the first one
    of the earliest step is blamed; later ones follow from it as a rule. Output that rows
    without any visible key may explain is a warning.

    Attributes:
        window: how far back the entropy of the heads is compared.
    """

    name: str = "nonfinite"
    window: GrowthTest = SHORT_GROWTH
    each_layer: bool = True

    @property
    def lookback(self) -> Span:
        """The longest window the rule looks back over."""
        return self.window.window

    def evaluate(self, history: History, step: int) -> Verdict:
        """Judge every layer that was counted, and those that the sentinel names."""
        if not history.fresh and not history.fresh_bad:
            return {}
        counted = _count(history.record.observations, step)
        bad = _bad(counted, history.fresh_bad)
        if not bad:
            return dict.fromkeys(counted)
        found: dict[str | None, Finding | None] = {b.layer: _finding(b) for b in bad}
        return {**found, **{layer: None for layer in counted if layer not in found}}

    def explain(self, history: History, finding: Finding) -> Alert:
        """Say which tensor and heads, since when, and which layers follow."""
        counted = _count(history.record.observations, history.step)
        everywhere = _bad(counted, history.fresh_bad)
        place = next(i for i, b in enumerate(everywhere) if b.layer == finding.layer)
        bad = everywhere[place]
        what = " and ".join(bad.tensors) or "attention"
        count = "" if bad.count is None else f"{bad.count:.0f} "
        since = history.window_start(bad.layer, self.window)
        seen = collect(history, bad.layer, since=since, factor=1.0, heads=bad.heads)
        message = (
            f"{bad.layer} holds {count}values that are not finite in its {what} "
            f"({named_heads(bad.heads)}; {entropy_change(seen)}), first at step {bad.step}"
            f"{_followers(everywhere[place + 1 :])}."
        )
        first = bad.tensors[0] if bad.tensors else ""
        remedies = _REMEDIES.get(first, (FROM_CHECKPOINT, SKIP_BATCH))
        return announce(
            self.name,
            finding,
            history,
            message=message,
            heads=bad.heads,
            cause=_EXPLAINED if bad.explained else _CAUSES[first],
            remedies=(FULLY_MASKED,) if bad.explained else remedies,
        )


def attention_is_finite(history: History) -> bool:
    """Whether attention held only finite values when it was last looked at."""
    seen = history.measured
    if history.bad_at is not None and (seen is None or history.bad_at >= seen.step):
        return False
    return seen is None or not any(_count(seen.observations, seen.step).values())


def _bad(counted: Mapping[str, BadLayer | None], told: Sequence[FirstBad]) -> list[BadLayer]:
    """All bad layers: earliest step first, then in layer order."""
    layers = {layer: bad for layer, bad in counted.items() if bad}
    for first in told:
        layers[first.layer] = _with_sentinel(layers.get(first.layer), first)
    return sorted(layers.values(), key=lambda bad: (bad.step, bad.layer_index))


def _finding(bad: BadLayer) -> Finding:
    return Finding(
        severity=Severity.WARNING if bad.explained else Severity.CRITICAL,
        layer=bad.layer,
        layer_index=bad.layer_index,
        statistic="nonfinite",
        value=bad.count,
        limit=0.0,
        since=bad.step,
    )


def _with_sentinel(counted: BadLayer | None, told: FirstBad) -> BadLayer:
    """What the counts say, with what the sentinel adds: the first step, and the tensor there."""
    if counted is None:
        return BadLayer(
            told.layer, told.layer_index, told.step, (told.tensor,), explained=told.explained
        )
    tensors = tuple(t for t in TENSORS if t in counted.tensors or t == told.tensor)
    return replace(
        counted,
        step=min(counted.step, told.step),
        tensors=tensors,
        explained=counted.explained and told.explained,
    )


def _count(observations: Sequence[Observation], step: int) -> dict[str, BadLayer | None]:
    """Each layer whose values were counted, with what is bad in it; None where nothing is."""
    total_OH = gather(observations, ["nonfinite"] * len(observations))
    known_O = ~np.isnan(total_OH).all(axis=1)
    clean_O = known_O & ~(total_OH > 0).any(axis=1)
    clean = [observations[i].layer for i in np.flatnonzero(clean_O).tolist()]
    counted: dict[str, BadLayer | None] = dict.fromkeys(clean)
    for observation in [observations[i] for i in np.flatnonzero(~clean_O).tolist()]:
        by_tensor = {t: _known(observation, f"nonfinite_{t}") for t in TENSORS}
        parts = [v for v in by_tensor.values() if v is not None]
        total_H = _known(observation, "nonfinite")
        if total_H is None and parts:
            total_H = np.sum(parts, axis=0)
        if total_H is None:
            continue
        counted[observation.layer] = BadLayer(
            layer=observation.layer,
            layer_index=observation.layer_index,
            step=step,
            tensors=tuple(t for t, v in by_tensor.items() if v is not None and v.any()),
            heads=tuple(int(h) for h in np.flatnonzero(total_H)),
            count=float(total_H.sum()),
        )
        if not total_H.any():
            counted[observation.layer] = None
    return counted


def _known(observation: Observation, statistic: str) -> Float64 | None:
    """A count per head, unknown heads as 0; None where no head is known."""
    values = observation.values.get(statistic)
    if values is None or np.isnan(values).all():
        return None
    return np.nan_to_num(values.astype(np.float64))


def _followers(later: Sequence[BadLayer]) -> str:
    """The layers after the first bad one, as the end of a sentence."""
    if not later:
        return ""
    named = ", ".join(b.layer for b in later[:3])
    more = f" and {len(later) - 3} more" if len(later) > 3 else ""
    return f"; later layers follow: {named}{more}"
