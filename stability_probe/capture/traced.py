"""What reads attention while a compiler traces a graph: the eager seam, run on traced tensors.

`rewrite` makes every node that may be a part of attention call `observed` instead. When the
compiler then traces the graph, `observed` runs the node's own function unchanged and lets the
eager seam (`functions`, `provenance`) read it. Where that finds a call, one operator is traced
into the graph (`observer`), which hands the call's tensors over at every run.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, redispatch_function
from torch.utils.weak import WeakIdKeyDictionary

from stability_probe.capture import families as f
from stability_probe.capture.functions import AttentionMode, Seen
from stability_probe.capture.kernels import KERNELS
from stability_probe.capture.observer import OPERATOR, Sighting, written
from stability_probe.capture.provenance import Weights
from stability_probe.capture.scope import Admission, Frame

MULTI_HEAD = F.multi_head_attention_forward
_AS_TORCH: dict[Any, Any] = {  # what Python's operators mean to the eager seam
    operator.matmul: torch.matmul,
    operator.mul: torch.mul,
    operator.truediv: torch.div,
    operator.add: torch.add,
    operator.sub: torch.sub,
    operator.imul: torch.Tensor.mul_,
    operator.itruediv: torch.Tensor.div_,
    operator.iadd: torch.Tensor.add_,
    operator.isub: torch.Tensor.sub_,
    operator.getitem: torch.Tensor.__getitem__,
    operator.setitem: torch.Tensor.__setitem__,
}
WATCHED = f.WATCHED | KERNELS | {MULTI_HEAD}
FUNCTIONS: list[Callable[..., Any]] = []  # those of the nodes that were rewritten
_NOTHING = nn.Module()  # frames of a graph have names only


def meaning(function: Any) -> Any:
    """The function by which the eager seam knows a node's function."""
    return _AS_TORCH.get(function, function)


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A node that was rewritten."""

    number: int  # unique in this process
    function: int  # in FUNCTIONS
    stack: tuple[tuple[str, str], ...]  # its modules, outermost first: key of a forward, path


@functools.lru_cache(maxsize=65536)
def _step(text: str) -> Step:
    fields = json.loads(text)
    return Step(**{**fields, "stack": tuple(map(tuple, fields["stack"]))})


def observed(step: str, source: str, owner: Tensor | None, *args: Any, **kwargs: Any) -> Any:
    """Stands in a graph for a function: runs it, and lets the reader see it."""
    this = _step(step)
    if this.number in _LOCAL.reader.done:
        _LOCAL.reader = Reader()  # the graph is traced once more
    return _LOCAL.reader.run(this, source, owner, args, kwargs)


@dataclasses.dataclass(slots=True, eq=False)
class _Pending:
    """A softmax, until its weights meet their values."""

    seen: Seen
    dropout: float = 0.0


class Reader:
    """The eager seam on traced tensors; its listener, which traces the operator in."""

    def __init__(self) -> None:
        self._mode = AttentionMode(self)
        self._frames: dict[str, Frame] = {}
        self._modules: dict[Frame, str] = {}  # the compiler's own name of a frame's module
        self._called: set[str] = set()
        self.done: set[int] = set()  # numbers of the steps so far
        self._views: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._transposed: WeakIdKeyDictionary = WeakIdKeyDictionary()  # the k^T of products
        self._owner: Tensor | None = None
        self._root, self._parameter = "", ""
        self._gradients = self._requires_grad = False
        self._mask: Tensor | None = None  # of SDPA, the caller's own
        self._rows_stay = False  # weights @ v: the output's rows are those of q

    def run(
        self, step: Step, source: str, owner: Tensor | None, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Runs a node's function and reads it."""
        self.done.add(step.number)
        self._owner = owner
        self._root, self._parameter = split_source(source)
        self._mode.scope.frames = self._frames_of(step)
        try:
            return self._call(FUNCTIONS[step.function], args, kwargs)
        finally:
            self._owner = None  # of the user's model, where a graph runs as it is

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if function is not MULTI_HEAD:
            return self.read(function, args, kwargs)
        heads = args[4] if len(args) > 4 else kwargs.get("num_heads")
        with self._mode.within_heads(heads), _Inside(self):
            return redispatch_function(function, (), args, kwargs)  # type: ignore[no-untyped-call]

    def read(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs a function and reads what it did; a failure to read is no failure to run."""
        gradients = torch.is_grad_enabled()
        out = function(*args, **kwargs)
        first = out[0] if isinstance(out, tuple | list) and out else out
        self._gradients = gradients
        self._requires_grad = isinstance(first, Tensor) and first.requires_grad
        try:
            self._note(meaning(function), args, kwargs, out)
        except Exception as error:
            self.fault(self._mode.scope.current, error)
        return out

    def _note(self, function: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> None:
        """Lets the eager seam read a call."""
        ledger = self._mode.ledger
        if function is getattr:  # as in k.mT
            function, args = getattr(torch.Tensor, args[1]).__get__, args[:1]
        if function in f.VIEWS and isinstance(out, Tensor):
            self._views[out] = (function, args, kwargs)
        if function in f.SAME and isinstance(out, Tensor) and out.dtype == args[0].dtype:
            self._views[out] = (None, args[:1], {})  # a copy of it, for all that matters here
        if function in f.PRODUCT:
            if function is not torch.einsum and function is not torch.Tensor.__rmatmul__:
                self._transposed[args[-1]] = True
            first = ledger.get(args[0]) if args else None
            self._rows_stay = isinstance(first, Weights) and function is not torch.einsum
        if function in f.DROPOUT and isinstance(weights := ledger.get(args[0]), Weights):
            p, training = _dropout_arguments(*args[1:], **kwargs)
            if isinstance(weights.call, _Pending) and training:
                weights.call.dropout = p
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        self._mask = mask if function in f.SDPA else None
        self._mode.read(function, args, kwargs, out)

    def _base(self, tensor: Tensor) -> tuple[Tensor, list[Any]]:
        """The last tensor that is no view, and the views from it that give this one.

        The operator takes bases and looks at them through the views when it runs. Compilers
        recognise attention by patterns in which inner nodes have one user each, and decide what to
        keep for backward by who uses what: the operator must not be a second user of such a node,
        or the numbers of the compiled model would change.
        """
        views: list[Any] = []
        while tensor in self._views:
            function, (base, *rest), kwargs = self._views[tensor]
            if function is not None:
                name = "mT" if function is _MT else function.__name__
                if not hasattr(torch.Tensor, name) or not _is_plain([rest, kwargs]):
                    break
                views.insert(0, [name, rest, kwargs])
            tensor = base
        return tensor, views

    def _frames_of(self, step: Step) -> list[Frame]:
        stack = [("", self._root), *step.stack]
        return [self._frame(key, path) for key, path in stack if self._inside(path)]

    def _frame(self, key: str, path: str) -> Frame:
        name = path.removeprefix(self._root).removeprefix(".")
        fresh = Frame(name, _NOTHING, Admission.TRAIN, False)
        frame = self._frames.setdefault(key, fresh)
        self._modules[frame] = key.split("@")[0]  # a second forward of it has a number behind
        return frame

    def _inside(self, path: str) -> bool:
        return path == self._root or path.startswith(f"{self._root}.") or not self._root

    # Listener: what the eager seam tells

    def attention(self, seen: Seen) -> object | None:
        """A call: of a kernel at once, of a softmax when its weights meet their values."""
        if seen.seam == "softmax":
            return _Pending(seen)
        if not seen.unreadable and seen.score_mod is None and seen.mask_mod is None:
            own = {name: seen.graph.get(f"grad_{name}") for name in "qkv"}
            rest = {name: getattr(seen, name) for name in ("q", "k", "v", "output", "lse", "sink")}
            self._emit(seen, rest | {n: t for n, t in own.items() if t is not None})
        return None

    def values(self, token: object | None, path: Any, v: Tensor, output: Tensor) -> None:
        """The weights of a softmax met their values."""
        if not isinstance(token, _Pending):
            return
        seen = dataclasses.replace(token.seen, path=path, dropout=token.dropout)
        q, k, weights = seen.q, seen.k, seen.weights
        if q is None or k is None or weights is None or not seen.exact:
            self._emit(seen, {"q": q, "k": k, "scores": seen.scores, "weights": weights})
            return
        lead = weights.shape[:-2]
        own_q, own_k = (seen.graph.get(name) for name in ("grad_q", "grad_k"))
        known = own_k is not None and own_k in self._transposed and own_q not in self._transposed
        if (
            known
            and own_q is not None
            and own_k is not None
            and own_q.shape[:-2] == own_k.shape[:-2] == lead
        ):
            tensors = {"q": own_q, "k^T": own_k, "sink": seen.sink}
        else:
            tensors = {"q": _laid_out(q, lead), "k": _laid_out(k, lead), "sink": seen.sink}
        if self._rows_stay and v.shape[:-2] == lead and output.shape[:-2] == lead:
            tensors |= {"v": v, "output": output}
        self._emit(seen, tensors)

    def fault(self, frame: Frame | None, error: Exception) -> None:
        """The call is not traced in; that its layer gives nothing is then an alert."""

    def _emit(self, seen: Seen, tensors: dict[str, Tensor | None]) -> None:
        """Traces the operator in."""
        frame = seen.path[-1]
        masks = seen.masks if self._mask is None else (self._mask,)
        given = [("owner", self._owner), *tensors.items(), *(("mask", m) for m in masks)]
        if isinstance(seen.scale, Tensor):
            given.append(("scale", seen.scale))
        present = [(role, *self._base(tensor)) for role, tensor in given if tensor is not None]
        module = self._modules[frame]
        sighting = Sighting(
            module=frame.name,
            parameter=self._parameter,
            roles=tuple(role for role, _, _ in present),
            views=tuple(views for _, _, views in present),
            first=module not in self._called,
            seam=seen.seam,
            gradients=self._gradients,
            requires_grad=self._requires_grad,
            causal=seen.causal,
            softcap=seen.softcap,
            dropout=seen.dropout,
            dtype=str(seen.dtype).removeprefix("torch."),
            heads=seen.heads,
            pre_scaled=seen.pre_scaled,
            exact=seen.exact,
        )
        self._called.add(module)
        scale = 1.0 if isinstance(seen.scale, Tensor) else seen.scale
        OPERATOR(written(sighting), [tensor for _, tensor, _ in present], scale)


class _Inside(TorchFunctionMode):
    """Reads what nn.MultiheadAttention's function calls, which a graph holds as one node."""

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self._reader = reader

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in WATCHED:
            return self._reader.read(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class _Local(threading.local):
    def __init__(self) -> None:
        self.reader = Reader()


_LOCAL = _Local()
_NAMES = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")


@functools.lru_cache(maxsize=65536)
def split_source(source: str) -> tuple[str, str]:
    """(the compiled module, a parameter's name in it) from the compiler's name of a parameter."""
    first = _NAMES.search(source)
    return (source[: first.start()], ".".join(_NAMES.findall(source))) if first else ("", "")


_MT = torch.Tensor.mT.__get__  # type: ignore[attr-defined]


def _is_plain(value: Any) -> bool:
    """Whether arguments of a view can be written down: no symbolic sizes, no tensors."""
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return type(value) in (int, str, bool, type(None))


def _laid_out(rows: Tensor, lead: torch.Size) -> Tensor:
    """q or k with the leading dimensions of the scores."""
    if rows.shape[:-2] == lead:
        return rows
    if rows.shape[:-2].numel() != lead.numel():
        return rows.expand(*lead, *rows.shape[-2:])
    return rows.reshape(*lead, *rows.shape[-2:])


def _dropout_arguments(p: float = 0.5, training: bool = True, *_: Any, **other: Any) -> Any:
    return p, other.get("train", training)
