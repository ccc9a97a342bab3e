"""Rebuilds a few rows of an attention call and compares them with what the model computed.

This is how the probe knows that the q, k, mask and scale it read are the ones that were used.

Shape suffixes: as in `stability_probe.records`, with R the sampled query rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stability_probe.positions import Block
from stability_probe.records import AttentionCall

ROWS = 64  # sampled rows of one sequence: enough to catch a wrong mask, cheap at any length

_TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}  # relative; float32 and wider: 1e-5


@dataclass(frozen=True, slots=True, eq=False)
class Verification:
    """How far the rebuilt rows are from the real ones; the tensors stay on their device."""

    against: str  # "output", "reissued" (once more without dropout), "weights", "lse" or "max"
    error: Tensor  # 0-dim, largest absolute difference
    size: Tensor  # 0-dim, largest absolute value compared
    dtype: torch.dtype

    @property
    def tolerance(self) -> float:
        """The relative difference that rounding explains."""
        return _TOLERANCE.get(self.dtype, 1e-5)

    def passed(self) -> bool:
        """Whether the difference is rounding. Waits for the device."""
        return self.relative() <= self.tolerance

    def relative(self) -> float:
        """The largest difference over max(1, the largest value compared)."""
        return float(self.error / self.size.clamp(min=1.0))


def verify(
    call: AttentionCall,
    weights_BHQK: Tensor | None,
    dropout: float,
    row_max: Tensor | None = None,
) -> Verification:
    """Compares the rebuilt rows with the softmax's output, or with what the kernel gave.

    A kernel's own log-sum-exp and largest scores are compared too where it gives them, and that
    holds with attention dropout as well. Without them, a call with dropout is issued once more,
    on one sequence, without dropout and without gradients; nothing of the model and no random
    state is touched. Not checked: other sequences than the first, and other rows than the
    sampled ones.

    Args:
        call: what was read of the call.
        weights_BHQK: the softmax's output, where there is one.
        dropout: of the attention weights.
        row_max: the kernel's own largest scores, [B, H, Q], or [H] over all rows.
    """
    queries = weights_BHQK.shape[2] if weights_BHQK is not None else _rows_of(call)
    step = max(1, -(-queries // ROWS))
    logits_HRK, visible_HRK = _rebuilt_rows(call, step)
    logits_HRK = logits_HRK.masked_fill(~visible_HRK, float("-inf"))
    live_HR1 = visible_HRK.any(-1, keepdim=True)
    p_HRK = torch.softmax(_with_sink(call, logits_HRK, step), -1)[..., : logits_HRK.shape[-1]]
    if weights_BHQK is not None:
        return _compared("weights", p_HRK, weights_BHQK[0, :, ::step], live_HR1)
    found = _against_the_kernel(call, logits_HRK, live_HR1, row_max, step)
    output_HQE = _output_of(call, dropout, needed=not found)
    if output_HQE is not None and call.v_BGKE is not None:
        v_HKE = _per_query_head(call.v_BGKE[0], p_HRK.shape[0]).float()
        rebuilt_HRE = p_HRK.masked_fill(~live_HR1, 0.0) @ v_HKE
        against = "output" if dropout == 0 else "reissued"
        rebuilt = _compared(against, rebuilt_HRE, output_HQE[:, ::step], live_HR1)
        found.insert(0 if call.seam == "sdpa" else len(found), rebuilt)
    if not found:
        raise ValueError("got neither weights nor values and output to compare with")
    return _worst(found)


def _with_sink(call: AttentionCall, logits_HRK: Tensor, step: int) -> Tensor:
    """The logits with the sink's as one more key."""
    given = call.q_BHQD if call.scores_BHQK is None else call.scores_BHQK
    if call.sink_BHQ1 is None or given is None:
        return logits_HRK
    sink = call.sink_BHQ1.expand(*given.shape[:3], 1)[0, :, ::step]
    return torch.cat((logits_HRK, sink.to(logits_HRK.dtype)), -1)


def _against_the_kernel(
    call: AttentionCall,
    logits_HRK: Tensor,
    live_HR1: Tensor,
    row_max: Tensor | None,
    step: int,
) -> list[Verification]:
    """The rebuilt rows against the log-sum-exp and the largest scores that the kernel gave."""
    found = []
    live_HR = live_HR1.squeeze(-1)
    if call.lse_BHQ is not None:
        lse_HR = torch.logsumexp(logits_HRK, -1)
        found.append(_compared("lse", lse_HR, call.lse_BHQ[0, :, ::step], live_HR))
    if row_max is not None:
        largest_HR = logits_HRK.amax(-1)
        real_HR = row_max[0, :, ::step] if row_max.dim() > 1 else row_max[:, None]
        if row_max.dim() == 1:  # over all rows: no rebuilt one may exceed it
            largest_HR = torch.maximum(largest_HR, real_HR.float())
        found.append(_compared("max", largest_HR, real_HR, live_HR))
    return found


def _output_of(call: AttentionCall, dropout: float, *, needed: bool) -> Tensor | None:
    """The first sequence's output [H, Q, E] without dropout, if it can be had."""
    if call.v_BGKE is None or call.output_BHQE is None:
        return None
    if dropout == 0:
        return call.output_BHQE[0]
    return _reissued(call) if needed else None


def _worst(found: list[Verification]) -> Verification:
    """One comparison that passes only where all do; it keeps the first one's name."""
    errors = torch.stack([v.error / v.size.clamp(min=1.0) / v.tolerance for v in found])
    first = found[0]
    return Verification(first.against, errors.amax() * first.tolerance, first.size.new_ones(()),
                        first.dtype)  # fmt: skip


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
    rows = torch.arange(0, call.q_BHQD.shape[2], step, device=logits.device)
    if call.causal:
        visible &= torch.arange(logits.shape[-1], device=logits.device) <= rows[:, None]
    logits, visible = _with_functions(call, logits, visible, rows)
    shape = (*call.q_BHQD.shape[:3], logits.shape[-1])
    for mask in call.masks:
        rows_of_mask = mask.expand(shape)[0, :, ::step]
        if mask.dtype == torch.bool:
            visible &= rows_of_mask
        else:
            logits = logits + rows_of_mask.float()
            visible &= rows_of_mask > float("-inf")
    return logits, visible


def _with_functions(
    call: AttentionCall, logits_HRK: Tensor, visible_HRK: Tensor, rows_R: Tensor
) -> tuple[Tensor, Tensor]:
    """The logits and their visibility after the call's functions of positions."""
    heads, _, keys = logits_HRK.shape
    first, all_heads, all_keys = (torch.arange(n, device=rows_R.device) for n in (1, heads, keys))
    block = Block(first, all_heads, rows_R, all_keys)
    if call.score_mod is not None:
        logits_HRK = block.modified(call.score_mod, logits_HRK.unsqueeze(0))[0]
        visible_HRK = visible_HRK & (logits_HRK > float("-inf"))
    if call.mask_mod is not None:
        visible_HRK = visible_HRK & block.visible(call.mask_mod)[0]
    return logits_HRK, visible_HRK


def _per_query_head(groups_GKD: Tensor, heads: int) -> Tensor:
    return groups_GKD.repeat_interleave(heads // groups_GKD.shape[0], dim=0)


def _reissued(call: AttentionCall) -> Tensor:
    """The first sequence's output [H, Q, E], computed once more without dropout."""
    if call.seam == "softmax":
        raise ValueError("dropout changes what a compiled softmax's weights gave")
    if call.q_BHQD is None or call.k_BGKD is None or call.v_BGKE is None:
        raise ValueError("got a call without q, k or v; all are needed to issue it again")
    if call.score_mod or call.mask_mod or call.sink_BHQ1 is not None or call.softcap:
        raise ValueError("a kernel with dropout that gives no log-sum-exp cannot be compared")
    if len(call.masks) > 1:
        raise ValueError("a call with dropout and several masks cannot be issued again")
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
