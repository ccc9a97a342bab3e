"""What the kernels have in common: positions before heads, windows, slopes, packed sequences.

Shape suffixes: B batch, T positions (Q of queries, K of keys), H query heads, G key heads,
D head width, E value width; packed tensors lie as [T, H, D].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from stability_probe.capture.functions import Seen
from stability_probe.capture.segments import (
    Places,
    UnsupportedCallError,
    between,
    window_mask,
    with_slopes,
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Settings:
    """How a kernel was told to attend."""

    seam: str
    scale: float | None = None  # None: 1 / sqrt(D)
    window: tuple[int, int] = (-1, -1)  # keys to the left and right; below 0: without limit
    bottom_right: bool = True  # the last query stands at the last key
    softcap: float | None = None
    slopes: Tensor | None = None  # ALiBi: [H] or [B, H]
    sink: Tensor | None = None  # [H]
    dropout: float = 0.0


def whole_sequences(
    settings: Settings,
    q_BQHD: Tensor,
    k_BKGD: Tensor,
    v_BKGE: Tensor,
    output_BQHE: Tensor,
    lse_BHQ: Tensor | None = None,
) -> Seen:
    """A call on sequences of equal length, positions before heads."""
    ahead = k_BKGD.shape[1] - q_BQHD.shape[1] if settings.bottom_right else 0
    slopes = settings.slopes
    causal = settings.window == (-1, 0) and ahead == 0
    seen = _seen(settings, *(t.transpose(1, 2) for t in (q_BQHD, k_BKGD, v_BKGE, output_BQHE)))
    modified = None
    if slopes is not None:
        modified = with_slopes(slopes, lambda i, j: j - i - ahead, settings.softcap)
    return replace(
        seen,
        causal=causal,
        softcap=settings.softcap if slopes is None else None,
        score_mod=modified,
        mask_mod=None if causal else window_mask(settings.window, ahead=ahead),
        lse=_lse(settings, lse_BHQ, seen),
    )


def packed_sequences(
    settings: Settings,
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGE: Tensor,
    output_THE: Tensor,
    places: tuple[Places, Places],
    lse_HT: Tensor | None = None,
) -> Seen:
    """A call on many sequences packed one after another; `places` are those of q and of k."""
    tensors = (t.transpose(0, 1).unsqueeze(0) for t in (q_THD, k_TGD, v_TGE, output_THE))
    seen = _seen(settings, *tensors)
    query, key = places
    mask, distance = between(query, key, settings.window, bottom_right=settings.bottom_right)
    slopes = settings.slopes
    modified = None
    if slopes is not None:
        if slopes.dim() != 1:
            raise UnsupportedCallError("ALiBi slopes that differ between packed sequences")
        modified = with_slopes(slopes, distance, settings.softcap)
    return replace(
        seen,
        softcap=settings.softcap if slopes is None else None,
        score_mod=modified,
        mask_mod=mask,
        sequences=query.lengths_N.shape[0],
        lse=_lse(settings, None if lse_HT is None else lse_HT.unsqueeze(0), seen),
    )


def _seen(settings: Settings, q: Tensor, k: Tensor, v: Tensor, output: Tensor) -> Seen:
    q, k, v = (t.detach().to(output.dtype) for t in (q, k, v))
    return Seen(
        seam=settings.seam,
        path=(),
        q=q,
        k=k,
        v=v,
        output=output.detach(),
        scale=1 / math.sqrt(q.shape[-1]) if settings.scale is None else float(settings.scale),
        sink=None if settings.sink is None else settings.sink.detach().reshape(1, -1, 1, 1),
        dropout=float(settings.dropout or 0.0),
        dtype=output.dtype,
    )


def _lse(settings: Settings, lse_BHQ: Tensor | None, seen: Seen) -> Tensor | None:
    """The kernel's log-sum-exp where it is that of the scores.

    With causal ALiBi a kernel may shift whole rows, which softmax ignores; whether a sink is in
    it differs from kernel to kernel.
    """
    if lse_BHQ is None or settings.slopes is not None or settings.sink is not None:
        return None
    fits = seen.q is not None and lse_BHQ.shape == seen.q.shape[:3]
    return lse_BHQ.detach() if fits else None


def refuse(arguments: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Raises `UnsupportedCallError` for the first argument that was given and is not read."""
    for name, reason in reasons.items():
        if arguments.get(name) is not None:
            raise UnsupportedCallError(f"{reason} ({name}=) are not read")


def output_and_lse(result: Any) -> tuple[Tensor, Tensor | None]:
    """The output, and the log-sum-exp where the call was asked for it."""
    if isinstance(result, Tensor):
        return result, None
    lse = result[1] if len(result) > 1 and isinstance(result[1], Tensor) else None
    return result[0], lse
