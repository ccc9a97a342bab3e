"""Attention whose q, k, v and scores the test chooses, watched once; and its float64 oracle.

Shape suffixes: B batch, H query heads, G key heads, Q query positions, K key positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import stability_probe as sp
from stability_probe.records import Alert, SiteReport

PER_ENTRY = ("max_logit", "min_logit", "abs_max_logit", "qk_abs_max_logit", "logit_gap")
PER_ROW = ("entropy", "entropy_ratio", "softmax_slope", "jacobian_trace", "top_weight")
COUNTS = ("masked_rows", "rows", "entropy_rows", "keys")


class Attention(nn.Module):
    """Hands whatever it is given to a function."""

    def __init__(self, function: Callable[..., Any], heads: int | None = None) -> None:
        super().__init__()
        self.function = function
        if heads is not None:
            self.num_heads = heads

    def forward(self, *tensors: Any, **options: Any) -> Any:
        return self.function(*tensors, **options)


@dataclass(frozen=True)
class Seen:
    """What a probe told of one step."""

    values: dict[str, Tensor]  # of the first layer
    layers: dict[str, dict[str, Tensor]]
    coverage: tuple[SiteReport, ...]
    alerts: tuple[Alert, ...]
    output: Any


def watch_once(model: nn.Module, *tensors: Any, **options: Any) -> Seen:
    """One training step of a model, every statistic measured."""
    with sp.watch(model, plan=sp.every(1, full_every=1), strict=True) as probe:
        output = model(*tensors, **options)
        probe.step()
        records = list(probe._kept)
        alerts, coverage = probe.alerts, probe.coverage
    layers = {
        o.layer: {n: torch.from_numpy(v) for n, v in o.values.items()}
        for o in records[-1].observations
    }
    return Seen(next(iter(layers.values()), {}), layers, coverage, alerts, output)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers from a generator of their own."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def dense(
    scores_BHQK: Tensor, visible: Tensor | None = None, *, raw_BHQK: Tensor | None = None
) -> dict[str, Tensor]:
    """The statistics by their definitions, in float64, over visible entries only.

    `scores` as softmax received them; `raw` is scale * q k^T, before bias and soft-cap.
    """
    s = scores_BHQK.detach().double()
    raw = s if raw_BHQK is None else raw_BHQK.detach().double()
    seen = torch.ones_like(s, dtype=torch.bool) if visible is None else visible.expand(s.shape)
    n = seen.sum(-1).double()
    p = torch.softmax(s.masked_fill(~seen, -math.inf), -1).masked_fill(~seen, 0.0)
    entropy = -torch.special.xlogy(p, p).sum(-1)
    counts = n >= 2
    trace = 1 - (p * p).sum(-1)
    mean = s.masked_fill(~seen, 0.0).sum(-1) / n
    top = s.masked_fill(~seen, -math.inf).amax(-1)

    def over_rows(x: Tensor) -> Tensor:
        return x.masked_fill(~counts, 0.0).sum((0, 2)) / counts.sum((0, 2))

    slope = (p * (1 - p)).sum(-1).masked_fill(~counts, 0.0).sum((0, 2))
    return {
        "max_logit": s.masked_fill(~seen, -math.inf).amax((0, 2, 3)),
        "min_logit": s.masked_fill(~seen, math.inf).amin((0, 2, 3)),
        "abs_max_logit": s.abs().masked_fill(~seen, 0.0).amax((0, 2, 3)),
        "qk_abs_max_logit": raw.abs().masked_fill(~seen, 0.0).amax((0, 2, 3)),
        "logit_gap": over_rows(top - mean),
        "entropy": over_rows(entropy),
        "entropy_ratio": over_rows(entropy / n.log()),
        "softmax_slope": slope / n.masked_fill(~counts, 0.0).sum((0, 2)),
        "jacobian_trace": over_rows(trace),
        "top_weight": over_rows(p.amax(-1)),
        "masked_rows": (n == 0).sum((0, 2)),
        "rows": torch.full((s.shape[1],), s.shape[0] * s.shape[2]),
        "entropy_rows": counts.sum((0, 2)),
        "keys": n.amax((0, 2)),
    }


def assert_agree(
    got: dict[str, Tensor],
    want: dict[str, Tensor],
    names: tuple[str, ...] = (*PER_ENTRY, *PER_ROW, *COUNTS),
    *,
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> None:
    """Every named statistic is the oracle's, head by head; NaN is equal to NaN."""
    for name in names:
        torch.testing.assert_close(
            got[name].double(), want[name].double(), rtol=rtol, atol=atol, equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )  # fmt: skip
