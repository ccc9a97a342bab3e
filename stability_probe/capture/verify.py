"""Rebuilds a few rows of an attention call and compares them with what the model computed.

This is how the probe knows that the q, k, mask and scale it read are the ones that were used.

Shape suffixes: as in `stability_probe.records`, with R the sampled query rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stability_probe.records import AttentionCall

ROWS = 64  # sampled rows of one sequence: enough to catch a wrong mask, cheap at any length

_TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}  # relative; float32 and wider: 1e-5


@dataclass(frozen=True, slots=True, eq=False)
class Verification:
    """How far the rebuilt rows are from the real ones; the tensors stay on their device."""

    against: str  # "output", "reissued" (once more without dropout) or "weights"
    error: Tensor  # 0-dim, largest absolute difference
    size: Tensor  # 0-dim, largest absolute value compared
    dtype: torch.dtype

    def passed(self) -> bool:
        """Whether the difference is rounding. Waits for the device."""
        return self.relative() <= _TOLERANCE.get(self.dtype, 1e-5)

    def relative(self) -> float:
        """The largest difference over max(1, the largest value compared)."""
        return float(self.error / self.size.clamp(min=1.0))


def verify(call: AttentionCall, weights_BHQK: Tensor | None, dropout: float) -> Verification:
    """Compares the rebuilt rows with the softmax's output, or with the call's own output.

    With attention dropout the call is issued once more, on one sequence, without dropout and
    without gradients; nothing of the model and no random state is touched. Not checked: other
    sequences than the first, and other rows than the sampled ones.
    """
    queries = weights_BHQK.shape[2] if weights_BHQK is not None else _rows_of(call)
    step = max(1, -(-queries // ROWS))
    logits_HRK, visible_HRK = _rebuilt_rows(call, step)
    p_HRK = torch.softmax(logits_HRK.masked_fill(~visible_HRK, float("-inf")), -1)
    live_HR1 = visible_HRK.any(-1, keepdim=True)
    if weights_BHQK is not None:
        return _compared("weights", p_HRK, weights_BHQK[0, :, ::step], live_HR1)
    if call.v_BGKE is None or call.output_BHQE is None:
        raise ValueError("got neither weights nor values and output to compare with")
    v_HKE = _per_query_head(call.v_BGKE[0], p_HRK.shape[0]).float()
    output_HQE = call.output_BHQE[0] if dropout == 0 else _reissued(call)
    rebuilt_HRE = p_HRK.masked_fill(~live_HR1, 0.0) @ v_HKE
    against = "output" if dropout == 0 else "reissued"
    return _compared(against, rebuilt_HRE, output_HQE[:, ::step], live_HR1)


def _rows_of(call: AttentionCall) -> int:
    if call.q_BHQD is None:
        raise ValueError("got a call without q and without weights; one of them is needed")
    return call.q_BHQD.shape[2]


def _rebuilt_rows(call: AttentionCall, step: int) -> tuple[Tensor, Tensor]:
    """Logits and visibility [H, R, K] of every `step`-th row of the first sequence."""
    if call.q_BHQD is None or call.k_BGKD is None:
        if call.scores_BHQK is None:
            raise ValueError("got a call with neither q and k nor scores")
        logits = call.scores_BHQK[0, :, ::step].float()
        return logits, logits > float("-inf")
    q_HRD = call.q_BHQD[0, :, ::step].float()
    k_HKD = _per_query_head(call.k_BGKD[0], q_HRD.shape[0]).float()
    scale = call.scale
    if isinstance(scale, Tensor) and scale.dim() > 0:
        scale = scale.expand(*call.q_BHQD.shape[:2], 1, 1)[0]
    logits = q_HRD @ k_HKD.mT * scale
    if call.softcap is not None:
        logits = torch.tanh(logits / call.softcap) * call.softcap
    visible = torch.ones_like(logits, dtype=torch.bool)
    if call.causal:
        rows = torch.arange(0, call.q_BHQD.shape[2], step, device=logits.device)
        visible &= torch.arange(logits.shape[-1], device=logits.device) <= rows[:, None]
    shape = (*call.q_BHQD.shape[:3], logits.shape[-1])
    for mask in call.masks:
        rows_of_mask = mask.expand(shape)[0, :, ::step]
        if mask.dtype == torch.bool:
            visible &= rows_of_mask
        else:
            logits = logits + rows_of_mask.float()
            visible &= rows_of_mask > float("-inf")
    return logits, visible


def _per_query_head(groups_GKD: Tensor, heads: int) -> Tensor:
    return groups_GKD.repeat_interleave(heads // groups_GKD.shape[0], dim=0)


def _reissued(call: AttentionCall) -> Tensor:
    """The first sequence's output [H, Q, E], computed once more without dropout."""
    if call.seam == "softmax":
        raise ValueError("dropout changes what a compiled softmax's weights gave")
    if call.q_BHQD is None or call.k_BGKD is None or call.v_BGKE is None:
        raise ValueError("got a call without q, k or v; all are needed to issue it again")
    shape = (*call.q_BHQD.shape[:3], call.k_BGKD.shape[2])
    mask = call.masks[0].expand(shape)[:1] if call.masks else None
    return F.scaled_dot_product_attention(
        call.q_BHQD[:1], call.k_BGKD[:1], call.v_BGKE[:1],
        attn_mask=mask, is_causal=call.causal, scale=float(call.scale),
        enable_gqa=call.q_BHQD.shape[1] != call.k_BGKD.shape[1],
    )[0]  # fmt: skip


def _compared(against: str, rebuilt: Tensor, real: Tensor, live: Tensor) -> Verification:
    difference = torch.where(live, (rebuilt - real.float()).abs(), 0.0)
    size = torch.where(live, real.float().abs(), 0.0).amax()
    return Verification(against, difference.amax(), size, real.dtype)
