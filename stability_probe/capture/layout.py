"""Brings calls of any layout into [batch, head, row, column].

Shape suffixes: as in `stability_probe.records`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from stability_probe.capture.functions import Seen
from stability_probe.capture.segments import UnsupportedCallError

__all__ = ["UnsupportedCallError", "batch_and_heads", "canonical"]


def batch_and_heads(lead: torch.Size | tuple[int, ...], heads: int | None) -> tuple[int, int]:
    """Splits the leading dimensions of a score matrix into (batch, heads).

    Three-dimensional calls merge both: `heads`, what the module or caller declares, splits
    them; without it each call has one head. More than two leading dimensions are windows
    times batch, or groups times heads where their product is the declared count.
    """
    if len(lead) == 0:
        return 1, 1
    if len(lead) == 1:
        split = heads if heads and lead[0] % heads == 0 else 1
        return lead[0] // split, split
    if len(lead) > 2 and heads and lead[-1] != heads and lead[-2] * lead[-1] == heads:
        return math.prod(lead[:-2]), heads
    return math.prod(lead[:-1]), lead[-1]


def canonical(seen: Seen, heads: int | None) -> dict[str, Any]:
    """The tensors of `seen` as the fields of an `AttentionCall`.

    Raises:
        UnsupportedCallError: nested tensors, tensors without storage, or shapes that do not fit.
    """
    if seen.unreadable:
        raise UnsupportedCallError(seen.unreadable)
    heads = seen.heads or heads
    tensors = [t for t in (seen.q, seen.k, seen.v, seen.scores, seen.output) if t is not None]
    for tensor in tensors:
        if tensor.is_nested:
            raise UnsupportedCallError(
                "nested tensors of the strided layout are not read; use torch.jagged"
            )
        if tensor.device.type == "meta" or type(tensor).__name__ == "FakeTensor":
            raise UnsupportedCallError("the tensors hold no data (meta device or fake tensors)")
    from_rows = seen.scores is None and seen.weights is None
    fields = _from_rows(seen, heads) if from_rows else _from_softmax(seen, heads)
    return fields | _beside_the_scores(seen, fields)


def _from_rows(seen: Seen, heads: int | None) -> dict[str, Any]:
    q, k, v, output = seen.q, seen.k, seen.v, seen.output
    if q is None or k is None or (seen.seam != "softmax" and (v is None or output is None)):
        raise UnsupportedCallError("q, k, v or the output is missing")
    lead = q.shape[:-2]
    b, h = batch_and_heads(lead, heads)
    groups = k.shape[1] if len(lead) == 2 else h
    scores_shape = (*lead, q.shape[-2], k.shape[-2])

    def by_group(t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        if len(lead) != 2:
            t = t.expand(*lead, *t.shape[-2:])
        elif t.shape[0] == 1:
            t = t.expand(b, *t.shape[1:])
        return t.reshape(b, groups, *t.shape[-2:])

    return {
        "q_BHQD": q.reshape(b, h, *q.shape[-2:]),
        "k_BGKD": by_group(k),
        "v_BGKE": by_group(v),
        "output_BHQE": None if output is None else output.reshape(b, h, *output.shape[-2:]),
        "masks": tuple(_mask(m, scores_shape, (b, h)) for m in seen.masks),
        "scale": _scale(seen.scale, lead, (b, h)),
    }


def _scale(scale: float | Tensor, lead: torch.Size, batch_heads: tuple[int, int]) -> float | Tensor:
    """A scale that broadcasts to [B, H, 1, 1]."""
    if not isinstance(scale, Tensor) or scale.dim() == 0:
        return scale
    return scale.expand(*lead, 1, 1).reshape(*batch_heads, 1, 1)


def _beside_the_scores(seen: Seen, fields: dict[str, Any]) -> dict[str, Any]:
    """The sink logits and the kernel's own log-sum-exp, in the layout of the scores."""
    given = fields["q_BHQD"] if fields.get("scores_BHQK") is None else fields["scores_BHQK"]
    b, h, rows = given.shape[:3]
    sink = fields.get("sink_BHQ1", seen.sink)
    if sink is not None and sink.dim() != 4:
        sink = sink.expand(b, h, 1, 1)
    return {
        "sink_BHQ1": sink,
        "lse_BHQ": None if seen.lse is None else seen.lse.reshape(b, h, rows),
    }


def _from_softmax(seen: Seen, heads: int | None) -> dict[str, Any]:
    matrix = seen.weights
    if matrix is None:
        raise UnsupportedCallError("the softmax gave no output")
    lead, rows, keys = matrix.shape[:-2], matrix.shape[-2], matrix.shape[-1]
    b, h = batch_and_heads(lead, heads)
    return {
        "q_BHQD": None if seen.q is None else _as_rows(seen.q, lead, (b, h)),
        "k_BGKD": None if seen.k is None else _as_rows(seen.k, lead, (b, h)),
        "scores_BHQK": None if seen.scores is None else seen.scores.reshape(b, h, rows, keys),
        "masks": tuple(_mask(m, matrix.shape, (b, h)) for m in seen.masks),
        "sink_BHQ1": None if seen.sink is None else _sink(seen.sink, lead, (b, h)),
        "scale": _scale(seen.scale, lead, (b, h)),
    }


def _as_rows(rows: Tensor, lead: torch.Size, batch_heads: tuple[int, int]) -> Tensor:
    """q or k, laid out as their product was or broadcast to it, as [B, H, rows, D]."""
    if rows.shape[:-2].numel() != lead.numel():
        rows = rows.expand(*lead, *rows.shape[-2:])
    return rows.reshape(*batch_heads, *rows.shape[-2:])


def _mask(mask: Tensor, scores_shape: tuple[int, ...], batch_heads: tuple[int, int]) -> Tensor:
    """A mask that broadcasts to [B, H, Q, K]."""
    if len(scores_shape) == 4:
        return mask
    if mask.dim() <= 2:
        return mask
    return mask.expand(scores_shape).reshape(*batch_heads, *scores_shape[-2:])


def _sink(sink: Tensor, lead: torch.Size, batch_heads: tuple[int, int]) -> Tensor:
    """A column of logits, laid out as the scores are, as [B, H, Q or 1, 1]."""
    return sink.expand(*lead, *sink.shape[-2:]).reshape(*batch_heads, *sink.shape[-2:])
