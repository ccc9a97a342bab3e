"""Watches every training forward for values that are not finite, without waiting for a device.

Per layer and kind of tensor it keeps the largest absolute value of the step, and the first step
at which that value was NaN or infinite. A row without any visible key may give NaN by design;
the sentinel cannot tell, so it marks where that could be the explanation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stability_probe.records import AttentionCall

KINDS = ("q", "k", "v", "scores", "output")
NEVER = 2.0**53  # a step that no run reaches, exact in float64


def call_peaks(call: AttentionCall) -> Tensor:
    """Largest absolute value [5] of a call's tensors by kind; 0 where a tensor is not known.

    NaN and infinity show. Of the scores only NaN and +inf count: -inf is a mask.
    """
    scores = call.scores_BHQK
    return _stacked(
        call.q_BHQD,
        call.k_BGKD,
        call.v_BGKE,
        None if scores is None or not scores.numel() else scores.amax().clamp(min=0.0),
        call.output_BHQE,
    )


def value_peaks(v: Tensor, output: Tensor) -> Tensor:
    """As `call_peaks`, of the values and the output of a call that was seen at its softmax."""
    return _stacked(None, None, v, None, output)


def is_bad(peaks: Tensor) -> Tensor:
    """Bool of the same shape: which peaks are not finite."""
    return ~torch.isfinite(peaks)


def bad_steps(peaks: Tensor, step: int) -> Tensor:
    """`step` where a peak is not finite, `NEVER` elsewhere; minima of these pool over steps."""
    wide = torch.float64 if peaks.device.type in ("cpu", "cuda") else torch.float32
    never = torch.full_like(peaks, NEVER, dtype=wide)
    return torch.where(is_bad(peaks), never.clamp(max=step), never)


def _stacked(*tensors: Tensor | None) -> Tensor:
    present = next(t for t in tensors if t is not None)
    none = torch.zeros((), device=present.device)
    return torch.stack([none if t is None or t.numel() == 0 else _largest(t) for t in tensors])


def _largest(tensor: Tensor) -> Tensor:
    """Largest absolute value; both extrema keep NaN. On a CPU far faster than an inf-norm."""
    return torch.maximum(tensor.amax(), -tensor.amin()).float()
