"""TransformerEngine's `DotProductAttention`: a module, whose own settings a call may override.

Its output has the heads put together in the last axis. A mask that is True hides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stability_probe.capture.adapters.entry_point import EntryPoint
from stability_probe.capture.adapters.kernel_call import (
    Settings,
    packed_sequences,
    refuse,
    whole_sequences,
)
from stability_probe.capture.functions import Seen
from stability_probe.capture.segments import UnsupportedCallError, places

_NOT_READ = {
    "inference_params": "key caches",
    "score_mod": "score functions of cuDNN",
}


def read(arguments: Mapping[str, Any], result: Any) -> Seen:
    """A call of `DotProductAttention.forward`; `self` is among the arguments."""
    refuse(arguments, _NOT_READ)
    module = arguments["self"]
    output, max_logit = result if isinstance(result, tuple) else (result, None)
    q, k, v = _tensors(arguments)
    layout = arguments.get("qkv_format") or module.qkv_format
    settings, kind = _settings(arguments)
    output = output.unflatten(-1, (q.shape[-2], -1))
    if layout == "thd":
        seen = _packed(arguments, settings, (q, k, v, output))
    else:
        if layout == "sbhd":
            q, k, v, output = (t.transpose(0, 1) for t in (q, k, v, output))
        seen = whole_sequences(settings, q, k, v, output)
        seen = replace(seen, masks=_masks(arguments, kind, settings, q.shape[1], k.shape[1]))
    seen = replace(seen, row_max=None if max_logit is None else max_logit.detach())
    return _biased(seen, arguments)


def _tensors(arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    axis = arguments.get("qkv_interleave_dim", -3)
    if arguments.get("qkv_layer") is not None:
        q, k, v = arguments["qkv_layer"].unbind(axis)
        return q, k, v
    q = arguments["query_layer"]
    if arguments.get("kv_layer") is not None:
        k, v = arguments["kv_layer"].unbind(axis)
        return q, k, v
    return q, arguments["key_layer"], arguments["value_layer"]


def _settings(arguments: Mapping[str, Any]) -> tuple[Settings, str]:
    """How the module attends, and the kind of its mask."""
    module = arguments["self"]
    kind = (arguments.get("attn_mask_type") or module.attn_mask_type).replace(",", "_")
    kind = "padding_causal" if kind == "causal_padding" else kind
    given = arguments.get("window_size") or module.window_size or (-1, -1)
    window = (given[0], 0) if "causal" in kind else (-1, -1) if given == (-1, 0) else given
    corner = arguments.get("bottom_right_diagonal")
    corner = module.bottom_right_diagonal if corner is None else corner
    if kind in ("causal", "padding_causal"):
        corner = False
    elif corner is None or "bottom_right" in kind:
        corner = True
    alibi = arguments.get("core_attention_bias_type") == "alibi"
    if alibi and arguments.get("alibi_slopes") is None:
        raise UnsupportedCallError("ALiBi with the slopes that the library makes is not read")
    settings = Settings(
        seam="transformer_engine",
        scale=module.flash_attention.softmax_scale,
        window=(window[0], window[1]),
        bottom_right=corner,
        slopes=arguments["alibi_slopes"] if alibi else None,
        sink=module.softmax_offset,
        dropout=module.attention_dropout if module.training else 0.0,
    )
    return settings, kind


def _packed(arguments: Mapping[str, Any], settings: Settings, tensors: tuple[Tensor, ...]) -> Seen:
    """Sequences packed along the tokens, with room between them where `_padded` says so."""
    q, k, v, output = tensors
    found = []
    for side, tensor, outside in (("q", q, -1), ("kv", k, -2)):
        starts = arguments.get(f"cu_seqlens_{side}")
        if starts is None:
            raise UnsupportedCallError(f"packed tokens without cu_seqlens_{side}")
        room = arguments.get(f"cu_seqlens_{side}_padded")
        lengths = None if room is None else starts.diff()
        where = starts if room is None else room
        found.append(places(where, tensor.shape[0], lengths_N=lengths, outside=outside))
    return packed_sequences(settings, q, k, v, output, (found[0], found[1]))


def _masks(
    arguments: Mapping[str, Any], kind: str, settings: Settings, queries: int, keys: int
) -> tuple[Tensor, ...]:
    """The masks of padded batches, and those of any shape."""
    given = arguments.get("attention_mask")
    if kind == "arbitrary":
        return () if given is None else (~given.detach(),)
    if "padding" not in kind:
        return ()
    if isinstance(given, Tensor):
        hidden_q = hidden_k = given.detach()
    elif given is not None:
        hidden_q, hidden_k = (mask.detach() for mask in given)
    else:
        cu_q, cu_kv = (arguments.get(f"cu_seqlens_{side}") for side in ("q", "kv"))
        if cu_q is None or cu_kv is None:
            raise UnsupportedCallError("a padding mask without attention_mask and cu_seqlens")
        hidden_q, hidden_k = _beyond(cu_q, queries), _beyond(cu_kv, keys)
    if settings.bottom_right and settings.window != (-1, -1) and queries != keys:
        raise UnsupportedCallError("a bottom-right window over padded cross-attention")
    return ~hidden_k, ~hidden_q.transpose(-1, -2)


def _beyond(cu_N1: Tensor, positions: int) -> Tensor:
    """True where a position lies behind its sequence: [B, 1, 1, positions]."""
    index = torch.arange(positions, device=cu_N1.device)
    return (index >= cu_N1.detach().diff()[:, None])[:, None, None]


def _biased(seen: Seen, arguments: Mapping[str, Any]) -> Seen:
    kind, bias = arguments.get("core_attention_bias_type"), arguments.get("core_attention_bias")
    if bias is None or kind not in ("pre_scale_bias", "post_scale_bias"):
        return seen
    bias = bias.detach() * seen.scale if kind == "pre_scale_bias" else bias.detach()
    return replace(seen, masks=(*seen.masks, bias))


_HOME = "transformer_engine.pytorch.attention"
ENTRY_POINTS = tuple(
    EntryPoint(module, "DotProductAttention.forward", read)
    for module in (f"{_HOME}.dot_product_attention.dot_product_attention", _HOME)
)
