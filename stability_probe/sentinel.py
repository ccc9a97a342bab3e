"""Watches every training forward and backward for values that are not finite, without waiting.

Per layer and kind of tensor it keeps one float32 number that is finite where the whole tensor
is: its sum, or, of the scores, the largest one. A sum is one reduction, and two extrema are two.
Where finite values sum to more than 3.4e38 in float32 the sum overflows and they count as not
finite. A row without any visible key may give NaN by design; the sentinel cannot tell, so it
marks where that could be the explanation.

On a CPU there is no device to wait for: sums are looked at at once, and as few as decide. Only
where they do not say that all is well are the witnesses taken, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stability_probe.finite import known_finite, local
from stability_probe.records import AttentionCall

FORWARD = ("input", "q", "k", "v", "scores", "output")
BACKWARD = ("grad_output", "grad_v", "grad_q", "grad_k", "grad_input")
KINDS = (*FORWARD, *BACKWARD)
NEVER = 2.0**53  # a step that no run reaches, exact in float64


def call_is_finite(call: AttentionCall) -> bool:
    """Whether all that counts of a call is known to be finite, as `known_finite` knows it.

    The input counts only beside others. A value that is not finite always reaches the outputs
    of the rows that see it, even with a weight of 0. A query or a key need not: a score of -inf
    looks like a mask.
    """
    scores = call.scores_BHQK
    if scores is not None and scores.numel() > 0:
        scores = scores.amax().clamp(min=0.0)  # -inf is a mask
    v = None if _output_tells_values(call) else call.v_BGKE
    return known_finite(call.output_BHQE, call.q_BHQD, call.k_BGKD, v, scores)


def _output_tells_values(call: AttentionCall) -> bool:
    """Whether every value is seen by a row of SDPA's output."""
    q, k, output = call.q_BHQD, call.k_BGKD, call.output_BHQE
    if call.seam != "sdpa" or call.masks or q is None or k is None or output is None:
        return False
    last = q.shape[-2] if call.causal else k.shape[-2]
    return output.numel() > 0 and k.shape[-2] <= last


def call_witness(call: AttentionCall) -> Tensor:
    """A number per forward kind [6], finite where the tensor is; 0 where none is known.

    Of the scores only NaN and +inf count: -inf is a mask.
    """
    scores = call.scores_BHQK
    given = call.q_BHQD if scores is None else scores
    return _stacked(
        torch.device("cpu") if given is None else given.device,
        _total(call.input),
        _total(call.q_BHQD),
        _total(call.k_BGKD),
        _total(call.v_BGKE),
        None if scores is None or scores.numel() == 0 else scores.amax().clamp(min=0.0).float(),
        _total(call.output_BHQE),
    )


def value_witness(v: Tensor, output: Tensor) -> Tensor:
    """As `call_witness`, of the values and the output of a call that was seen at its softmax."""
    return _stacked(v.device, None, None, None, _total(v), None, _total(output))


def gradient_witness(gradient: Tensor) -> Tensor:
    """A number, 0-dim float32, that is finite where the whole gradient is. One reduction."""
    total = _total(gradient)
    return torch.zeros((), device=gradient.device) if total is None else total


def pooled(one: Tensor | None, two: Tensor) -> Tensor:
    """The witness of both; NaN and +-inf of either stay visible."""
    return two if one is None else one + two


def table(rows: Sequence[tuple[Tensor | None, Mapping[str, Tensor]]]) -> Tensor:
    """Forward witness and gradients of the layers on one device, [layers, 11] by `KINDS`."""
    device = next(t for forward, back in rows for t in (forward, *back.values()) if t is not None)
    none = torch.zeros((), device=device.device)
    blank = none.expand(len(FORWARD))
    forward = torch.stack([blank if row is None else row for row, _ in rows])
    if not any(back for _, back in rows):
        return torch.cat([forward, none.expand(len(rows), len(BACKWARD))], dim=1)
    backward = torch.stack([back.get(kind, none) for _, back in rows for kind in BACKWARD])
    return torch.cat([forward, backward.view(len(rows), -1)], dim=1)


def is_bad(witness: Tensor) -> Tensor:
    """Bool of the same shape: which are not finite."""
    return ~torch.isfinite(witness)


def any_bad(witness: Tensor) -> Tensor:
    """Bool, 0-dim: whether anything in a table is not finite. The input alone does not count."""
    return is_bad(witness[:, 1:]).any()


def bad_steps(witness: Tensor, step: int) -> Tensor:
    """`step` where a witness is not finite, `NEVER` elsewhere; minima of these pool over steps."""
    wide = torch.float64 if witness.device.type in ("cpu", "cuda") else torch.float32
    never = torch.full_like(witness, NEVER, dtype=wide)
    return torch.where(is_bad(witness), never.clamp(max=step), never)


def told(steps: Sequence[float]) -> list[tuple[str, int]]:
    """The kinds that were bad and their first step, from a layer's row of `bad_steps`.

    The input is told only where attention itself went bad at that step: what a module is given
    first may be a mask, whose -inf is no event.
    """
    first = dict(zip(KINDS, steps, strict=True))
    own = min(first[kind] for kind in FORWARD[1:])
    return [
        (kind, int(step))
        for kind, step in first.items()
        if step < NEVER and (kind != "input" or step == own)
    ]


def _total(tensor: Tensor | None) -> Tensor | None:
    """Sum, 0-dim float32, of the part that lies here; None of nothing."""
    tensor = local(tensor)
    if tensor is None:
        return None
    if tensor.dtype == torch.float16:  # its own range would overflow
        return tensor.sum(dtype=torch.float32)
    return tensor.sum().float()


def _stacked(device: torch.device, *numbers: Tensor | None) -> Tensor:
    none = torch.zeros((), device=device)
    return torch.stack([none if t is None else t for t in numbers])
