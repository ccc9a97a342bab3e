"""What is known of the tensors between q k^T and the product of attention weights with values.

Shape suffixes: as in `stability_probe.records`; `...` stands for any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from stability_probe.capture.scope import Frame

Reference = Callable[[], Tensor | None]  # to a tensor that need not be kept alive


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """What is known of a tensor that descends from q k^T.

    The tensor is ``softcap(scale * q k^T) + masks - shifts`` where `exact`, with the columns of
    `sink` beside it; without the soft-cap's final factor while `tanh` is set and `softcap` is
    None.
    """

    q: Tensor  # [..., Q, D], as the model has it
    k: Tensor  # [..., K, D], likewise
    versions: tuple[int, int]  # of q and k when they were multiplied
    dtype: torch.dtype  # in which the product was formed
    path: tuple[Frame, ...]  # where in the model it was formed
    axes: tuple[int, int] = (-2, -1)  # the query and the key axis of the tensor
    order: tuple[int, ...] | None = None  # of the other axes of q k^T; None: as they were
    scale: float | Tensor = 1.0
    tanh: bool = False
    softcap: float | None = None
    masks: tuple[Reference, ...] = ()  # in the tensor's own layout
    shifts: tuple[Reference, ...] = ()  # constants of a row, subtracted: softmax ignores them
    sink: Tensor | None = None  # one more column, of logits without a key
    sink_first: bool = False
    exact: bool = True
    raw: bool = True  # `scale * q k^T` are the products before soft-cap and bias
    factors: tuple[Tensor, Tensor] | None = None  # the caller's own q and k, for their gradients

    @property
    def fresh(self) -> bool:
        """Whether q and k still hold what was multiplied."""
        return (self.q._version, self.k._version) == self.versions

    @property
    def in_order(self) -> bool:
        """Whether batch and heads lie as in q and k."""
        return self.order is None or list(self.order) == sorted(self.order)

    def blurred(self) -> Scores:
        """The same after an operation that is not followed."""
        return replace(self, exact=False)

    def lost(self) -> Scores:
        """The same after an operation that may have scaled or reordered the products."""
        return replace(self, exact=False, raw=False)


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """What is known of a tensor that is, or descends from, a softmax's output."""

    path: tuple[Frame, ...]
    call: object | None  # the site's call, once it was recorded
    heads: int | None


@dataclass(frozen=True, slots=True, eq=False)
class LogWeights:
    """The output of a log-softmax: attention weights, once they are exponentiated."""

    scores: Scores | None
    dim: int  # negative
    level: Tensor  # [..., 1], what the log-softmax subtracted from each row


@dataclass(frozen=True, slots=True, eq=False)
class Exponentials:
    """exp of scores: attention weights, once they are divided by their sums."""

    scores: Scores


@dataclass(frozen=True, slots=True, eq=False)
class Total:
    """The sums of exponentials over an axis that was kept."""

    of: Exponentials
    dim: int  # negative


@dataclass(frozen=True, slots=True, eq=False)
class Normalised:
    """Attention weights that no softmax has made. They are never kept: the mode reports them."""

    scores: Scores | None
    dim: int
    level: Tensor  # log of the weights plus it is the tensor that the weights are a softmax of


Record = Scores | Weights | LogWeights | Exponentials | Total


class Ledger:
    """Which tensors on one thread are scores or attention weights. It keeps none of them alive."""

    def __init__(self) -> None:
        self._records: WeakIdKeyDictionary = WeakIdKeyDictionary()

    @property
    def empty(self) -> bool:
        """Whether nothing is known of any tensor."""
        return not self._records

    def get(self, tensor: object, *, writes: int = 0) -> Record | None:
        """The record of a tensor, if it has one; `writes` to it in place are accounted for."""
        if not self._records or not isinstance(tensor, Tensor):
            return None
        record, version = self._records.get(tensor, (None, 0))  # type: ignore[no-untyped-call]
        if isinstance(record, Scores) and tensor._version != version + writes:
            return record.lost()  # written to in place, by who knows what
        found: Record | None = record
        return found

    def put(self, tensor: Tensor, record: Record) -> None:
        """Notes what a tensor is."""
        self._records[tensor] = (record, tensor._version)

    def written(self, tensor: Tensor) -> None:
        """An index of the tensor was assigned to."""
        record = self.get(tensor, writes=1)
        if isinstance(record, Scores):
            self.put(tensor, record.blurred())

    def clear(self) -> None:
        """Forgets all; called when the outermost site ends."""
        self._records = WeakIdKeyDictionary()
