"""Counts the softmax attention that a forward really computes, without the probe's own means.

The probe works with torch functions; the oracle looks one level below, at the operators that
the dispatcher runs. An attention call is, by this rule,

- a fused kernel (`aten._scaled_dot_product_*`), or
- a softmax whose output, followed by storage through views and element-wise operators (dropout,
  casts, scaling, masks), becomes an operand of a batched matrix product (`bmm`, `baddbmm`).

So the softmax of a router (top-k follows), of a classifier or a loss, and the weights of
deformable sampling (a sum of products, no matrix product) do not count. Each call belongs to
the innermost module that holds both the softmax and the product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MASKED = -9e3  # scores at or below it count as masked, as everywhere in the probe

_SOFTMAX = ("_softmax", "_safe_softmax")
_PRODUCTS = ("bmm", "baddbmm")
_REDUCES = {
    "mm", "addmm", "sum", "mean", "topk", "max", "amax", "argmax", "gather", "index", "sort",
    "embedding", "cumsum", "any", "all", "eq", "ge", "gt", "le", "lt", "ne",
    "multinomial", "logsumexp", "_log_softmax", "zeros_like", "ones_like", "empty_like",
    "new_zeros", "new_empty", "full_like", "nonzero", "_local_scalar_dense", "scatter", "one_hot",
}  # fmt: skip


@dataclass
class Call:
    """One attention call: where it was made, and what its scores were."""

    module: str
    operator: str
    entropy_sum: float = 0.0  # nats, over rows with at least two visible keys
    rows: int = 0
    largest: float = 0.0  # |score| over visible entries
    columns: int = 0
    sink: bool = False  # a column without a value was dropped after the softmax


class Oracle(TorchDispatchMode):
    """Records the attention calls of the forwards that run inside it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._model = model
        self._names: dict[int, str] = {}
        self._path: list[str] = []
        self._pending: dict[int, tuple[Call, tuple[str, ...]]] = {}  # by storage
        self._alive: list[Tensor] = []  # so that no storage's address is used twice

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks every module, so that calls know where they are, and turns the mode on."""
        self._name()
        handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()
            self._alive.clear()
            self._pending.clear()

    def _name(self) -> None:
        self._names = {id(m): n or "(root)" for n, m in self._model.named_modules()}

    def _enter(self, module: nn.Module, _: object) -> None:
        if id(module) not in self._names:
            self._name()  # some models replace modules while they run
        self._path.append(self._names.get(id(module), "?"))

    def _leave(self, *_: object) -> None:
        self._path.pop()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if "scaled_dot_product" in name and "backward" not in name:
            call = Call(self._here(), name)
            _describe(call, _fused_scores(args, kwargs))
            self.calls.append(call)
        elif name in _SOFTMAX:
            call = Call("", name)
            _describe(call, args[0].detach().movedim(args[1], -1))
            self._mark(out, call, tuple(self._path))
        elif name in _PRODUCTS:
            self._product(args)
        elif self._pending and (name not in _REDUCES or _mixes(name, args, out)):
            self._follow(args, out)
        return out

    def _here(self) -> str:
        return self._path[-1] if self._path else "(root)"

    def _mark(self, tensor: Tensor, call: Call, path: tuple[str, ...]) -> None:
        self._alive.append(tensor)
        self._pending[_storage(tensor)] = (call, path)

    def _follow(self, args: tuple[Any, ...], out: Any) -> None:
        for operand in tree_leaves(args):
            found = self._pending.get(_storage(operand)) if isinstance(operand, Tensor) else None
            if found is not None and isinstance(operand, Tensor) and operand.is_floating_point():
                for result in tree_leaves(out):
                    if isinstance(result, Tensor) and result.is_floating_point():
                        self._mark(result, *found)
                return

    def _product(self, args: tuple[Any, ...]) -> None:
        for operand in args:
            found = self._pending.get(_storage(operand)) if isinstance(operand, Tensor) else None
            if found is not None:
                call, path = found
                call.sink |= call.columns not in operand.shape
                if call not in self.calls:
                    shared = [a for a, b in zip(path, self._path, strict=False) if a == b]
                    call.module = shared[-1] if shared else "(root)"
                    self.calls.append(call)
                return


def _mixes(name: str, args: tuple[Any, ...], out: Any) -> bool:
    """Whether a linear map mixes heads: it gives as many numbers as it gets."""
    return name in ("mm", "addmm") and any(
        isinstance(a, Tensor) and a.dim() == 2 and a.shape == out.shape for a in args
    )


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _fused_scores(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The scores [..., Q, K] in float64 that a fused kernel gave its softmax."""
    q, k = args[0].detach().double(), args[1].detach().double()
    if k.dim() == 4 and k.shape[1] != q.shape[1]:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scale = kwargs.get("scale")
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    causal = kwargs.get("is_causal", args[4] if len(args) > 4 else False)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    mask = kwargs.get("attn_mask")
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        )
    return scores


def _describe(call: Call, scores: Tensor) -> None:
    """Entropy and the largest score, from the scores [..., K] themselves, in float64."""
    call.columns = scores.shape[-1]
    scores = scores.detach().double()
    visible = scores > MASKED
    log_p = torch.log_softmax(scores.masked_fill(~visible, float("-inf")), -1)
    terms = torch.where(visible, log_p.exp() * log_p, 0.0)
    counted = visible.sum(-1) >= 2
    call.entropy_sum = float(-terms.sum(-1)[counted].sum())
    call.rows = int(counted.sum())
    shown = scores[visible]
    call.largest = float(shown.abs().max()) if shown.numel() else 0.0
