"""Hugging Face's attention functions that no torch-function mode can look into.

Its "eager" and "sdpa" functions are seen by the mode itself. These take heads before positions
and give positions before heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from stability_probe.capture.adapters.entry_point import EntryPoint
from stability_probe.capture.adapters.kernel_call import (
    Settings,
    packed_sequences,
    refuse,
    whole_sequences,
)
from stability_probe.capture.functions import Seen
from stability_probe.capture.segments import places


def read_flex(arguments: Mapping[str, Any], result: Any) -> Seen:
    """`flex_attention_forward`: the soft-cap, then bias and mask, and a sink after all."""
    output = result[0].transpose(1, 2)
    q, k, v = (arguments[n].detach().to(output.dtype) for n in ("query", "key", "value"))
    mask, scale = arguments.get("attention_mask"), arguments.get("scaling")
    dense = mask[:, :1, :, : k.shape[-2]] if isinstance(mask, Tensor) else None
    biases = (dense, arguments.get("position_bias"))
    lse, sink = result[1], arguments.get("s_aux")
    return Seen(
        seam="huggingface",
        path=(),
        q=q,
        k=k,
        v=v,
        masks=tuple(b.detach() for b in biases if b is not None),
        mask_mod=getattr(mask, "mask_mod", None),
        softcap=arguments.get("softcap"),
        scale=1 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
        sink=None if sink is None else sink.detach().reshape(1, -1, 1, 1),
        output=output.detach(),
        lse=None if lse is None else lse.detach(),
        dtype=output.dtype,
    )


def read_flash(arguments: Mapping[str, Any], result: Any) -> Seen:
    """`flash_attention_forward`: a padding mask [B, K], or sequences packed along a batch of one.

    Sequences are packed where `cu_seq_lens_q` and its companions are given, or where position
    ids start again. A mask is bottom-right aligned; versions of flash-attn before 2.1, which
    aligned it top-left, differ where there are more keys than queries.
    """
    refuse(arguments, {"block_table": "paged keys"})
    output = result[0]
    q, k, v = (arguments[n].transpose(1, 2) for n in ("query", "key", "value"))
    settings = _settings(arguments, keys=k.shape[1])
    padding = arguments.get("attention_mask")
    cu_q, cu_k = (arguments.get(f"cu_seq_lens_{side}") for side in "qk")
    lengths = [arguments.get(f"max_length_{side}") for side in "qk"]
    packs = padding is None and all(length is not None for length in lengths)
    if packs and cu_q is not None and cu_k is not None:
        packed = (t.flatten(0, 1) for t in (q, k, v, output))
        q_THD, k_TGD, v_TGE, output_THE = packed
        where = (places(cu_q, q_THD.shape[0]), places(cu_k, k_TGD.shape[0], outside=-2))
        return packed_sequences(settings, q_THD, k_TGD, v_TGE, output_THE, where)
    seen = whole_sequences(settings, q, k, v, output)
    if padding is not None:
        return replace(seen, masks=_padding(padding, q.shape[1]))
    return _packed_by_position(seen, arguments.get("position_ids"))


def _settings(arguments: Mapping[str, Any], *, keys: int) -> Settings:
    causal = arguments.get("is_causal")
    if causal is None:
        causal = getattr(arguments["module"], "is_causal", False)
    size = arguments.get("sliding_window")
    side = size - 1 if size is not None and keys > size else -1
    return Settings(
        seam="huggingface",
        scale=arguments.get("scaling"),
        window=(side, 0) if causal else (side, side),
        softcap=arguments.get("softcap"),
        sink=arguments.get("s_aux"),
        dropout=arguments.get("dropout") or 0.0,
    )


def _padding(mask_BK: Tensor, queries: int) -> tuple[Tensor, ...]:
    """Padded keys are dropped, and as many padded queries, which are the same positions."""
    real_BK = mask_BK.detach().bool()
    keys = real_BK[:, None, None, :]
    if queries != real_BK.shape[1]:
        return (keys,)
    return keys, real_BK[:, None, :, None]


def _packed_by_position(seen: Seen, position_ids: Tensor | None) -> Seen:
    """Keeps sequences apart that start again at position 0, in a batch of one."""
    if seen.q is None or seen.k is None or position_ids is None:
        return seen
    if len(seen.q) != 1 or position_ids.shape[-1] != seen.k.shape[-2]:
        return seen
    sequence_K = (position_ids.detach().reshape(-1) == 0).cumsum(0)
    inner = seen.mask_mod

    def same(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        apart = sequence_K[i] == sequence_K[j]
        return apart if inner is None else apart & inner(b, h, i, j)

    return replace(seen, mask_mod=same) if seen.q.shape[-2] == len(sequence_K) else seen


_HOME = "transformers.integrations"
ENTRY_POINTS = (
    EntryPoint(f"{_HOME}.flex_attention", "flex_attention_forward", read_flex),
    EntryPoint(f"{_HOME}.flash_attention", "flash_attention_forward", read_flash),
)
