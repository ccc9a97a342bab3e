"""Stand-ins for libraries that need a GPU: the real signatures, computed with dense maths.

The maths is NumPy inside an autograd function, so that a torch-function mode sees none of it and
gradients still flow.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Hidden(torch.autograd.Function):
    """softmax(scores) v in NumPy, out of sight; its gradients are those of a plain sum."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, v: Tensor) -> Tensor:
        s = scores.detach().double().numpy()
        with np.errstate(all="ignore"):
            e = np.exp(
                s - np.where(np.isfinite(m := s.max(-1, keepdims=True, initial=-np.inf)), m, 0.0)
            )
            p = np.nan_to_num(e / e.sum(-1, keepdims=True))
        ctx.shapes = scores.shape, v.shape
        return torch.from_numpy(p @ v.detach().double().numpy()).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(grad.new_full(shape, 1e-3) for shape in ctx.shapes)


def scores_of(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None,
    window: tuple[int, int] = (-1, -1),
    bottom_right: bool = True,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
) -> Tensor:
    """The scores [B, H, Q, K] of q [B, Q, H, D] and k [B, K, G, D], -inf where hidden."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    s = np.einsum("bqhd,bkhd->bhqk", *(t.detach().double().numpy() for t in (q, k)))
    s = s * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap > 0:
        s = softcap * np.tanh(s / softcap)
    Q, K = s.shape[-2:]
    i = np.arange(Q)[:, None] + (K - Q if bottom_right else 0)
    j = np.arange(K)
    if slopes is not None:
        slope = slopes.double().numpy().reshape(-1, s.shape[1], 1, 1)
        s = s - slope * np.abs(i - j)
    left, right = window
    if left >= 0:
        s = np.where(j < i - left, -np.inf, s)
    if right >= 0:
        s = np.where(j > i + right, -np.inf, s)
    return torch.from_numpy(s)


def weigh(scores: Tensor, v: Tensor, sink: Tensor | None = None) -> Tensor:
    """The output [B, Q, H, E] of scores [B, H, Q, K] over v [B, K, G, E]."""
    v_BHKE = v.repeat_interleave(scores.shape[1] // v.shape[2], 2).transpose(1, 2)
    if sink is not None:
        more = sink.detach().double().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, more), -1)
        v_BHKE = torch.cat((v_BHKE, torch.zeros_like(v_BHKE[:, :, :1])), 2)
    return Hidden.apply(scores, v_BHKE).transpose(1, 2)


def by_segment(
    cu_q: Tensor, cu_k: Tensor, q: Tensor, k: Tensor, v: Tensor, **how: Any
) -> tuple[Tensor, Tensor]:
    """Packed attention, one sequence after another: output [T, H, E] and lse [H, T]."""
    out, lse = [], []
    for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        s = scores_of(q[None, a:b], k[None, c:d], **how)
        out.append(weigh(s, v[None, c:d])[0])
        lse.append(torch.logsumexp(s, -1)[0].float())
    return torch.cat(out), torch.cat(lse, -1)


# flash-attn, version 2: flash_attn/flash_attn_interface.py of 2.8.4


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    window = (window_size[0], 0) if causal else window_size
    s = scores_of(q, k, scale=softmax_scale, window=window, softcap=softcap, slopes=alibi_slopes)
    out = weigh(s, v)
    return (out, torch.logsumexp(s, -1).float(), None) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    return flash_attn_func(
        *qkv.unbind(2), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q,
    kv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    return flash_attn_func(
        q, *kv.unbind(2), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    window = (window_size[0], 0) if causal else window_size
    out, lse = by_segment(
        cu_seqlens_q, cu_seqlens_k, q, k, v,
        scale=softmax_scale, window=window, softcap=softcap, slopes=alibi_slopes,
    )  # fmt: skip
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_qkvpacked_func(
    qkv,
    cu_seqlens,
    max_seqlen,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    return flash_attn_varlen_func(
        *qkv.unbind(1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q,
    kv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    return flash_attn_varlen_func(
        q, *kv.unbind(1), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


TWO = (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_kvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
)


# flash-attn, version 3: hopper/flash_attn_interface.py


def flash_attn_3_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    window = (window_size[0], 0) if causal else window_size
    s = scores_of(q, k, scale=softmax_scale, window=window, softcap=softcap)
    return (weigh(s, v), torch.logsumexp(s, -1).float()) if return_attn_probs else weigh(s, v)


# flash-attn, version 4: flash_attn/cute/interface.py


def flash_attn_4_func(
    q,
    k,
    v,
    qv=None,
    gather_kv_indices=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    score_mod=None,
    score_mod_bwd=None,
    mask_mod=None,
    aux_tensors=None,
    aux_scalars=None,
    block_sparse_tensors=None,
    block_sparse_tensors_bwd=None,
    return_lse=False,
):
    left, right = (-1 if w is None else w for w in window_size)
    s = scores_of(q, k, scale=softmax_scale, window=(left, 0 if causal else right), softcap=softcap)
    return weigh(s, v, learnable_sink)


# xformers: xformers/ops/fmha/__init__.py and attn_bias.py


class LowerTriangularMask:
    def __init__(self, device=None):
        pass


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    def __init__(self, bias):
        self._bias = bias


class LowerTriangularFromBottomRightMask:
    pass


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    _window_size: int


@dataclass
class LocalAttentionFromBottomRightMask:
    window_left: int
    window_right: int


@dataclass
class _SeqLenInfo:
    seqstart: Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list


@dataclass
class BlockDiagonalMask:
    q_seqinfo: _SeqLenInfo
    k_seqinfo: _SeqLenInfo
    _batch_sizes: Any = None

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_seqlen=None):
        def info(lengths):
            starts = [0, *np.cumsum(lengths).tolist()]
            return _SeqLenInfo(
                torch.tensor(starts, dtype=torch.int32), max(lengths), min(lengths), starts
            )

        return cls(info(q_seqlen), info(kv_seqlen or q_seqlen))


class BlockDiagonalCausalMask(BlockDiagonalMask):
    pass


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    pass


@dataclass
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    _window_size: int = 0


class BlockDiagonalGappyKeysMask(BlockDiagonalMask):
    pass


def memory_efficient_attention(
    query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None
):
    five = query.dim() == 5
    shape = query.shape
    if query.dim() == 3:
        query, key, value = (t.unsqueeze(2) for t in (query, key, value))
    if five:
        query, key, value = (t.flatten(2, 3) for t in (query, key, value))
    if isinstance(attn_bias, BlockDiagonalMask):
        size = getattr(attn_bias, "_window_size", 0)
        causal = "Causal" in type(attn_bias).__name__
        out, _ = by_segment(
            attn_bias.q_seqinfo.seqstart, attn_bias.k_seqinfo.seqstart,
            query[0], key[0], value[0], scale=scale,
            window=(size - 1, 0) if causal else (-1, -1),
            bottom_right="BottomRight" in type(attn_bias).__name__,
        )  # fmt: skip
        return out[None]
    window, corner, bias = (-1, -1), False, None
    if isinstance(attn_bias, Tensor):
        bias = attn_bias
    elif isinstance(attn_bias, LocalAttentionFromBottomRightMask):
        window, corner = (attn_bias.window_left, attn_bias.window_right), True
    elif isinstance(attn_bias, LowerTriangularFromBottomRightMask):
        window, corner = (getattr(attn_bias, "_window_size", 0) - 1, 0), True
    elif isinstance(attn_bias, LowerTriangularMask):
        window, bias = (-1, 0), getattr(attn_bias, "_bias", None)
    s = scores_of(query, key, scale=scale, window=window, bottom_right=corner)
    if bias is not None:
        s = s + (bias.flatten(1, 2) if bias.dim() == 5 else bias).detach()
    out = weigh(s, value)
    return out.reshape(*shape[:-1], -1)


def package(name: str, *functions: Callable[..., Any], **renamed: Any) -> types.ModuleType:
    """A module of that name with functions of its own, as if they were defined there."""
    module = types.ModuleType(name)
    for key, function in {**{f.__name__: f for f in functions}, **renamed}.items():
        if isinstance(function, types.FunctionType):
            copied = types.FunctionType(
                function.__code__, function.__globals__, key, function.__defaults__,
                function.__closure__,
            )  # fmt: skip
            copied.__kwdefaults__ = function.__kwdefaults__
            copied.__module__, copied.__qualname__ = name, key
            function = copied
        setattr(module, key, function)
    sys.modules[name] = module
    return module
