"""`torch.nn.attention.varlen.varlen_attn`: packed sequences, PyTorch's own.

A window of (-1, 0) is causal. As in flash-attn the last query stands at the last key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stability_probe.capture.adapters.entry_point import EntryPoint
from stability_probe.capture.adapters.kernel_call import (
    Settings,
    output_and_lse,
    packed_sequences,
    refuse,
)
from stability_probe.capture.functions import Seen
from stability_probe.capture.segments import places

_NOT_READ = {
    "block_table": "paged keys",
    "seqused_k": "partly used sequences",
}


def read(arguments: Mapping[str, Any], result: Any) -> Seen:
    """A call of `varlen_attn`."""
    refuse(arguments, _NOT_READ)
    output, lse = output_and_lse(result)
    q, k, v = (arguments[name] for name in ("query", "key", "value"))
    cu_q = arguments["cu_seq_q"]
    cu_k = cu_q if arguments["cu_seq_k"] is None else arguments["cu_seq_k"]
    where = places(cu_q, q.shape[0]), places(cu_k, k.shape[0], outside=-2)
    left, right = arguments["window_size"]
    settings = Settings(seam="varlen", scale=arguments["scale"], window=(left, right))
    if lse is not None and lse.shape == q.shape[:2] != q.shape[1::-1]:
        lse = lse.transpose(0, 1)  # the documents say [T, H], the kernel gives [H, T]
    return packed_sequences(settings, q, k, v, output, where, lse)


ENTRY_POINTS = (EntryPoint("torch.nn.attention.varlen", "varlen_attn", read),)
