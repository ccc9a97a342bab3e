"""Which layers hold values that are not finite, in which tensors, and since when.

Shape suffixes: O layers in the newest record, H heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from stability_probe.alerts.gather import gather
from stability_probe.alerts.history import History
from stability_probe.alerts.updates import GRADIENT
from stability_probe.records import FirstBad, Observation

Float64 = npt.NDArray[np.float64]

COUNTED = ("q", "k", "scores", "v", "output")  # in the order in which causes are counted
TENSORS = ("input", *COUNTED)
GRADIENTS = ("grad_output", "grad_v", "grad_q", "grad_k", "grad_input")  # in backward's order


@dataclass(frozen=True, slots=True)
class BadLayer:
    """What is known of one layer's values that are not finite."""

    layer: str
    layer_index: int
    step: int  # the first bad step known
    tensors: tuple[str, ...] = ()  # in the order of TENSORS or GRADIENTS; empty where not known
    heads: tuple[int, ...] = ()
    count: float | None = None  # values; None where only the sentinel saw it
    explained: bool = False


def attention_is_finite(history: History) -> bool:
    """Whether attention's forward held only finite values when it was last looked at."""
    seen = history.measured
    bad_at = history.updates.bad_at
    if bad_at is not None and (seen is None or bad_at >= seen.step):
        return False
    return seen is None or not any(count(seen.observations, seen.step).values())


def bad_forward(counted: Mapping[str, BadLayer | None], told: Sequence[FirstBad]) -> list[BadLayer]:
    """Layers whose forward is bad: earliest step first, then in layer order."""
    layers = {layer: bad for layer, bad in counted.items() if bad}
    for first in told:
        if not first.tensor.startswith(GRADIENT):
            layers[first.layer] = _with_sentinel(layers.get(first.layer), first)
    return sorted(layers.values(), key=lambda bad: (bad.step, bad.layer_index))


def bad_backward(told: Sequence[FirstBad]) -> list[BadLayer]:
    """Layers whose gradients are bad: earliest step first, then as backward goes, last to first.

    Of each layer only the gradients of its first bad step are named.
    """
    layers: dict[str, list[FirstBad]] = {}
    for first in told:
        if first.tensor.startswith(GRADIENT):
            layers.setdefault(first.layer, []).append(first)
    bad = []
    for layer, entries in layers.items():
        step = min(entry.step for entry in entries)
        now = {entry.tensor for entry in entries if entry.step == step}
        tensors = tuple(t for t in GRADIENTS if t in now)
        bad.append(BadLayer(layer, entries[0].layer_index, step, tensors))
    return sorted(bad, key=lambda bad: (bad.step, -bad.layer_index))


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


def count(observations: Sequence[Observation], step: int) -> dict[str, BadLayer | None]:
    """Each layer whose values were counted, with what is bad in it; None where nothing is."""
    total_OH = gather(observations, ["nonfinite"] * len(observations))
    known_O = ~np.isnan(total_OH).all(axis=1)
    clean_O = known_O & ~(total_OH > 0).any(axis=1)
    clean = [observations[i].layer for i in np.flatnonzero(clean_O).tolist()]
    counted: dict[str, BadLayer | None] = dict.fromkeys(clean)
    for observation in [observations[i] for i in np.flatnonzero(~clean_O).tolist()]:
        by_tensor = {t: _known(observation, f"nonfinite_{t}") for t in COUNTED}
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
