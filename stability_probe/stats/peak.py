"""The one pair of a head with the largest logit, taken apart: scale x |q| x |k| x cosine.

Shape suffixes: B batch, H query heads, G key heads, R query heads per key head, Q query
positions, K key positions, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stability_probe.records import AttentionCall
from stability_probe.stats.rowsums import INF, Rows
from stability_probe.stats.tiles import scale_of, sizes_of


def peak_of(call: AttentionCall, rows: Rows) -> Tensor:
    """The peak of each head: float32 [5, H] in the order of `accumulators.PEAK`.

    The rows' extrema say which query it is. NaN where q and k are not known, or no pair is
    visible.
    """
    sizes = sizes_of(call)
    high_HN, low_HN = (
        rows[name].flatten(1, 2).transpose(0, 1).flatten(1)
        for name in ("raw_largest", "raw_smallest")
    )
    H, Q = sizes.heads, sizes.Q
    if call.q_BHQD is None or call.k_BGKD is None or sizes.empty:
        return high_HN.new_full((5, H), float("nan"))
    n_H = torch.maximum(high_HN, -low_HN).argmax(-1)
    h_H = torch.arange(H, device=n_H.device)
    high_H, low_H = high_HN[h_H, n_H], low_HN[h_H, n_H]
    return peak_at(call, n_H // Q, n_H % Q, torch.where(high_H >= -low_H, high_H, low_H))


def peak_at(call: AttentionCall, b_H: Tensor, i_H: Tensor, logit_H: Tensor) -> Tensor:
    """The peak of each head whose sequence, query and value of scale x q.k are known.

    That one row per head is formed again, and the key is the one whose product comes nearest.

    Args:
        call: with q and k.
        b_H: int64.
        i_H: int64.
        logit_H: float32; infinite where no pair is visible.
    """
    assert call.q_BHQD is not None
    assert call.k_BGKD is not None
    sizes = sizes_of(call)
    H, h_H = sizes.heads, torch.arange(sizes.heads, device=logit_H.device)
    q_HD = call.q_BHQD.detach()[b_H, h_H, i_H].to(torch.float32)
    k_HKD = call.k_BGKD.detach()[b_H, h_H // sizes.R].to(torch.float32)
    scale = scale_of(call, sizes, logit_H.device).expand(sizes.B, sizes.G, sizes.R, 1, 1)
    scale_H = scale.reshape(sizes.B, H)[b_H, h_H]
    s_HK = torch.bmm(k_HKD, (q_HD * scale_H[:, None]).unsqueeze(-1)).squeeze(-1)
    distance_HK = torch.nan_to_num((s_HK - logit_H[:, None]).abs(), nan=INF)
    k_HD = k_HKD[h_H, distance_HK.argmin(-1)]

    q_norm_H, k_norm_H = (torch.linalg.vector_norm(x, dim=-1) for x in (q_HD, k_HD))
    cosine_H = (logit_H / (scale_H * q_norm_H * k_norm_H)).clamp(-1.0, 1.0)
    peak = torch.stack((logit_H, q_norm_H, k_norm_H, cosine_H, scale_H))
    return torch.where(torch.isfinite(logit_H), peak, float("nan"))
