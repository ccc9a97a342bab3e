"""Certified brackets on a head's largest logit, from what is there anyway: O(T D), no T x T work.

For one row of scores S over n visible keys, with p = softmax(S), m = max S, H = -sum p ln p:

- e^m <= sum e^S <= n e^m, so lse - ln n <= m <= lse.
- ln p = S - lse, so H = lse - sum p S >= lse - m: hence m >= lse - H.
- max p = e^(m - lse) >= sum p^2, a weighted mean of p, and (max p)^2 <= sum p^2: hence
  lse + ln sum p^2 <= m <= lse + 1/2 ln sum p^2.
- Cauchy-Schwarz: |scale q.k| <= |scale| |q| |k|.
- q.k = q.c + q.(k - c) for any c, so scale q.k <= scale q.c + |scale| |q| |k - c|; and a maximum
  is no less than any mean or member: m >= scale q.(mean of the visible k), m >= scale q.k.

Rounding, with eps = 2^-24. A float32 dot product is off by at most about D eps |q| |k|
(Higham 2002, Accuracy and Stability of Numerical Algorithms, section 3.1), a mean of n keys by
n eps max |k|, a log-sum-exp by about n eps, its exponentials' error and a few eps |lse|. Each
bracket is widened by a multiple of that.

Shape suffixes: B batch, H query heads, G key heads, R query heads per key head (H = G R), Q query
positions, K key positions, D head width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from stability_probe.records import AttentionCall
from stability_probe.stats.masks import MASKED_BIAS, MASKED_SCORE
from stability_probe.stats.tiles import Sizes, scale_of, sizes_of, split_heads

_INF, _NAN = float("inf"), float("nan")
_EPS = 2.0**-24
_EXP_ULPS = 2048.0  # 1.2e-4 of a weight: the CPU kernel's fast exponentials are off by 5.4e-5
_LSE_ULPS = 16.0  # of the level itself: scale, base of the logarithm, maximum put back
_CAP_ULPS = 16.0  # of the cap: division, tanh and product
_LOST_SQUARE = 2.0**-63  # a component whose square is below float32's range adds as much to a norm


@dataclass(frozen=True, slots=True, eq=False)
class Bracket:
    """Where each head's largest logit lies; NaN is an end that is not known."""

    low_H: Tensor  # float32 [heads]
    high_H: Tensor  # float32 [heads]


def lse_bracket(lse: Tensor, visible: Tensor | float) -> tuple[Tensor, Tensor]:
    """Ends of a row's largest score, from its log-sum-exp and its number of visible keys."""
    return lse - (math.log(visible) if isinstance(visible, float) else visible.log()), lse


def entropy_floor(lse: Tensor, entropy: Tensor) -> Tensor:
    """Lower end of a row's largest score, from its log-sum-exp and its entropy in nats."""
    return lse - entropy


def purity_bracket(lse: Tensor, purity: Tensor) -> tuple[Tensor, Tensor]:
    """Ends of a row's largest score, from its log-sum-exp and sum p^2: 1 - jacobian trace."""
    log_purity = purity.log()
    return lse + log_purity, lse + log_purity / 2


def bracket(call: AttentionCall, *, reach_H: Tensor | None = None) -> Bracket:
    """A bracket of `max_logit`, the call's largest visible S, from the cheapest thing there is.

    The kernel's log-sum-exp, else the scores, else q and k (from above Cauchy-Schwarz and centred
    keys, from below the mean key, or the key at the query's own place where causal). A
    log-sum-exp certifies the scores as the kernel itself formed them. Any other way of forming
    them, the measured statistic or float64, differs by the error of a dot product, which only the
    norms of q and k bound: with `reach_H` the bracket is widened by it and holds for those too.

    Never waits for the device. From a log-sum-exp it costs O(B H Q), from q and k O(B H (Q + K) D).

    Args:
        call: the call as softmax received it.
        reach_H: an upper bound of |scale| |q| |k| over each head's pairs, as `reach` gives it.

    Returns:
        Float32 [H]. NaN where there is no row, or no certificate: the upper end where a row's
        log-sum-exp or largest score is NaN or +inf, because the row's other scores are not known
        (queries and keys that are NaN are left out); without log-sum-exp and scores both ends
        where an additive mask or a function changes the scores, the lower end where a mask hides
        keys; and the lower end wherever a masked key could be what was found.

    Raises:
        ValueError: the call has neither q and k nor scores.
    """
    sizes = sizes_of(call)
    given = call.q_BHQD if call.scores_BHQK is None else call.scores_BHQK
    assert given is not None  # sizes_of has looked
    if sizes.empty:
        absent_H = torch.full((sizes.heads,), _NAN, device=given.device)
        return Bracket(absent_H, absent_H)
    with torch.no_grad():
        if call.lse_BHQ is not None:
            return _from_lse(call, call.lse_BHQ.detach(), sizes, reach_H)
        if call.scores_BHQK is not None:
            return _from_scores(call, call.scores_BHQK.detach(), reach_H)
        return _from_norms(call, sizes)


def around(call: AttentionCall, largest_H: Tensor, reach_H: Tensor | None) -> Bracket:
    """A bracket about the measured largest score, as wide as its float32 rounding.

    Args:
        call: the call that it was measured of.
        largest_H: float32 [H]; not finite where there is none.
        reach_H: as `bracket` takes it; None where q and k are not known.
    """
    slack_H = largest_H.abs() * (_LSE_ULPS * _EPS)
    if reach_H is not None and call.q_BHQD is not None:
        slack_H.add_(reach_H, alpha=_product_error(call.q_BHQD.shape[-1]))
    return Bracket(largest_H - slack_H, largest_H + slack_H)


def reach(call: AttentionCall) -> Tensor:
    """An upper bound of |scale q.k| over all pairs of each head, masked ones too: float32 [H].

    |scale| max |q| max |k| of each sequence, rounding included; inf where a norm is beyond
    float32's range, NaN where a query or key is NaN. O(B H (Q + K) D).

    Raises:
        ValueError: q or k is not known.
    """
    if call.q_BHQD is None or call.k_BGKD is None:
        raise ValueError(f"an attention call of {call.layer!r} has no q and k; reach needs both")
    with torch.no_grad():
        sizes = sizes_of(call)
        if sizes.empty:
            return torch.full((sizes.heads,), _NAN, device=call.q_BHQD.device)
        q_BGR1 = _norms(split_heads(call.q_BHQD.detach(), sizes)).amax(-1, keepdim=True)
        k_BG11 = _norms(call.k_BGKD.detach()).amax(-1)[:, :, None, None]
        scale = scale_of(call, sizes, q_BGR1.device).abs().squeeze(-1)
        reach_BGR1 = scale * q_BGR1 * k_BG11
        return reach_BGR1.amax(0).flatten() * (1 + _product_error(call.q_BHQD.shape[-1]))


def _from_lse(
    call: AttentionCall, lse_BHQ: Tensor, sizes: Sizes, reach_H: Tensor | None
) -> Bracket:
    """From the kernel's log-sum-exp; n is at most the keys before the causal edge."""
    high_H = lse_BHQ.to(torch.float32).amax((0, 2))
    known_BHQ = _known(lse_BHQ.to(torch.float32))
    top_H = known_BHQ.amax((0, 2))
    if call.masks or call.mask_mod is not None:
        # a kernel may say 0 of a row without any visible key, as PyTorch's does on a CPU
        known_BHQ = torch.where(known_BHQ == 0, -_INF, known_BHQ)
    known_HQ = known_BHQ.amax(0)  # n is the same for every sequence
    if call.causal:
        low_H = lse_bracket(known_HQ, _visible(sizes, known_HQ.device))[0].amax(-1)
    else:
        low_H = lse_bracket(known_HQ.amax(-1), float(sizes.K))[0]
    # both ends come from log-sum-exps between top - ln K and top
    slack_H = top_H.abs().mul_(_LSE_ULPS * _EPS).add_((sizes.K + _EXP_ULPS) * _EPS)
    if reach_H is not None and call.q_BHQD is not None:
        slack_H.add_(reach_H, alpha=_product_error(call.q_BHQD.shape[-1]))
    return _certain(call, low_H - slack_H, high_H + slack_H, reach_H)


def _visible(sizes: Sizes, device: torch.device) -> Tensor:
    """Number of keys before each query's causal edge, float32 [Q]."""
    seen_Q = torch.arange(1, sizes.Q + 1, device=device, dtype=torch.float32)
    return seen_Q.clamp_max_(float(sizes.K)) if sizes.Q > sizes.K else seen_Q


def _from_scores(call: AttentionCall, scores_BHQK: Tensor, reach_H: Tensor | None) -> Bracket:
    """From the scores themselves: exact."""
    rows_BHQ = scores_BHQK.amax(-1).to(torch.float32)
    return _certain(call, _known(rows_BHQ).amax((0, 2)), rows_BHQ.amax((0, 2)), reach_H)


def _known(rows: Tensor) -> Tensor:
    """-inf in rows that hold a score that is not finite: of their other scores nothing is known."""
    return rows.nan_to_num(nan=-_INF, posinf=-_INF, neginf=-_INF)


def _certain(call: AttentionCall, low_H: Tensor, high_H: Tensor, reach_H: Tensor | None) -> Bracket:
    """NaN where there was no row; and for the lower end, where it could be that of a masked key.

    What was found is the largest score over all keys that a finite mask left in. A key under an
    additive mask scores at most `MASKED_BIAS` + |scale q.k|, so what is above that is visible.
    """
    low_H, high_H = low_H + (low_H - low_H), high_H + (high_H - high_H)  # NaN where not finite
    ceiling = _masked_ceiling(call, reach_H)
    if ceiling is not None:
        low_H = torch.where(low_H > ceiling, low_H, _NAN)
    return Bracket(low_H, high_H)


def _masked_ceiling(call: AttentionCall, reach_H: Tensor | None) -> Tensor | float | None:
    """No key under a finite mask scores above this; None: there is no such key."""
    additive = any(mask.dtype != torch.bool for mask in call.masks)
    if call.scores_BHQK is None and not additive:
        return None if call.score_mod is None else MASKED_SCORE
    if call.scores_BHQK is not None and call.q_BHQD is None and not call.masks:
        return MASKED_SCORE  # where the largest score itself passes for a masked one
    if call.q_BHQD is None or call.k_BGKD is None or call.score_mod is not None:
        return _INF
    return MASKED_BIAS + (reach(call) if reach_H is None else reach_H)


def _from_norms(call: AttentionCall, sizes: Sizes) -> Bracket:
    """From q and k: Cauchy-Schwarz and centred keys above, the mean key below."""
    assert call.q_BHQD is not None
    assert call.k_BGKD is not None
    device = call.q_BHQD.device
    if call.score_mod is not None or any(mask.dtype != torch.bool for mask in call.masks):
        absent_H = torch.full((sizes.heads,), _NAN, device=device)
        return Bracket(absent_H, absent_H)
    scale = scale_of(call, sizes, device)
    q_BGRQD = split_heads(call.q_BHQD.detach(), sizes).to(torch.float32) * scale
    k_BGKD = call.k_BGKD.detach().to(torch.float32)
    mean_BG1D = k_BGKD.mean(2, keepdim=True)
    q_BGRQ = _norms(q_BGRQD)
    arm = q_BGRQ * _largest(_norms(k_BGKD))
    spread = q_BGRQ * _largest(_norms(k_BGKD - mean_BG1D))
    middle = _dot(q_BGRQD, mean_BG1D)
    slack = arm * (4 * _product_error(q_BGRQD.shape[-1]) + 4 * sizes.K * _EPS)
    # fmin: a centre that is not finite leaves Cauchy-Schwarz
    high_H = _capped(call, _top(torch.fmin(arm, middle + spread) + slack), widen=1)
    if call.masks or call.mask_mod is not None:
        return Bracket(torch.full_like(high_H, _NAN), high_H)
    if call.causal:  # every query sees the key at its own place
        n = min(sizes.Q, sizes.K)
        middle = _dot(q_BGRQD[..., :n, :], k_BGKD[..., :n, :])
        slack = slack[..., :n]
    return Bracket(_capped(call, _top(middle - slack), widen=-1), high_H)


def _norms(x: Tensor) -> Tensor:
    """Norms along the last axis, never less than the exact ones but for relative rounding."""
    lost = math.sqrt(x.shape[-1]) * _LOST_SQUARE
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
    return norm.add_(lost)


def _largest(norm_BGK: Tensor) -> Tensor:
    """The largest norm of a head's keys, NaN keys apart: [B, G, 1, 1]."""
    return norm_BGK.nan_to_num(nan=0.0, posinf=_INF).amax(-1)[:, :, None, None]


def _dot(q_BGRQD: Tensor, c_BGQD: Tensor) -> Tensor:
    """q.c of every query with its group's c, [B, G, R, Q]; no product that TF32 could coarsen."""
    return (q_BGRQD * c_BGQD.unsqueeze(2)).sum(-1)


def _top(x_BGRQ: Tensor) -> Tensor:
    """The largest value of each head that is no NaN, [H]; NaN where it is not finite."""
    top_H = x_BGRQ.nan_to_num(nan=-_INF, posinf=_INF, neginf=-_INF).amax((0, 3)).flatten()
    return torch.where(torch.isfinite(top_H), top_H, _NAN)


def _capped(call: AttentionCall, x_H: Tensor, *, widen: int) -> Tensor:
    """The soft-cap of an end, which keeps the order but for the rounding of tanh."""
    c = call.softcap
    if c is None:
        return x_H
    return torch.tanh(x_H / c).mul_(c).add_(widen * _CAP_ULPS * _EPS * c)


def _product_error(width: int) -> float:
    """Error of a float32 product of this width, relative to |scale| |q| |k|, four times over."""
    return 4 * (width + 8) * _EPS
