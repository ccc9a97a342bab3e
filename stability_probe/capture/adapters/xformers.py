"""`xformers.ops.memory_efficient_attention`: positions before heads, and masks as objects.

The masks are known by the names of their classes, so that xformers is never imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from stability_probe.capture.adapters.entry_point import EntryPoint
from stability_probe.capture.adapters.kernel_call import (
    Settings,
    output_and_lse,
    packed_sequences,
    whole_sequences,
)
from stability_probe.capture.functions import Seen
from stability_probe.capture.segments import UnsupportedCallError, places

# class -> (window, whether the last query stands at the last key); None: the object's own window
_WHOLE: dict[str, tuple[tuple[int, int] | None, bool]] = {
    "LowerTriangularMask": ((-1, 0), False),
    "LowerTriangularMaskWithTensorBias": ((-1, 0), False),
    "LowerTriangularFromBottomRightMask": ((-1, 0), True),
    "LowerTriangularFromBottomRightLocalAttentionMask": (None, True),
    "LocalAttentionFromBottomRightMask": (None, True),
}
_PACKED: dict[str, tuple[tuple[int, int] | None, bool]] = {
    "BlockDiagonalMask": ((-1, -1), False),
    "BlockDiagonalCausalMask": ((-1, 0), False),
    "BlockDiagonalCausalFromBottomRightMask": ((-1, 0), True),
    "BlockDiagonalCausalLocalAttentionMask": (None, False),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (None, True),
}


def read(arguments: Mapping[str, Any], result: Any) -> Seen:
    """A call of `memory_efficient_attention`."""
    output, _ = output_and_lse(result)
    bias = arguments.get("attn_bias")
    q, k, v, output = (
        _four_axes(t) for t in (*(arguments[n] for n in ("query", "key", "value")), output)
    )
    settings = Settings(
        seam="xformers", scale=arguments.get("scale"), dropout=arguments.get("p") or 0.0
    )
    kind = type(bias).__name__
    if bias is None or isinstance(bias, Tensor):
        return _biased(whole_sequences(settings, q, k, v, output), bias)
    if kind in _WHOLE:
        window, bottom_right = _WHOLE[kind]
        window = window or _own_window(bias)
        settings = replace(settings, window=window, bottom_right=bottom_right)
        seen = whole_sequences(settings, q, k, v, output)
        return _biased(seen, getattr(bias, "_bias", None))
    if kind in _PACKED:
        window, bottom_right = _PACKED[kind]
        settings = replace(settings, window=window or _own_window(bias), bottom_right=bottom_right)
        if len(q) != 1:
            raise UnsupportedCallError(f"{kind} over a batch of {len(q)}; expected one")
        where = (
            places(bias.q_seqinfo.seqstart.to(q.device), q.shape[1]),
            places(bias.k_seqinfo.seqstart.to(q.device), k.shape[1], outside=-2),
        )
        return packed_sequences(settings, q[0], k[0], v[0], output[0], where)
    raise UnsupportedCallError(f"masks of the class {kind} are not read")


def _own_window(bias: Any) -> tuple[int, int]:
    """The window that a mask object holds; a causal one counts the query's own position."""
    if hasattr(bias, "window_left"):
        return bias.window_left, bias.window_right
    return bias._window_size - 1, 0


def _four_axes(t: Tensor) -> Tensor:
    """[B, T, H, D]; without heads there is one, with groups of heads they are put together."""
    if t.dim() == 3:
        return t.unsqueeze(2)
    return t.flatten(2, 3) if t.dim() == 5 else t


def _biased(seen: Seen, bias: Tensor | None) -> Seen:
    if bias is None:
        return seen
    if bias.dim() == 5:
        bias = bias.flatten(1, 2)
    elif bias.dim() == 3:
        bias = bias.unsqueeze(1)
    return replace(seen, masks=(bias.detach(),))


ENTRY_POINTS = (EntryPoint("xformers.ops.fmha", "memory_efficient_attention", read),)
