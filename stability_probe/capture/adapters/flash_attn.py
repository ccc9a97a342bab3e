"""flash-attn: versions 2, 3 (`flash_attn_interface`) and 4 (`flash_attn.cute`).

All take positions before heads, align the last query with the last key, and count windows
inclusively: (left, right), -1 (in version 4 None) for no limit. The soft-cap comes before ALiBi.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from stability_probe.capture.adapters.entry_point import EntryPoint
from stability_probe.capture.adapters.kernel_call import (
    Settings,
    output_and_lse,
    packed_sequences,
    refuse,
    whole_sequences,
)
from stability_probe.capture.functions import Seen
from stability_probe.capture.segments import UnsupportedCallError, places

_NOT_READ = {
    "block_table": "paged keys",
    "page_table": "paged keys",
    "seqused_q": "partly used sequences",
    "seqused_k": "partly used sequences",
    "q_descale": "float8 queries",
    "qv": "second queries",
    "gather_kv_indices": "gathered keys",
    "score_mod": "score functions in CuTe",
    "mask_mod": "mask functions in CuTe",
}


def read(arguments: Mapping[str, Any], result: Any) -> Seen:
    """A call of any of the functions, packed or not."""
    refuse(arguments, _NOT_READ)
    if arguments.get("attention_chunk"):
        raise UnsupportedCallError("chunked attention (attention_chunk=) is not read")
    q, k, v = _tensors(arguments)
    output, lse = output_and_lse(result)
    settings = settings_of(arguments)
    cu_q = arguments.get("cu_seqlens_q", arguments.get("cu_seqlens"))
    cu_k = arguments.get("cu_seqlens_k", cu_q)
    if cu_q is None or cu_k is None:
        if q.dim() != 4:
            raise UnsupportedCallError(f"queries of shape {list(q.shape)} without cu_seqlens")
        return whole_sequences(settings, q, k, v, output, lse)
    where = places(cu_q, q.shape[0]), places(cu_k, k.shape[0], outside=-2)
    return packed_sequences(settings, q, k, v, output, where, lse)


def settings_of(arguments: Mapping[str, Any]) -> Settings:
    """How the kernel attends, from arguments or from what its backward keeps of them."""
    left, right = (-1 if side is None else side for side in arguments["window_size"])
    softcap = arguments.get("softcap") or 0.0
    return Settings(
        seam="flash_attn",
        scale=arguments["softmax_scale"],
        window=(left, 0) if arguments["causal"] else (left, right),
        softcap=softcap if softcap > 0 else None,
        slopes=arguments.get("alibi_slopes"),
        sink=arguments.get("learnable_sink"),
        dropout=arguments.get("dropout_p") or 0.0,
    )


def _tensors(arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    qkv, kv = arguments.get("qkv"), arguments.get("kv")
    if qkv is not None:
        if arguments.get("num_heads_q") is not None:  # version 3: heads side by side
            raise UnsupportedCallError("packed qkv with grouped keys (num_heads_q=) is not read")
        q, k, v = qkv.unbind(-3)
        return q, k, v
    if kv is not None:
        k, v = kv.unbind(-3)
        return arguments["q"], k, v
    return arguments["q"], arguments["k"], arguments["v"]


_TWO = "flash_attn.flash_attn_interface"
_NAMES = (
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_varlen_kvpacked_func",
)
ENTRY_POINTS = (
    *(EntryPoint(_TWO, name, read) for name in _NAMES),
    *(EntryPoint("flash_attn_interface", name, read) for name in _NAMES[:3]),
    *(EntryPoint("flash_attn.cute.interface", name, read) for name in _NAMES[:2]),
)
