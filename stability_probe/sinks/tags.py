"""Which scalar tags TensorBoard gets, and what each one says. Never more than `MAX_TAGS`.

TensorBoard groups cards by what stands before the first slash and lists 12 cards a page, so the
overview is one group of at most 12 cards and each statistic is a group with a card per layer.
Thousands of tags make it slow to write and impossible to read; single heads are left to the run
directory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from stability_probe.records import LayerInfo, Severity
from stability_probe.sinks.window import Fold
from stability_probe.stats.catalogue import CATALOGUE, MAX_LOGIT, Statistic

MAX_TAGS = 200

_SINCE = "since the last point"


def _named(entry: Statistic) -> str:
    return f"{entry.name} ({entry.unit})" if entry.unit else entry.name


def _of(statistic: str, which: str) -> str:
    """What a statistic says, folded over the whole model."""
    entry = CATALOGUE[statistic]
    return f"{_named(entry)}, {which} of any layer {_SINCE}. {entry.meaning}"


OVERVIEW: Mapping[str, str] = MappingProxyType(
    {
        "max_logit": _of(MAX_LOGIT[0], "largest head")
        + f" Where a layer has none: {', '.join(MAX_LOGIT[1:])}, whichever it has first.",
        "logit_gap_max": _of("logit_gap", "largest head"),
        "entropy_ratio_min": _of("entropy_ratio", "lowest head"),
        "entropy_ratio_median": _of("entropy_ratio", "lowest median head"),
        "softmax_slope_min": _of("softmax_slope", "lowest head"),
        "fp16_headroom_log2_min": _of("fp16_headroom_log2", "lowest head"),
        "nonfinite_steps_total": "Steps so far with a NaN or an infinity in attention, the loss "
        "or the gradient norm (steps that a gradient scaler skipped apart).",
        "alerts_total": "Alerts so far. It only grows, so no thinning can hide one.",
        "alert_level": f"Worst alert that fired {_SINCE}: 0 none, 1 info, 2 warning, 3 critical.",
        "loss": f"Training loss, mean of the finite values {_SINCE}.",
        "loss_max": f"Training loss, largest finite value {_SINCE}.",
        "grad_norm": f"Gradient norm, largest finite value {_SINCE}.",
    }
)

# Most telling first: a model with many layers keeps the head of this list.
LAYER_STATISTICS = (
    "qk_abs_max_logit",
    "entropy_ratio",
    "logit_gap",
    "softmax_slope",
    "nonfinite",
    "fp16_headroom_log2",
    "abs_max_logit",
    "q_norm_max",
    "k_norm_max",
    "jacobian_trace",
    "entropy",
)

_LAYER_ROOM = MAX_TAGS - len(OVERVIEW) - len(Severity)
_FOLDS: Mapping[str, Fold] = {"up": "max", "down": "min", "both": "min", "positive": "sum"}
_WORDS: Mapping[Fold, str] = {"max": "largest", "min": "lowest", "sum": "sum"}


@dataclass(frozen=True, slots=True)
class ScalarTag:
    """One scalar series: its name, how its window is folded, and what it says."""

    name: str
    fold: Fold
    description: str


def overview_tag(name: str) -> str:
    """The tag of an overview number: ``stability/<name>``."""
    return f"stability/{name}"


def fold_of(statistic: str) -> Fold:
    """How a statistic is folded over heads and steps: towards its danger; counts are summed.

    Where both ends are dangerous (entropy), the low end is shown: collapse.
    """
    return _FOLDS[CATALOGUE[statistic].danger]


def layer_tags(layers: Iterable[LayerInfo]) -> dict[tuple[str, int], ScalarTag]:
    """The series ``stability.<statistic>/layer.<i>`` that fit, by (statistic, layer index).

    Every default statistic of every layer, where that fits. Else statistics are left out, least
    telling first, down to two: the largest logit and the entropy ratio. Where even those do not
    fit, layers are left out evenly over the depth, the first and the last layer kept. The
    overview covers every layer all the same.
    """
    infos = {layer.index: layer for layer in layers}
    if not infos:
        return {}
    statistics = LAYER_STATISTICS[: max(2, _LAYER_ROOM // len(infos))]
    kept = _spread(sorted(infos), limit=_LAYER_ROOM // len(statistics))
    return {(name, i): _layer_tag(name, infos[i]) for name in statistics for i in kept}


def _layer_tag(statistic: str, layer: LayerInfo) -> ScalarTag:
    entry = CATALOGUE[statistic]
    fold = fold_of(statistic)
    return ScalarTag(
        name=f"stability.{statistic}/layer.{layer.index}",
        fold=fold,
        description=f"`{layer.name}`: {_named(entry)}, {_WORDS[fold]} over the layer's heads "
        f"{_SINCE}. {entry.meaning}",
    )


def _spread(indices: Sequence[int], *, limit: int) -> list[int]:
    if len(indices) <= limit:
        return list(indices)
    last = len(indices) - 1
    return [indices[i * last // (limit - 1)] for i in range(limit)]
