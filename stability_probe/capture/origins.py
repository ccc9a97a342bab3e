"""Where a call's queries and keys come from: one input of the module, or two.

While a module's forward runs, each of its tensor inputs gets a label, and every operation gives
its result the labels of its operands. Queries and keys with the same labels are
self-attention, with none in common cross-attention. Shapes cannot tell: cross-attention may
have as many queries as keys. Inputs that both sides share by design (positions, rotations,
masks) carry no label.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from stability_probe.capture.nests import tensors_in

_SHARED = re.compile(r"mask|position|bias|rotary|rope|freqs|cos|sin|cache|seqlens", re.IGNORECASE)
_LEARNED = "(parameters)"
_SHAPED_LIKE = {
    Tensor.expand_as, Tensor.view_as, Tensor.reshape_as, Tensor.type_as, Tensor.to,
}  # fmt: skip
_MADE_LIKE = {
    getattr(home, name)
    for home in (torch, Tensor)
    for kind in ("empty", "zeros", "ones", "full", "rand", "randn")
    for name in (f"{kind}_like", f"new_{kind}")
    if hasattr(home, name)
}


class Origins:
    """The labels of the tensors inside one forward of one module. Keeps no tensor alive."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.module = module
        self._labels: WeakIdKeyDictionary = WeakIdKeyDictionary()
        for name, value in (*enumerate(args), *kwargs.items()):
            if isinstance(name, str) and _SHARED.search(name):
                continue
            for tensor in tensors_in(value):
                if tensor.is_floating_point():
                    self._labels[tensor] = self.of(tensor) or frozenset({str(name)})

    def follow(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: object
    ) -> None:
        """An operation's results carry the labels of its operands."""
        operands = [*tensors_in(args), *tensors_in(kwargs)]
        if func in _SHAPED_LIKE:
            operands = operands[:1]  # the other gives its shape, and no value
        if func in _MADE_LIKE:
            return
        labels = frozenset().union(*(self.of(tensor) for tensor in operands))
        if len(labels) > 1:
            labels -= {_LEARNED}
        if not labels:
            return
        for tensor in tensors_in(out) if out is not None else operands[:1]:  # x[i] = y gives None
            self._labels[tensor] = labels
            if tensor._base is not None and tensor._base not in self._labels:
                self._labels[tensor._base] = labels  # made inside the operation (F.linear does)

    def of(self, tensor: Tensor) -> frozenset[str]:
        """The labels of a tensor, or of what it is a view of."""
        for one in (tensor, tensor._base):
            if one is None:
                continue
            if one in self._labels:
                found: frozenset[str] = self._labels[one]
                return found
            if isinstance(one, nn.Parameter):
                return frozenset({_LEARNED})
        return frozenset()

    def attends(self, q: Tensor, k: Tensor) -> str:
        """Either "self", "cross" or "mixed"; empty where an origin is not known."""
        queries, keys = self.of(q), self.of(k)
        if not queries or not keys:
            return ""
        if queries == keys:
            return "self"
        return "mixed" if queries & keys else "cross"
