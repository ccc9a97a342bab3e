"""Nested tensors of the jagged layout, read as the packed sequences that they are.

Shape suffixes: B sequences, T packed positions, H heads, D head width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stability_probe.capture.functions import Seen
from stability_probe.capture.segments import UnsupportedCallError, between, places


def is_jagged(tensor: Tensor | None) -> bool:
    """Whether a tensor is nested, in the jagged layout."""
    return tensor is not None and tensor.is_nested and tensor.layout == torch.jagged


def values_of(tensor: Tensor) -> Tensor:
    """The packed values of a jagged tensor; any other tensor as it is."""
    return tensor.values() if is_jagged(tensor) else tensor


def packed(seen: Seen) -> Seen:
    """A call on jagged q, k and v [B, H, jagged, D] as one packed sequence [1, H, T, D].

    Any other call is given back as it is.

    Raises:
        UnsupportedCallError: not all are jagged along their positions, or there is a mask; or
            they are nested in the strided layout.
    """
    nested = [t for t in (seen.q, seen.k, seen.v) if t is not None and t.is_nested]
    if not nested:
        return seen
    if not all(is_jagged(t) for t in nested):
        raise UnsupportedCallError(
            "nested tensors of the strided layout are not read; use torch.jagged"
        )
    q, k, v, output = (_along_positions(t) for t in (seen.q, seen.k, seen.v, seen.output))
    if seen.masks:
        raise UnsupportedCallError("a mask over nested tensors is not read")
    query = places(q.offsets(), q.values().shape[1], lengths_N=q.lengths())
    key = places(k.offsets(), k.values().shape[1], lengths_N=k.lengths(), outside=-2)
    window = (-1, 0) if seen.causal else (-1, -1)
    mask, _ = between(query, key, window, bottom_right=False)
    return replace(
        seen,
        **{n: t.values().unsqueeze(0) for n, t in zip("qkv", (q, k, v), strict=True)},
        output=output.values().unsqueeze(0),
        causal=False,
        mask_mod=mask,
        sequences=query.lengths_N.shape[0],
    )


def _along_positions(tensor: Tensor | None) -> Any:
    if tensor is None or not is_jagged(tensor):
        raise UnsupportedCallError("q, k and v are not all nested tensors of the jagged layout")
    if (
        tensor.dim() != 4
        or tensor.values().dim() != 3
        or tensor.shape[1] != tensor.values().shape[0]
    ):
        raise UnsupportedCallError(
            f"a nested tensor of shape {list(tensor.shape)} is not [batch, heads, jagged, width]"
        )
    return tensor
