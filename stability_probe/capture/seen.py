"""An attention call as a seam saw it, and what is told of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from stability_probe.capture.chunks import Chunk
from stability_probe.capture.scope import Frame

if TYPE_CHECKING:
    from stability_probe.capture.shards import HeadShare


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Seen:
    """An attention call as a seam saw it, before it is given a site and a common layout."""

    seam: str
    path: tuple[Frame, ...]  # from the outermost hooked module to the one that made the call
    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    scores: Tensor | None = None
    masks: tuple[Tensor, ...] = ()
    causal: bool = False
    scale: float | Tensor = 1.0
    softcap: float | None = None
    score_mod: Callable[..., Tensor] | None = None
    mask_mod: Callable[..., Tensor] | None = None
    sink: Tensor | None = None  # broadcasts to the scores with one key
    lse: Tensor | None = None  # one value a row, from the kernel itself
    row_max: Tensor | None = None  # the kernel's own largest score of each row, or of each head
    unreadable: str = ""  # why the call cannot be read, where that is so
    sequences: int | None = None  # where the batch axis does not tell
    share: HeadShare | None = None  # which heads these are, where the tensors say so
    output: Tensor | None = None
    weights: Tensor | None = None  # the softmax's output
    dropout: float = 0.0
    dtype: torch.dtype = torch.float32
    heads: int | None = None  # where the caller said so
    pre_scaled: bool = False
    exact: bool = True  # q, k, scale, soft-cap and masks give the scores; else q and k are raw
    graph: Mapping[str, Tensor] = field(default_factory=dict)  # the caller's own, by gradient
    descends: bool = True  # from a product q k^T; a softmax that does not may be a router
    chunk: Chunk | None = None  # where q and k lie, to merge calls that are parts of one
    attends: str = ""  # "self", "cross", "mixed"; empty: not known


class Listener(Protocol):
    """What the mode reports to."""

    def attention(self, seen: Seen) -> object | None:
        """A call; returns a token for `values`, or None when the call is no site's."""

    def values(
        self, token: object | None, path: tuple[Frame, ...], v: Tensor, output: Tensor
    ) -> None:
        """The product of attention weights with the values, made at or below `path`.

        Both are the caller's own tensors, which may take part in a graph.
        """

    def fault(self, frame: Frame | None, error: Exception) -> None:
        """Reading a call failed; the user's call itself was not touched."""
