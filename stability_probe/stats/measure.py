"""The statistics of plain tensors: no model, no hooks.

Shape suffixes: B batch, H query heads, G key heads, Q query positions, K key positions, D head
width, E value width.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from stability_probe.errors import ShapeError
from stability_probe.records import AttentionCall
from stability_probe.stats.accumulate import read
from stability_probe.stats.backend import Backend
from stability_probe.stats.finish import finish


def measure(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    scale: float | Tensor | None = None,
    causal: bool = False,
    softcap: float | None = None,
    score_mod: Callable[..., Tensor] | None = None,
    mask_mod: Callable[..., Tensor] | None = None,
    sinks: Tensor | None = None,
    enable_gqa: bool = False,
    rows: bool = False,
    backend: Backend = "auto",
) -> dict[str, Tensor]:
    """Every statistic of one attention call, exactly, per query head.

    The scores are softcap(scale q k^T) + mask, formed in float32 whatever the inputs are, and
    read in tiles: memory is O(B H Q). What each value means is in `catalogue.CATALOGUE`.

    Args:
        q: queries [B, H, Q, D]; [H, Q, D] is a batch of one, [Q, D] one head of it. In a floating
            dtype, which is also taken for the dtype in which the run forms its scores.
        k: keys [B, G, K, D], with as many axes as q.
        v: values [B, G, K, E]; only their finiteness is looked at.
        mask: broadcasts to [B, H, Q, K], as in `torch.nn.functional.scaled_dot_product_attention`:
            bool, True where a key is visible, or floating, added to the scores. An added value
            of -9e3 or less masks the key; a milder one is a bias.
        scale: default 1 / sqrt(D). A tensor broadcasts to [B, H, 1, 1].
        causal: hide key j from query i wherever j > i, counted from the top left also where Q and
            K differ. Together with `mask`, which PyTorch forbids, a key is visible only where
            both let it be.
        softcap: c, for scores c tanh(s / c) before the mask.
        score_mod: instead of a soft-cap, a function `(score, b, h, q, k) -> score` of single
            values as `torch.nn.attention.flex_attention` takes it. A score of -inf hides the key.
        mask_mod: a function `(b, h, q, k) -> bool`, True where a key is visible; together with
            `mask` and `causal` a key is visible only where all let it be.
        sinks: logits of a key without a value beside the real ones: one a head [H], or whatever
            broadcasts to [B, H, Q, 1]. They enter `sink_mass` only.
        enable_gqa: let G be a divisor of H; query head h then reads key head h // (H / G).
        rows: also give every row's entropy.
        backend: "auto" takes the Triton kernel where it can read the call, on a CUDA device without
            `score_mod` and `mask_mod`, else PyTorch; "torch" and "triton" force one.

    Returns:
        Statistic name -> float32 [H], on the device of q; `entropy_hist` is [H, 16]. NaN means
        absent: nothing to take it of. With `rows` also `row_entropy` [B, H, Q] in nats, NaN
        where a row has fewer than two visible keys or a score that is not finite.

    Raises:
        ShapeError: shapes, dtypes or devices that do not fit together.
        BackendError: `backend` cannot read this call, or is none.
    """
    q_BHQD, k_BGKD = _four_axes("q", q), _four_axes("k", k)
    v_BGKE = None if v is None else _four_axes("v", v)
    _check_inputs(q_BHQD, k_BGKD, v_BGKE, axes=(q.dim(), k.dim()), enable_gqa=enable_gqa)
    (B, H, Q, D), K = q_BHQD.shape, k_BGKD.shape[2]
    if mask is not None:
        _check_mask(mask, (B, H, Q, K), q.device)
    if isinstance(scale, Tensor):
        _check_scale(scale, (B, H))
    if sinks is not None:
        sinks = sinks[:, None, None] if sinks.dim() == 1 else sinks
        _check_broadcast("sinks", sinks, (B, H, Q, 1), "[batch, heads, queries, 1]")
    if softcap is not None and score_mod is not None:
        raise ShapeError(
            "got softcap and score_mod; expected one of them. Cap inside score_mod instead."
        )
    if softcap is not None and not softcap > 0:
        raise ShapeError(f"softcap is {softcap}; it must be above 0, or None for no cap.")
    call = AttentionCall(
        layer="measure",
        q_BHQD=q_BHQD,
        k_BGKD=k_BGKD,
        v_BGKE=v_BGKE,
        masks=() if mask is None else (mask,),
        causal=causal,
        scale=1 / math.sqrt(D) if scale is None else scale,
        softcap=softcap,
        score_mod=score_mod,
        mask_mod=mask_mod,
        sink_BHQ1=sinks,
        dtype=q.dtype,
    )
    accumulators, row_entropy = read(call, full=True, rows=rows, backend=backend)
    values = finish(accumulators, full=True)
    if row_entropy is not None:
        values["row_entropy"] = row_entropy
    return values


def _four_axes(name: str, x: Tensor) -> Tensor:
    if not 2 <= x.dim() <= 4:
        raise ShapeError(
            f"{name} has shape {_shape(x)}; expected [batch, heads, positions, width], "
            f"[heads, positions, width] or [positions, width]. Reshape it."
        )
    if not x.is_floating_point():
        raise ShapeError(
            f"{name} is {x.dtype}; expected a floating dtype. Convert it, for instance with "
            f"{name}.float()."
        )
    if 0 in x.shape:
        raise ShapeError(f"{name} has shape {_shape(x)}, which holds nothing to measure.")
    return x[(None,) * (4 - x.dim())]


def _check_inputs(
    q: Tensor, k: Tensor, v: Tensor | None, *, axes: tuple[int, int], enable_gqa: bool
) -> None:
    if axes[0] != axes[1]:
        raise ShapeError(
            f"q has {axes[0]} axes and k has {axes[1]}; expected as many. Give both as "
            f"[batch, heads, positions, width]."
        )
    named = {"q": q, "k": k} | ({} if v is None else {"v": v})
    for name, x in named.items():
        if x.device != q.device:
            raise ShapeError(f"{name} is on {x.device} and q on {q.device}. Move it to {q.device}.")
        if x.shape[0] != q.shape[0]:
            raise ShapeError(
                f"{name} has a batch of {x.shape[0]} and q one of {q.shape[0]}; expected the same."
            )
    if q.shape[-1] != k.shape[-1]:
        raise ShapeError(
            f"q has width {q.shape[-1]} and k {k.shape[-1]}; expected the same. If the axes are "
            f"in another order, transpose to [batch, heads, positions, width]."
        )
    H, G = q.shape[1], k.shape[1]
    if H != G and not enable_gqa:
        raise ShapeError(
            f"q has {H} heads and k has {G}. Pass enable_gqa=True if query heads share key heads; "
            f"otherwise transpose to [batch, heads, positions, width]."
        )
    if H % G:
        raise ShapeError(f"q has {H} heads, which is not a multiple of the {G} heads of k.")
    if v is not None and v.shape[1:3] != k.shape[1:3]:
        raise ShapeError(
            f"v has {v.shape[1]} heads and {v.shape[2]} positions, k has {G} and {k.shape[2]}; "
            f"expected the same."
        )


def _check_mask(mask: Tensor, shape: tuple[int, int, int, int], device: torch.device) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ShapeError(
            f"mask is {mask.dtype}; expected bool (True: visible) or a floating dtype (added). "
            f"Convert a 0/1 mask with mask.bool()."
        )
    if mask.device != device:
        raise ShapeError(f"mask is on {mask.device} and q on {device}. Move it to {device}.")
    _check_broadcast("mask", mask, shape, "[batch, heads, queries, keys]")


def _check_scale(scale: Tensor, heads: tuple[int, int]) -> None:
    _check_broadcast("scale", scale, (*heads, 1, 1), "[batch, heads, 1, 1]")


def _check_broadcast(name: str, x: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    fits = x.dim() <= 4 and all(
        a in (1, b) for a, b in zip(reversed(x.shape), reversed(shape), strict=False)
    )
    if not fits:
        raise ShapeError(
            f"{name} has shape {_shape(x)}, which does not broadcast to {meaning} = "
            f"{list(shape)}. Insert axes of size 1 where it is the same for all."
        )


def _shape(x: Tensor) -> list[int]:
    return list(x.shape)
