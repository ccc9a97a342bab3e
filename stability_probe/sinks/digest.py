"""A step's record as a handful of numbers: over all layers, and over the heads of each layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from stability_probe.records import FirstBad, Observation, StepRecord
from stability_probe.sinks.tags import LAYER_STATISTICS, ScalarTag, fold_of, overview_tag
from stability_probe.sinks.window import Fold
from stability_probe.stats.catalogue import CATALOGUE, MAX_LOGIT

Number = tuple[str, float | None, Fold]  # tag, value (None: absent), how steps fold

_UFUNCS: Mapping[Fold, np.ufunc] = MappingProxyType(
    {"max": np.maximum, "min": np.minimum, "sum": np.add}
)
_IGNORED: Mapping[Fold, float] = MappingProxyType({"max": -np.inf, "min": np.inf, "sum": 0.0})

# Overview numbers that are the worst layer's value of one statistic.
_WORST: Mapping[str, str] = MappingProxyType(
    {
        "logit_gap_max": "logit_gap",
        "entropy_ratio_min": "entropy_ratio",
        "softmax_slope_min": "softmax_slope",
        "fp16_headroom_log2_min": "fp16_headroom_log2",
    }
)

# Without those that come of rows without a visible key: often nothing reads such rows.
_NONFINITE = frozenset(
    name for name, s in CATALOGUE.items() if name.startswith("nonfinite") and s.danger == "positive"
)


def digest(record: StepRecord, *, tags: Mapping[tuple[str, int], ScalarTag]) -> Iterator[Number]:
    """What one record adds to the window: the overview, then the layers.

    NaN and infinity are left out of every number; where nothing is left, the number is None.

    Args:
        record: The step.
        tags: The layers' series, by (statistic, layer index); others are left out.
    """
    scalars = record.scalars
    observations = record.observations if record.measured else ()
    yield overview_tag("loss"), scalars.loss, "mean"
    yield overview_tag("loss_max"), scalars.loss, "max"
    yield overview_tag("grad_norm"), scalars.grad_norm, "max"
    if not observations:
        return
    layers = {name: _by_layer(observations, name) for name in (*LAYER_STATISTICS, *MAX_LOGIT)}
    yield overview_tag("max_logit"), _largest_logit(layers), "max"
    yield overview_tag("entropy_ratio_median"), _median(observations, "entropy_ratio"), "min"
    for name, statistic in _WORST.items():
        fold = fold_of(statistic)
        worst = _UFUNCS[fold].reduce(list(layers[statistic].values()) or [np.nan])
        yield overview_tag(name), float(worst), fold
    for statistic, values in layers.items():
        for place, value in values.items():
            if tag := tags.get((statistic, observations[place].layer_index)):
                yield tag.name, value, tag.fold


def nonfinite(record: StepRecord, *, known: frozenset[FirstBad] = frozenset()) -> bool:
    """Whether the loss, the gradient norm or attention held a NaN or an infinity at the step.

    A gradient norm of a skipped step does not count: a gradient scaler looks for its scale so.

    Args:
        record: The step.
        known: First bad values reported before; they do not count again.
    """
    scalars = record.scalars
    numbers = (scalars.loss, None if scalars.skipped else scalars.grad_norm)
    counted = any(
        bool((seen.values[name] > 0).any())
        for seen in record.observations
        for name in _NONFINITE & seen.values.keys()
    )
    unknown = not known.issuperset(scalars.first_bad)
    return counted or unknown or any(x is not None and not math.isfinite(x) for x in numbers)


def _by_layer(observations: Sequence[Observation], statistic: str) -> dict[int, float]:
    """The worst head of each layer that has a finite value, by its place; counts are summed."""
    every = ((i, o.values.get(statistic)) for i, o in enumerate(observations))
    seen = [(i, values) for i, values in every if values is not None and len(values)]
    if not seen:
        return {}
    fold = fold_of(statistic)
    places, heads = zip(*seen, strict=True)
    starts = np.cumsum([0, *map(len, heads[:-1])])
    flat = np.concatenate(heads, dtype=np.float64)
    finite = np.isfinite(flat)
    folded = _UFUNCS[fold].reduceat(np.where(finite, flat, _IGNORED[fold]), starts)
    present = np.logical_or.reduceat(finite, starts)
    pairs = zip(places, folded.tolist(), present.tolist(), strict=True)
    return {place: value for place, value, there in pairs if there}


def _largest_logit(layers: Mapping[str, Mapping[int, float]]) -> float | None:
    by_layer: dict[int, float] = {}
    for name in reversed(MAX_LOGIT):
        by_layer |= layers[name]
    return max(by_layer.values(), default=None)


def _median(observations: Sequence[Observation], statistic: str) -> float | None:
    heads = [o.values[statistic] for o in observations if statistic in o.values]
    joined = np.concatenate(heads) if heads else np.empty(0)
    finite = joined[np.isfinite(joined)]
    return float(np.median(finite)) if len(finite) else None
