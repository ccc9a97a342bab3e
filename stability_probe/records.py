"""The nouns of the project: frozen records that flow from the hooks to the alerts.

    AttentionCall -> statistics -> Observation -> StepRecord -> rules -> Alert

Nothing here computes. Nothing here imports torch when it runs, so that the rules, the run
directory and the replay work on a machine without it.

Shape suffixes: B batch, H query heads, G key/value heads (H is a multiple of G), Q query
positions, K key positions, D head width, E value width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from torch import Tensor

    Float32 = npt.NDArray[np.float32]


class Severity(StrEnum):
    """How much an alert should worry you."""

    INFO = "info"  # an anomaly that by itself hurts nothing
    WARNING = "warning"  # attention is on a way that ends badly
    CRITICAL = "critical"  # the loss is hurt, or a number has stopped being finite

    @property
    def rank(self) -> int:
        """0 for info, 1 for warning, 2 for critical: for comparisons."""
        return list(Severity).index(self)


class State(StrEnum):
    """Where an alert's episode stands."""

    FIRING = "firing"
    RESOLVED = "resolved"


class Origin(StrEnum):
    """Who raised an alert: a rule over the record, or the probe about its own work."""

    RULE = "rule"  # replay of the run gives it again
    OPERATIONAL = "operational"  # blindness, a full disk, a fault: replay copies it


class Level(StrEnum):
    """How much is measured at a step."""

    SENTINEL = "sentinel"  # finiteness only
    BRACKET = "bracket"  # also bounds on every head's largest logit, and one head exactly
    SEQUENCE = "sequence"  # also the default set of one sequence of each call, exactly
    DEFAULT = "default"  # the default stored set of all sequences, exactly
    FULL = "full"  # every statistic

    @property
    def exact(self) -> bool:
        """Whether whole sequences are measured, of every head."""
        return self in (Level.SEQUENCE, Level.DEFAULT, Level.FULL)

    @property
    def whole(self) -> bool:
        """Whether all sequences are measured, of every head."""
        return self in (Level.DEFAULT, Level.FULL)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AttentionCall:
    """One attention call as softmax received it: what the capture hands to the statistics.

    Either q and k are given, and the scores are ``softcap(scale * q k^T) + masks``, or
    `scores_BHQK` holds the scores themselves, masks already applied; then q and k are given
    only where they could be traced back. References live no longer than the call.

    Masks have the meaning of `torch.nn.functional.scaled_dot_product_attention`: a bool mask
    is True where a key is visible, a float mask is added. Each broadcasts to [B, H, Q, K].

    Where a kernel takes functions of positions instead (FlexAttention, windows, packed
    sequences), `score_mod(scores, b, h, q, k)` maps the scaled products to scores in the place
    of the soft-cap, and `mask_mod(b, h, q, k)` is True where a key is visible. The indices are
    integer tensors of one element each; both functions are vectorised with `torch.vmap`.
    """

    layer: str  # canonical module name
    layer_index: int = 0  # grows with the place of the module in the model
    call_index: int = 0  # 0 for the first call inside one forward of the module
    seam: str = "measure"  # where it was seen: "sdpa", "softmax"
    q_BHQD: Tensor | None = None
    k_BGKD: Tensor | None = None
    v_BGKE: Tensor | None = None
    scores_BHQK: Tensor | None = None
    masks: tuple[Tensor, ...] = ()
    causal: bool = False  # top-left aligned, as SDPA's is_causal
    scale: float | Tensor = 1.0  # a tensor broadcasts to [B, H, 1, 1]
    softcap: float | None = None  # s -> c tanh(s / c), before the masks
    score_mod: Callable[..., Tensor] | None = None  # (scores, b, h, q, k) -> scores
    mask_mod: Callable[..., Tensor] | None = None  # (b, h, q, k) -> bool
    sink_BHQ1: Tensor | None = None  # logits of a key without a value, beside the real ones
    lse_BHQ: Tensor | None = None  # the kernel's own row log-sum-exp, sinks not in it
    output_BHQE: Tensor | None = None
    dtype: torch.dtype | None = None  # in which the run forms its scores (after autocast)
    fused: bool = True  # the kernel accumulates in float32: an overflow is only potential
    pre_scaled: bool = False  # q already carries the scale (nn.MultiheadAttention)
    phase: str = "train"  # or "eval_grad": the module is in eval mode and trains all the same
    input_rms: Tensor | None = None  # 0-dim: root mean square of the module's input
    input: Tensor | None = None  # the module's own, of any shape
    sequences: int | None = None  # where it is not B: packed sequences, a part of a call
    head_offset: int | None = 0  # of the first head here among all ranks' heads; None: not known
    all_heads: int | None = None  # of the layer over all ranks, where it is not H
    replica: bool = False  # another rank makes the same call with the same data


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """The statistics of one layer at one step.

    `values` maps a statistic's name to float32 [heads] (`entropy_hist`: [heads, 16]). NaN
    means absent, and nothing else; a statistic that was not measured has no entry.

    What a statistic was taken over is its coverage class: `rows`, `sequences` and `ranks`. Numbers
    of different classes are not compared with each other. 0 rows or sequences: not known.
    """

    layer: str
    layer_index: int
    values: Mapping[str, Float32]
    sequences: int = 0  # sequences pooled into the record, over micro-batches
    ranks: int = 1
    rows: int = 0  # query rows of each head, likewise

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return max((len(v) for v in self.values.values()), default=0)


@dataclass(frozen=True, slots=True)
class FirstBad:
    """The first step at which a layer's tensor held a value that is not finite."""

    layer: str
    layer_index: int
    tensor: str  # "input" (of the module), "q", "k", "v", "scores", "output" or "grad_" and one
    step: int
    explained: bool = False  # True: rows without any visible key could be all there is to it


@dataclass(frozen=True, slots=True)
class StepScalars:
    """What is known of a step apart from attention; missing values are None, never NaN-coded.

    A loss that really is NaN or infinite is kept as that float.
    """

    step: int
    loss: float | None = None
    grad_norm: float | None = None
    eval_loss: float | None = None
    learning_rate: float | None = None
    skipped: bool = False  # the optimizer did not update (GradScaler)
    phase: str = ""  # the last `mark`
    first_bad: tuple[FirstBad, ...] = ()
    wall_time: float = 0.0  # seconds since the epoch


@dataclass(frozen=True, slots=True, eq=False)
class StepRecord:
    """All that is known of one optimizer step."""

    scalars: StepScalars
    observations: tuple[Observation, ...] = ()
    level: Level = Level.SENTINEL

    @property
    def step(self) -> int:
        """The optimizer update that these forwards led to; the first is 1."""
        return self.scalars.step

    @property
    def measured(self) -> bool:
        """Whether attention statistics were taken at this step, and not only bounds."""
        return bool(self.observations) and self.level is not Level.BRACKET


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One thing worth knowing, at one step, with its evidence and what to do about it."""

    step: int
    rule: str
    severity: Severity
    state: State = State.FIRING
    layer: str | None = None  # None: the whole model, or the probe itself
    layer_index: int | None = None
    heads: tuple[int, ...] = ()
    statistic: str | None = None
    value: float | None = None
    limit: float | None = None
    window: tuple[int, int] | None = None  # first and last step of the evidence
    cause: str = ""
    remedies: tuple[str, ...] = ()
    message: str = ""
    origin: Origin = Origin.RULE
    superseded: bool = False  # its step was run again by a later segment of the run

    def to_dict(self) -> dict[str, Any]:
        """The alert as JSON-ready values, in the order of the fields."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Alert:
        """The inverse of `to_dict`, also from parsed JSON. Unknown keys are ignored."""
        known = {k: v for k, v in d.items() if k in cls.__slots__}
        known["severity"] = Severity(known["severity"])
        known["state"] = State(known.get("state", State.FIRING))
        known["origin"] = Origin(known.get("origin", Origin.RULE))
        for name in ("heads", "remedies"):
            known[name] = tuple(known.get(name) or ())
        if known.get("window") is not None:
            first, last = known["window"]
            known["window"] = (int(first), int(last))
        return cls(**known)


@dataclass(frozen=True, slots=True)
class LayerInfo:
    """One watched layer, as the run's header lists it."""

    name: str
    index: int
    heads: int
    seam: str = ""
    module: str = ""  # the module's class


@dataclass(frozen=True, slots=True)
class SiteReport:
    """One line of the coverage table: what the probe sees of one module, and how well."""

    layer: str
    module: str  # the module's class
    seam: str = ""  # empty: gave nothing
    heads: int = 0
    sees: str = ""  # "qk": q and k are known; "scores": only they are; "scores, qk": both, apart
    calls: int = 0
    attends: str = ""  # "self", "cross", "mixed" (some inputs shared); empty: not known
    key_heads: int = 0  # fewer than `heads` where query heads share keys
    verified: str = "no"  # "output", "reissued", "weights" (what was compared), or "no"
    error: float | None = None  # largest difference of the rebuilt rows, relative
    reason: str = ""  # why not seen or not verified


@dataclass(frozen=True, slots=True)
class RunHeader:
    """What a reader must know before it reads a run's records."""

    schema_version: int = 1
    created: float = 0.0  # seconds since the epoch
    layers: tuple[LayerInfo, ...] = ()
    statistics: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # name -> unit, ...
    versions: Mapping[str, str] = field(default_factory=dict)
    plan: str = ""
    coverage: tuple[SiteReport, ...] = ()
