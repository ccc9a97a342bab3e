"""The eager seam: a torch-function mode that sees the calls attention is made of.

Two kinds of call are recorded. `scaled_dot_product_attention`, in each of its spellings, gives
q, k, v, the mask and the scale. A softmax whose input descends from q k^T, or whose output
feeds a product with the values, gives the scores themselves. The user's call always runs
first and unchanged; what is read from it can fail without touching it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, redispatch_function

from stability_probe.capture import families as f
from stability_probe.capture import provenance
from stability_probe.capture.adapters.aten import read as read_kernel
from stability_probe.capture.chunks import chunk_of
from stability_probe.capture.graph import saved_lse
from stability_probe.capture.kernels import KERNELS
from stability_probe.capture.ledger import (
    Ledger,
    LogWeights,
    Normalised,
    Scores,
    Weights,
)
from stability_probe.capture.origins import Origins
from stability_probe.capture.scope import Frame, Scope
from stability_probe.capture.seen import Listener, Seen
from stability_probe.modes import unobserved


class AttentionMode(TorchFunctionMode):
    """Lets every call through unchanged, then reports the ones that are attention."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self.scope = Scope(self)
        self._listener = listener
        self._local = _Local()

    def clear(self) -> None:
        """Forgets the tensors of the forward that ended; call it when no frame is left."""
        self._local.ledger.clear()
        self._local.origins = None

    def label(self, frame: Frame, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Follows the inputs of a module through its forward, one module at a time."""
        if self._local.origins is None:
            self._local.origins = Origins(frame.module, args, kwargs)

    def unlabel(self, module: nn.Module) -> None:
        """Ends what `label` began."""
        if self._local.origins is not None and self._local.origins.module is module:
            self._local.origins = None

    @property
    def ledger(self) -> Ledger:
        """What this thread's tensors are known to be."""
        return self._local.ledger

    @contextmanager
    def within_heads(self, heads: int | None) -> Iterator[None]:
        """Inside nn.MultiheadAttention's function, which knows the number of heads."""
        before, self._local.heads = self._local.heads, heads
        try:
            yield
        finally:
            self._local.heads = before

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward and not torch.compiler.is_compiling():
            return self._through_multi_head(func, types, args, kwargs)
        out = func(*args, **kwargs)
        local = self._local
        followed = local.origins is not None or (not local.ledger.empty and func in f.WATCHED)
        if (followed or func in _BEGINS) and not torch.compiler.is_compiling():
            try:
                self.read(func, args, kwargs, out)
            except Exception as error:
                self._listener.fault(self.scope.current, error)
        return out

    def _through_multi_head(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Runs nn.MultiheadAttention's function with the calls inside it visible."""
        heads = args[4] if len(args) > 4 else kwargs.get("num_heads")
        with self.within_heads(heads), self:
            return redispatch_function(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    def read(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Reads a call that was made, with its result."""
        frame = self.scope.current
        if frame is None or not frame.looking:
            return
        with unobserved():
            if self._local.origins is not None:
                self._local.origins.follow(func, args, kwargs, out)
            if func in f.SET:
                self._local.ledger.written(args[0])
            first = out[0] if func in KERNELS else out
            if isinstance(first, Tensor):
                with torch.no_grad(), torch.autocast(first.device.type, enabled=False):
                    self._dispatch(func, args, kwargs, out)

    def _dispatch(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> None:
        """To what reads this kind of operation."""
        if func in KERNELS:
            seen = read_kernel(func, args, kwargs, out)
            self._listener.attention(replace(seen, path=self.scope.path))
        elif func in f.SDPA:
            self._listener.attention(self._sdpa(args, kwargs, out))
        elif func in f.SOFTMAX or func in f.LOG_SOFTMAX:
            self._softmax(func, args, kwargs, out)
        elif func in f.PRODUCT:
            self._product(func, args, kwargs, out)
        elif func in f.FOLLOWED:
            self._follow(func, args, kwargs, out)

    def _sdpa(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Tensor) -> Seen:
        given = dict(zip(_SDPA_ARGUMENTS, args, strict=False)) | dict(kwargs)
        real_q, real_k = given["query"], given["key"]
        q, k, v = (given[name].detach().to(out.dtype) for name in _QKV)
        mask, scale = given.get("attn_mask"), given.get("scale")
        return Seen(
            seam="sdpa",
            path=self.scope.path,
            q=q,
            k=k,
            v=v,
            masks=() if mask is None else (mask.detach(),),
            causal=bool(given.get("is_causal", False)),
            scale=1 / math.sqrt(q.size(-1)) if scale is None else float(scale),
            output=out.detach(),
            lse=saved_lse(out, q),
            dropout=float(given.get("dropout_p", 0.0)),
            dtype=out.dtype,
            heads=self._local.heads,
            chunk=chunk_of(real_q, real_k),
            attends=self._attends(real_q, real_k),
            graph={"grad_output": out, **{f"grad_{name[0]}": given[name] for name in _QKV}},
        )

    def _attends(self, q: Tensor, k: Tensor) -> str:
        return "" if self._local.origins is None else self._local.origins.attends(q, k)

    def _softmax(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Tensor
    ) -> None:
        scores = args[0] if args else kwargs.get("input", kwargs.get("self"))
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if not isinstance(dim, int) or scores.dim() < 2:
            return
        dim = dim if dim < 0 else dim - scores.dim()
        record = self._local.ledger.get(scores)
        record = record if isinstance(record, Scores) else None
        if func in f.SOFTMAX:
            self._weigh(scores.detach(), dim, record, out)
        elif scores.is_floating_point():
            level = torch.logsumexp(scores.detach(), dim, keepdim=True)
            self._local.ledger.put(out, LogWeights(record, dim, level))

    def _follow(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Tensor
    ) -> None:
        ledger = self._local.ledger
        record = provenance.follow(func, args, kwargs, out, ledger)
        if isinstance(record, Normalised):
            scores = out.detach().log() + record.level
            self._weigh(scores, record.dim, record.scores, out)
        elif record is not None:
            ledger.put(out, record)

    def _weigh(self, scores: Tensor, dim: int, record: Scores | None, weights: Tensor) -> None:
        """Attention weights were made from scores."""
        seen = self._seen_softmax(scores, dim, record, weights.detach())
        token = self._listener.attention(seen)
        self._local.ledger.put(weights, Weights(seen.path, token, seen.heads))

    def _seen_softmax(
        self, scores: Tensor, dim: int, record: Scores | None, weights: Tensor
    ) -> Seen:
        heads, path = self._local.heads, self.scope.path
        if record is None or dim not in record.axes:
            scores, weights = scores.movedim(dim, -1), weights.movedim(dim, -1)
            at = path if record is None else _common(record.path, path)
            return Seen(seam="softmax", path=at, scores=scores, weights=weights,
                        dtype=scores.dtype, heads=heads, descends=record is not None)  # fmt: skip
        (query, key), keys = record.axes, record.k.shape[-2]
        q, k = record.q, record.k
        factors = record.factors or ()
        if dim == query:
            (q, k), (query, key), keys = (k, q), (key, query), q.shape[-2]
            factors = factors[::-1]
        layout = ((query, key), (-2, -1))
        if record.sink is not None:
            start = int(record.sink_first)
            scores, weights = (x.narrow(key, start, keys) for x in (scores, weights))
        for shift in record.shifts:
            if (constant := shift()) is not None:
                scores = scores + constant
        masks = [mask() for mask in record.masks]
        traced = (
            record.fresh
            and record.in_order
            and dim == key
            and record.tanh == (record.softcap is not None)
        )
        exact = traced and record.exact and all(mask is not None for mask in masks)
        seen = Seen(
            seam="softmax",
            path=_common(record.path, path),
            scores=scores.movedim(*layout),
            weights=weights.movedim(*layout),
            sink=None if record.sink is None else record.sink.movedim(*layout),
            dtype=record.dtype,
            heads=heads,
            graph=dict(zip(("grad_q", "grad_k"), factors, strict=False)),
            pre_scaled=heads is not None,  # nn.MultiheadAttention scales q before the product
            attends=self._attends(*(factors or (q, k))),
        )
        if not exact and not (traced and record.raw and record.softcap is None):
            return seen
        return replace(
            seen,
            exact=exact,
            q=q.detach(),
            k=k.detach(),
            scale=record.scale,
            softcap=record.softcap if exact else None,
            chunk=chunk_of(q, k),
            masks=tuple(
                m.detach().expand(scores.shape).movedim(*layout) for m in masks if m is not None
            )
            if exact
            else (),
            scores=None if exact and record.shifts else seen.scores,
        )

    def _product(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Tensor
    ) -> None:
        ledger = self._local.ledger
        tensors = args[1] if func is torch.einsum and len(args) == 2 else args
        tensors = [*tensors, *kwargs.values()]
        weights = next((r for a in tensors if isinstance(r := ledger.get(a), Weights)), None)
        if weights is not None:
            others = (
                a for a in reversed(tensors)
                if isinstance(a, Tensor) and not isinstance(ledger.get(a), Weights)
            )  # fmt: skip
            if (v := next(others, None)) is not None:  # else both descend from some softmax
                path = _common(weights.path, self.scope.path)
                self._listener.values(weights.call, path, v, out)
                return
        record = provenance.scores_of_product(func, args, kwargs, out, self.scope.path)
        if record is not None:
            ledger.put(out, record)


_BEGINS = f.BEGINS | KERNELS  # other calls matter only where something is known of a tensor
_QKV = ("query", "key", "value")
_SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class _Local(threading.local):
    """What belongs to one thread: its tensors, and nn.MultiheadAttention's head count."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.heads: int | None = None
        self.origins: Origins | None = None  # only while a site's inputs are followed


def _common(one: tuple[Frame, ...], two: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """The frames that both paths share: the module that holds both the product and softmax."""
    length = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a is not b),
                  min(len(one), len(two)))  # fmt: skip
    return two[:length]
