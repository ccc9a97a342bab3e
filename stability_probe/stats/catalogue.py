"""Every statistic once: its name, unit, pooling, danger, meaning, source and blind spot.

Everything that shows, stores or judges a statistic reads it here. Nothing here imports torch.

In every meaning: S is the score matrix as softmax received it (after any norm, rotary embedding,
the call's real scale, soft-cap and bias), in float32, over visible entries only; p = softmax(S)
over the visible keys; n is the number of visible keys of a row. A key is masked when a bool mask
or -inf drops it, or when its additive mask is -9e3 or less; a milder one is a bias. Rows with
n < 2 have no choice to make: they count for no mean over rows. NaN means absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Pooling = Literal["max", "min", "mean", "sum", "peak"]
Danger = Literal["up", "down", "both", "positive", ""]
Scope = Literal["head", "layer"]

HISTOGRAM_BINS = 16  # of `entropy_hist`, equal in width over [0, 1]


@dataclass(frozen=True, slots=True)
class Statistic:
    """What one number means, and what it does not.

    Attributes:
        name: the key in `measure`'s result, in storage and in tags.
        unit: of the value; empty for a pure number.
        pooling: how micro-batches and ranks merge. "mean" is weighted by its rows (or entries),
            "peak" keeps the whole tuple of the call with the largest absolute `peak_logit`.
        danger: the way that ends badly: "up", "down", "both", or "positive" (anything above 0).
        meaning: the definition.
        source: the paper or tool it comes from; empty for plain arithmetic.
        not_measured: what it is blind to, or is mistaken for.
        scope: "head", or "layer" where all heads carry the same value.
        default: whether every measured step stores it.
        between: whether the steps between measured ones store it too, or instead.
    """

    name: str
    unit: str
    pooling: Pooling
    danger: Danger
    meaning: str
    source: str = ""
    not_measured: str = ""
    scope: Scope = "head"
    default: bool = False
    between: bool = False


_ZHAI = "Zhai et al. 2023, arXiv:2303.06296"
_DEHGHANI = "Dehghani et al. 2023, arXiv:2302.05442"
_WORTSMAN = "Wortsman et al. 2023, arXiv:2309.14322"
_LOW_PRECISION = "arXiv:2510.04212"
_EXTRA_SINK = "Xiao et al. 2023, arXiv:2309.17453; gpt-oss"
_SINKS = "Barbero et al. 2025, arXiv:2504.02732"

_LOGITS = (
    Statistic(
        "qk_abs_max_logit",
        "",
        "max",
        "up",
        "Largest absolute scale x q.k over visible pairs, before soft-cap and bias.",
        _DEHGHANI,
        "Bias and soft-cap, so not always what softmax saw. A maximum grows with the number of "
        "rows it is taken over: compare like with like.",
        default=True,
    ),
    Statistic(
        "max_logit",
        "",
        "max",
        "up",
        "Largest visible S, with its sign.",
        _WORTSMAN,
        "Large negative scores: see abs_max_logit. A shift of whole rows moves it, though softmax "
        "ignores such a shift: see logit_gap.",
    ),
    Statistic(
        "min_logit",
        "",
        "min",
        "both",
        "Smallest visible S, with its sign.",
        "",
        "Which row or key it belongs to; an additive bias may be all there is to it.",
    ),
    Statistic(
        "abs_max_logit",
        "",
        "max",
        "up",
        "Largest absolute visible S.",
        _DEHGHANI,
        "Whether the size comes from q.k or from a bias: compare qk_abs_max_logit.",
        default=True,
    ),
    Statistic(
        "max_logit_low",
        "",
        "max",
        "up",
        "Certified lower bound of max_logit from what the step leaves anyway: the kernel's own "
        "log-sum-exp, or the scores.",
        "",
        "Large negative scores. It is loose while logits are small: a third of the maximum or "
        "less; at a maximum in the hundreds it is within a percent.",
        default=True,
        between=True,
    ),
    Statistic(
        "max_logit_high",
        "",
        "max",
        "up",
        "Certified upper bound of max_logit from what the step leaves anyway: the kernel's own "
        "log-sum-exp, or the scores; else by the norms of queries and keys (Cauchy-Schwarz).",
        "",
        "Large negative scores. See max_logit_low.",
        default=True,
        between=True,
    ),
    Statistic(
        "rotating_max_logit",
        "",
        "max",
        "up",
        "qk_abs_max_logit of one sequence, for the query heads of the key head whose turn it is at "
        "the step; absent in the others. Of a small batch it is of some of the rows, others at "
        "each turn, so that about a 64th of the scores is looked at.",
        _DEHGHANI,
        "The other sequences and rows, so it may lie far below qk_abs_max_logit of the whole.",
        between=True,
    ),
    Statistic(
        "lse_max",
        "nats",
        "max",
        "both",
        "Largest log-sum-exp of a row's visible S.",
        "",
        "The maximum itself: lse lies between max S and max S + ln n.",
    ),
    Statistic(
        "lse_min",
        "nats",
        "min",
        "both",
        "Smallest log-sum-exp of a row's visible S; far below 0 where all of a row's scores are.",
        "",
        "The minimum of S.",
    ),
    Statistic(
        "logit_gap",
        "",
        "mean",
        "up",
        "Mean over rows of max S - mean S: blind to a shift of the row, as softmax is.",
        "",
        "The absolute level, and with it overflow.",
        default=True,
    ),
    Statistic(
        "logit_std",
        "",
        "mean",
        "up",
        "Mean over rows of the standard deviation of S over the row's visible keys.",
        "",
        "Outliers: one large score among a thousand hardly moves it.",
    ),
)

_SHAPE = (
    Statistic(
        "entropy",
        "nats",
        "mean",
        "both",
        "Mean over rows of H = -sum p ln p. 0 is a row that looks at one key, ln n one that looks "
        "everywhere alike.",
        _ZHAI,
        "Health: previous-token heads and sinks sit near 0 and are well. It grows with n: see "
        "entropy_ratio.",
        default=True,
    ),
    Statistic(
        "entropy_ratio",
        "",
        "mean",
        "both",
        "Mean over rows of H / ln n, in [0, 1].",
        _ZHAI,
        "The number of keys really used: 0.5 is sqrt(n) keys.",
        default=True,
    ),
    Statistic(
        "entropy_hist",
        "rows",
        "sum",
        "",
        "Number of rows whose H / ln n falls in each of 16 equal bins over [0, 1]; shape "
        "[heads, 16].",
        "",
        "Which rows they are.",
    ),
    Statistic(
        "softmax_slope",
        "",
        "mean",
        "down",
        "Mean of p (1 - p) over visible entries: the mean diagonal of the softmax Jacobian.",
        "",
        "It shrinks as 1 / n even where nothing is wrong: see jacobian_trace.",
        default=True,
    ),
    Statistic(
        "jacobian_trace",
        "",
        "mean",
        "down",
        "Mean over rows of 1 - sum p^2, the trace of the softmax Jacobian: 0 for a one-hot row, "
        "1 - 1/n for a uniform one.",
        "",
        "The gradient that really arrives: it also depends on v and on what follows.",
        default=True,
    ),
    Statistic(
        "top_weight",
        "",
        "mean",
        "up",
        "Mean over rows of the largest p.",
        "",
        "Breadth: one collapsed row in ten moves it little.",
    ),
    Statistic(
        "top_weight_max",
        "",
        "max",
        "up",
        "Largest p of any row.",
        "",
        "How many rows: a single sharp row makes it 1.",
    ),
    Statistic(
        "first_key_mass",
        "",
        "mean",
        "",
        "Mean over rows of p on the first key: a sink there is common and healthy.",
        _SINKS,
        "Sinks on other keys.",
    ),
    Statistic(
        "sink_mass",
        "",
        "mean",
        "",
        "Mean over rows of the weight of a learned sink, a key without a value beside the real "
        "ones: e^sink / (e^sink + sum of e^S). NaN where a layer has none.",
        _EXTRA_SINK,
        "Sinks on real keys, and every other statistic: p stays over the real keys.",
    ),
    Statistic(
        "tied_max_rows",
        "",
        "mean",
        "",
        "Share of rows with two or more visible scores equal to the row's largest once S is "
        "rounded to the run's dtype.",
        _LOW_PRECISION,
        "Ties that a fused kernel, which keeps S in float32, does not form.",
    ),
    Statistic(
        "saturated_rows",
        "",
        "mean",
        "up",
        "Share of rows whose largest p rounds to exactly 1 in the run's dtype.",
        _LOW_PRECISION,
        "Rows that are sharp but not yet exactly one-hot.",
    ),
)

_NORMS = (
    Statistic(
        "q_norm_max",
        "",
        "max",
        "up",
        "Largest L2 norm of a query row, as it enters the product.",
        "",
        "Whether any key points its way; padded rows count too.",
        default=True,
    ),
    Statistic(
        "q_norm_mean",
        "",
        "mean",
        "up",
        "Mean L2 norm of the query rows.",
        "",
        "Single rows that run away; padded rows count too.",
    ),
    Statistic(
        "k_norm_max",
        "",
        "max",
        "up",
        "Largest L2 norm of a key row; query heads that share a key head share the value.",
        "",
        "Whether any query points its way; padded rows count too.",
        default=True,
    ),
    Statistic(
        "k_norm_mean",
        "",
        "mean",
        "up",
        "Mean L2 norm of the key rows.",
        "",
        "Single rows that run away; padded rows count too.",
    ),
    Statistic(
        "input_rms",
        "",
        "mean",
        "up",
        "Root mean square of the attention module's input.",
        "",
        "Single channels with massive activations.",
        scope="layer",
    ),
    Statistic(
        "peak_logit",
        "",
        "peak",
        "",
        "scale x q.k of the one visible pair where that is largest in absolute value: "
        "scale x peak_q_norm x peak_k_norm x peak_cosine.",
        "",
        "Bias and soft-cap.",
    ),
    Statistic("peak_q_norm", "", "peak", "", "L2 norm of the query of that pair."),
    Statistic("peak_k_norm", "", "peak", "", "L2 norm of the key of that pair."),
    Statistic("peak_cosine", "", "peak", "", "Cosine between the two, in [-1, 1]."),
    Statistic(
        "scale",
        "",
        "peak",
        "",
        "The call's real scale at that pair; 1 where q arrives scaled.",
    ),
)

_FINITE = (
    Statistic(
        "fp16_headroom_log2",
        "log2",
        "min",
        "down",
        "log2(65504 / largest absolute visible q.k as the run forms it, before the scale): below 0 "
        "float16 cannot hold the product, whatever dtype the run uses.",
        "",
        "Whether the run forms float16 scores at all: a fused kernel accumulates in float32. See "
        "fp16_scores.",
        default=True,
    ),
    Statistic(
        "fp16_overflow_unscaled",
        "entries",
        "sum",
        "positive",
        "Visible pairs with |q.k| above 65504 before the scale: potential, from float32.",
        "",
        "Realised overflow: see nonfinite_scores.",
    ),
    Statistic(
        "fp16_overflow_scaled",
        "entries",
        "sum",
        "positive",
        "Visible |S| above 65504: potential, from float32.",
        "",
        "Realised overflow: see nonfinite_scores.",
    ),
    Statistic(
        "fp16_scores",
        "",
        "max",
        "",
        "1 where the run itself forms float16 scores before softmax, so that an overflow would be "
        "real; else 0.",
        "",
        "What a fused kernel does inside.",
        default=True,
    ),
    Statistic(
        "nonfinite",
        "values",
        "sum",
        "positive",
        "Values that are not finite, counted at the first cause: q, k, scores, v, output.",
        "",
        "Later causes, and gradients. Where q and k are finite but their float32 product is not, "
        "the default set counts such a row at its extremes only (one or two scores).",
        default=True,
    ),
    Statistic("nonfinite_q", "values", "sum", "positive", "Values of q that are not finite."),
    Statistic(
        "nonfinite_k",
        "values",
        "sum",
        "positive",
        "Values of k that are not finite, padded keys included; query heads that share a key head "
        "share the value.",
    ),
    Statistic(
        "nonfinite_v",
        "values",
        "sum",
        "positive",
        "Values of v that are not finite, padded keys included; query heads that share a value "
        "head share the value.",
    ),
    Statistic(
        "nonfinite_scores",
        "entries",
        "sum",
        "positive",
        "Scores that are not finite: visible ones, and NaN or +inf under an additive mask, which "
        "cannot hide them.",
        "",
        "What half precision made of them inside a fused kernel.",
    ),
    Statistic(
        "nonfinite_output",
        "values",
        "sum",
        "positive",
        "Values of the attention output that are not finite, in rows with a visible key.",
    ),
    Statistic(
        "nonfinite_masked_output",
        "values",
        "sum",
        "",
        "Values of the attention output that are not finite, in rows without a visible key: often "
        "harmless, if nothing reads them.",
    ),
)

_DENOMINATORS = (
    Statistic(
        "masked_rows",
        "rows",
        "sum",
        "",
        "Rows without a visible key, left out of everything else.",
    ),
    Statistic(
        "mask_leak",
        "rows",
        "sum",
        "positive",
        "Rows where a masked key keeps a weight above 1e-6 because its mask is a finite number, "
        "rows with every key masked so included.",
        "",
        "Bool masks and -inf, which cannot leak.",
    ),
    Statistic("rows", "rows", "sum", "", "Query rows seen."),
    Statistic(
        "entropy_rows",
        "rows",
        "sum",
        "",
        "Rows that count for the means over rows: two or more visible keys, all scores finite.",
    ),
    Statistic("keys", "keys", "max", "", "Largest number of visible keys of a row."),
)

CATALOGUE: Mapping[str, Statistic] = MappingProxyType(
    {s.name: s for s in (*_LOGITS, *_SHAPE, *_NORMS, *_FINITE, *_DENOMINATORS)}
)
"""Every statistic by name, in the order in which tables and pages list them."""

DEFAULT_SET: tuple[str, ...] = tuple(s.name for s in CATALOGUE.values() if s.default)
"""The statistics that every measured step stores."""

BETWEEN_SET: tuple[str, ...] = tuple(s.name for s in CATALOGUE.values() if s.between)
"""The statistics of the steps between measured ones."""

EXACT_SET: tuple[str, ...] = tuple(s.name for s in CATALOGUE.values() if s.default or not s.between)
"""Every statistic of a call as a whole."""

MAX_LOGIT: tuple[str, ...] = ("qk_abs_max_logit", "abs_max_logit", "max_logit")
"""The largest logit, by preference: rules and pictures read the first that a layer has."""
