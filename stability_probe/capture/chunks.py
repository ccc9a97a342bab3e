"""Which calls of one forward are parts of one attention: chunks of queries, packed segments.

Models cut long attention into several calls. Their rows belong to one record, and the count of
calls may change from step to step. Two calls belong together when both their q and their k are
slices of the same tensors along the rows or the batch; slices along the heads are other heads,
and keys of another tensor are another attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """Where in memory a [..., rows, width] tensor lies. Does not keep it alive."""

    storage: StorageWeakRef
    offset: int
    strides: tuple[int, ...]
    widths: tuple[int, ...]  # the sizes of the axes that calls of one attention share

    def is_beside(self, other: Slice) -> bool:
        """Whether both are slices of one tensor along its rows or its batch."""
        return (
            self.strides == other.strides
            and self.widths == other.widths
            and self.storage == other.storage
            and not self.storage.expired()  # type: ignore[no-untyped-call]
            and self._only_rows(abs(self.offset - other.offset))
        )

    def _only_rows(self, distance: int) -> bool:
        """Whether a distance in memory is a step along the rows or the batch alone."""
        n = len(self.strides)
        movable = {n - 2} | ({0} if n == 4 else set())
        for axis in sorted(range(n), key=lambda a: -self.strides[a]):
            steps, distance = divmod(distance, self.strides[axis] or 1)
            if self.strides[axis] and steps and axis not in movable:
                return False
        return distance == 0


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """The q and the k of one call."""

    q: Slice
    k: Slice

    def continues(self, other: Chunk) -> bool:
        """Whether both are calls of one attention, on other queries."""
        return (
            self.q.is_beside(other.q)
            and self.k.is_beside(other.k)
            and self.q.offset != other.q.offset
        )

    def shares_keys(self, other: Chunk) -> bool:
        """Whether both read the same sequences."""
        return self.k.offset == other.k.offset


def chunk_of(q: Tensor | None, k: Tensor | None) -> Chunk | None:
    """The chunk of a call; None where q and k are not plain tensors in memory."""
    if q is None or k is None or torch.compiler.is_compiling():
        return None
    one, two = _slice_of(q), _slice_of(k)
    return None if one is None or two is None else Chunk(one, two)


def _slice_of(x: Tensor) -> Slice | None:
    if x.dim() < 2 or x.is_nested or x.device.type == "meta" or type(x).__name__ == "DTensor":
        return None
    widths = (*x.shape[1:-2], x.shape[-1])
    storage = StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]
    return Slice(storage, int(x.storage_offset()), x.stride(), widths)


MOST = 64  # calls of one site in one forward that get a record each; further ones share the last


class Calls:
    """The calls of one forward of the watched model so far, by site."""

    def __init__(self) -> None:
        self._chunks: dict[str, list[Chunk | None]] = {}

    def place(self, site: str, chunk: Chunk | None, *, queries: int) -> tuple[int, bool]:
        """The call's index, and whether its sequences have been counted already.

        Calls of a single query (a decoder that goes token by token) all have index 0.
        """
        before = self._chunks.setdefault(site, [])
        if queries == 1 and before:
            return 0, True
        for index, other in enumerate(before):
            if chunk is not None and other is not None and chunk.continues(other):
                return index, chunk.shares_keys(other)
        if len(before) < MOST:
            before.append(chunk)
        return len(before) - 1, False

    def forget(self, site: str | None = None) -> None:
        """Starts again: for one site, or for all."""
        if site is None:
            self._chunks.clear()
        else:
            self._chunks.pop(site, None)
