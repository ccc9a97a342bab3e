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
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, redispatch_function

from stability_probe.capture import provenance
from stability_probe.capture.provenance import Ledger, Scores, Weights
from stability_probe.capture.scope import Frame, Scope

SDPA = {
    F.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
}
_SOFTMAX, _PRODUCT, _FOLLOW = provenance.SOFTMAX, provenance.PRODUCT, provenance.FOLLOWED
WATCHED = SDPA | _SOFTMAX | _PRODUCT | _FOLLOW | provenance.DROPOUT


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
    sequences: int | None = None  # where the batch axis does not tell
    output: Tensor | None = None
    weights: Tensor | None = None  # the softmax's output
    dropout: float = 0.0
    dtype: torch.dtype = torch.float32
    heads: int | None = None  # where the caller said so
    pre_scaled: bool = False
    descends: bool = True  # from a product q k^T; a softmax that does not may be a router


class Listener(Protocol):
    """What the mode reports to."""

    def attention(self, seen: Seen) -> object | None:
        """A call; returns a token for `values`, or None when the call is no site's."""

    def values(
        self, token: object | None, path: tuple[Frame, ...], v: Tensor, output: Tensor
    ) -> None:
        """The product of attention weights with the values, made at or below `path`."""

    def fault(self, frame: Frame | None, error: Exception) -> None:
        """Reading a call failed; the user's call itself was not touched."""


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
        if func in WATCHED and isinstance(out, Tensor) and not torch.compiler.is_compiling():
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

    def read(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Tensor
    ) -> None:
        """Reads a call that was made: of a watched function, with its result."""
        frame = self.scope.current
        if frame is None or not frame.looking:
            return
        with torch.no_grad(), torch.autocast(out.device.type, enabled=False):
            if func in SDPA:
                self._listener.attention(self._sdpa(args, kwargs, out))
            elif func in _SOFTMAX:
                self._softmax(args, kwargs, out)
            elif func in _PRODUCT:
                self._product(func, args, kwargs, out)
            else:
                ledger = self._local.ledger
                record = provenance.follow(func, args, kwargs, out, ledger)
                if record is not None:
                    ledger.put(out, record)

    def _sdpa(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Tensor) -> Seen:
        given = dict(zip(_SDPA_ARGUMENTS, args, strict=False)) | dict(kwargs)
        q, k, v = (given[name].detach().to(out.dtype) for name in ("query", "key", "value"))
        mask, scale = given.get("attn_mask"), given.get("scale")
        return Seen(
            seam="sdpa",
            path=self.scope.path,
            q=q,
            k=k,
            v=v,
            masks=() if mask is None else (mask.detach(),),
            causal=bool(given.get("is_causal", False)),
            scale=1 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
            output=out.detach(),
            dropout=float(given.get("dropout_p", 0.0)),
            dtype=out.dtype,
            heads=self._local.heads,
        )

    def _softmax(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Tensor) -> None:
        scores = args[0] if args else kwargs["input"]
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if not isinstance(dim, int) or scores.dim() < 2:
            return
        record = self._local.ledger.get(scores)
        record = record if isinstance(record, Scores) else None
        seen = self._seen_softmax(scores.detach(), dim, record, out.detach())
        token = self._listener.attention(seen)
        self._local.ledger.put(out, Weights(seen.path, token, seen.heads))

    def _seen_softmax(
        self, scores: Tensor, dim: int, record: Scores | None, weights: Tensor
    ) -> Seen:
        dim = dim if dim < 0 else dim - scores.dim()
        heads, path = self._local.heads, self.scope.path
        if record is None:
            scores, weights = scores.movedim(dim, -1), weights.movedim(dim, -1)
            return Seen(seam="softmax", path=path, scores=scores, weights=weights,
                        dtype=scores.dtype, heads=heads, descends=False)  # fmt: skip
        query, key = record.axes
        q, k = record.q, record.k
        if dim == query:
            (q, k), (query, key) = (k, q), (key, query)
        masks = [mask() for mask in record.masks]
        usable = (
            record.exact
            and record.fresh
            and dim == key
            and record.tanh == (record.softcap is not None)
            and all(mask is not None for mask in masks)
        )
        layout = ((query, dim), (-2, -1))
        seen = Seen(
            seam="softmax",
            path=_common(record.path, path),
            scores=scores.movedim(*layout),
            weights=weights.movedim(*layout),
            dtype=record.dtype,
            heads=heads,
            pre_scaled=heads is not None,  # nn.MultiheadAttention scales q before the product
        )
        if not usable:
            return seen
        return replace(
            seen,
            q=q,
            k=k,
            scale=record.scale,
            softcap=record.softcap,
            masks=tuple(
                m.detach().expand(scores.shape).movedim(*layout) for m in masks if m is not None
            ),
            scores=None if record.shifted else seen.scores,  # softmax ignores the shift
        )

    def _product(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Tensor
    ) -> None:
        ledger = self._local.ledger
        tensors = args[1] if func is torch.einsum and len(args) == 2 else args
        weights = next((r for a in tensors if isinstance(r := ledger.get(a), Weights)), None)
        if weights is not None:
            v = next(
                a for a in reversed(tensors)
                if isinstance(a, Tensor) and not isinstance(ledger.get(a), Weights)
            )  # fmt: skip
            path = _common(weights.path, self.scope.path)
            self._listener.values(weights.call, path, v.detach(), out.detach())
            return
        record = provenance.scores_of_product(func, args, kwargs, out, self.scope.path)
        if record is not None:
            ledger.put(out, record)


_SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class _Local(threading.local):
    """What belongs to one thread: its tensors, and nn.MultiheadAttention's head count."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.heads: int | None = None


def _common(one: tuple[Frame, ...], two: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """The frames that both paths share: the module that holds both the product and softmax."""
    length = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a is not b),
                  min(len(one), len(two)))  # fmt: skip
    return two[:length]
