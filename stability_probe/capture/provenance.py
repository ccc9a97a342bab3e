"""Follows a score matrix from q k^T to its softmax, through whatever happens in between.

The softmax's input alone gives the exact scores. Its history gives q and k, the scale, the
soft-cap and the masks, so that the largest logit before bias and cap is known too. Each
operation maps one `Scores` record to the next; an operation that is not understood clears
`exact`, and the input of softmax is then all that is used.

Shape suffixes: as in `stability_probe.records`; `...` stands for any leading dimensions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from stability_probe.capture.einsum import einsum_operands
from stability_probe.capture.scope import Frame

MASKING_BIAS = -9e3  # an additive value at or below it masks: -1e4 rounded to bfloat16 is -9984


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """What is known of a tensor that descends from q k^T.

    The tensor is ``softcap(scale * q k^T) + masks`` where `exact`; without the soft-cap's
    final factor while `tanh` is set and `softcap` is None.
    """

    q: Tensor  # [..., Q, D]
    k: Tensor  # [..., K, D]
    versions: tuple[int, int]  # of q and k when they were multiplied
    dtype: torch.dtype  # in which the product was formed
    path: tuple[Frame, ...]  # where in the model it was formed
    axes: tuple[int, int] = (-2, -1)  # the query and the key axis of the tensor
    scale: float | Tensor = 1.0
    tanh: bool = False
    softcap: float | None = None
    masks: tuple[Callable[[], Tensor | None], ...] = ()  # references, in the tensor's own layout
    exact: bool = True
    shifted: bool = False  # a row constant was subtracted, which softmax ignores

    @property
    def fresh(self) -> bool:
        """Whether q and k still hold what was multiplied."""
        return (self.q._version, self.k._version) == self.versions


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """What is known of a tensor that is, or descends from, a softmax's output."""

    path: tuple[Frame, ...]
    call: object | None  # the site's call, once it was recorded
    heads: int | None


Record = Scores | Weights


class Ledger:
    """Which tensors on one thread are scores or attention weights. It keeps none of them alive."""

    def __init__(self) -> None:
        self._records: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def get(self, tensor: object, *, writes: int = 0) -> Record | None:
        """The record of a tensor, if it has one; `writes` to it in place are accounted for."""
        if not self._records or not isinstance(tensor, Tensor):
            return None
        record, version = self._records.get(tensor, (None, 0))  # type: ignore[no-untyped-call]
        if isinstance(record, Scores) and tensor._version != version + writes:
            return replace(record, exact=False)  # written to in place, by who knows what
        found: Record | None = record
        return found

    def put(self, tensor: Tensor, record: Record) -> None:
        """Notes what a tensor is."""
        self._records[tensor] = (record, tensor._version)

    def clear(self) -> None:
        """Forgets all; called when the outermost site ends."""
        self._records = WeakIdKeyDictionary()


def _family(*names: str) -> set[Any]:
    """Every spelling of the named functions: torch.f, F.f, Tensor.f, f_, and the operators."""
    homes = (torch, F, torch.Tensor, torch.special)
    spelled = [f for name in names for f in (name, f"{name}_", f"__{name}__", f"__i{name}__")]
    return {getattr(home, f) for home in homes for f in spelled if hasattr(home, f)}


SOFTMAX = _family("softmax") | {
    torch.ops.aten.softmax,
    torch.ops.aten.softmax.int,
    torch.ops.aten._softmax,
    torch.ops.aten._softmax.default,
}
PRODUCT = _family("matmul", "bmm", "baddbmm") | {torch.Tensor.__rmatmul__, torch.einsum}
_BADDBMM = _family("baddbmm")
_MULTIPLY = _family("mul", "multiply") | {torch.Tensor.__rmul__}
_DIVIDE = _family("div", "divide", "true_divide", "truediv")
_ADD = _family("add") | {torch.Tensor.__radd__}
_SUBTRACT = _family("sub", "subtract")
_TANH = _family("tanh")
_FILL = _family("masked_fill")
_WHERE = _family("where")
_SAME = _family(
    "to", "float", "half", "bfloat16", "double", "type", "type_as", "contiguous", "clone"
)
_RESHAPE = _family(
    "view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "expand", "view_as"
)
_PERMUTE = _family("transpose", "permute", "swapaxes", "swapdims", "movedim")
VIEWS = _RESHAPE | _PERMUTE
DROPOUT = _family("dropout", "alpha_dropout", "feature_dropout") | {torch.dropout}
FOLLOWED = (
    _MULTIPLY | _DIVIDE | _ADD | _SUBTRACT | _TANH | _FILL | _WHERE | _SAME | _RESHAPE | _PERMUTE
)


def scores_of_product(
    func: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    out: Tensor,
    path: tuple[Frame, ...],
) -> Scores | None:
    """The record of `out` where it is a product of two activations with rows of queries.

    A product with a parameter is a projection, a router or an output head: None.
    """
    scale: float = 1.0
    masks: tuple[Callable[[], Tensor | None], ...] = ()
    axes = (-2, -1)
    if func is torch.einsum:
        operands = einsum_operands(args)
        if operands is None:
            return None
        q, k, axes = operands
    elif func in _BADDBMM:
        bias, q, k_t = args[:3]
        beta, scale = kwargs.get("beta", 1), float(kwargs.get("alpha", 1))
        masks = (_reference(bias * beta if beta != 1 else bias, out),) if beta != 0 else ()
        k = k_t.transpose(-2, -1)
    else:
        q, k_t = args[0], args[1] if len(args) > 1 else next(iter(kwargs.values()))
        if func is torch.Tensor.__rmatmul__:
            q, k_t = k_t, q
        if min(q.dim(), k_t.dim()) < 2:
            return None
        k = k_t.transpose(-2, -1)
    if _is_parameter(q) or _is_parameter(k) or out.dim() < 2 or not out.is_floating_point():
        return None
    return Scores(
        q.detach(), k.detach(), (q._version, k._version), out.dtype, path,
        axes=axes, scale=scale, masks=masks,
    )  # fmt: skip


def follow(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Tensor, ledger: Ledger
) -> Record | None:
    """The record of `out`, an operation's result, from the records of its operands."""
    found = next(
        (
            (i, record)
            for i, a in enumerate(args)
            if (record := ledger.get(a, writes=int(a is out))) is not None
        ),
        None,
    )
    if found is None:
        return None
    position, record = found
    if isinstance(record, Weights):
        return record
    others = [a for i, a in enumerate(args) if i != position] + list(kwargs.values())
    return _follow_scores(func, record, args[position], others, args, kwargs, out)


def _follow_scores(
    func: Any,
    record: Scores,
    before: Tensor,
    others: list[Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    out: Tensor,
) -> Scores:
    other = others[0] if others else None
    if func in _SAME:
        return record
    if func in _MULTIPLY or func in _DIVIDE:
        return _scaled(record, other, func in _DIVIDE, args, before)
    if func in _ADD and _number(kwargs.get("alpha", 1)) == 1 and isinstance(other, Tensor):
        return replace(record, masks=(*record.masks, _reference(other, out)))
    if func in _SUBTRACT and isinstance(other, Tensor) and args[0] is before:
        keeps = other.dim() == out.dim() and other.shape[record.axes[1]] == 1
        return replace(record, shifted=True) if keeps else replace(record, exact=False)
    if func in _TANH and not record.masks and not record.tanh:
        return replace(record, tanh=True)
    if func in _FILL:
        return _filled(record, ~_argument(args, kwargs, 1, "mask"),
                       _argument(args, kwargs, 2, "value"))  # fmt: skip
    if func in _WHERE and len(args) == 3:
        condition, one, two = args
        if before is condition:  # Tensor.where(scores, condition, other)
            condition, one = args[1], before
        if one is before:
            return _filled(record, condition, two)
        return _filled(record, ~condition, one)
    if func in _RESHAPE:
        return _reshaped(record, before, out)
    if func in _PERMUTE:
        return _permuted(func, record, before, args, kwargs, out)
    return replace(record, exact=False)


def _scaled(
    record: Scores, factor: Any, divide: bool, args: tuple[Any, ...], before: Tensor
) -> Scores:
    if factor is None or (divide and args[0] is not before):
        return replace(record, exact=False)
    if isinstance(factor, Tensor):
        if factor.dim() > 0 and (factor.dim() < 2 or factor.shape[-2:] != (1, 1)):
            if factor.numel() != 1:
                return replace(record, exact=False)
            factor = factor.reshape(())
        if record.tanh and factor.dim() > 0:
            return replace(record, exact=False)
        factor = factor.detach()
    factor = 1 / factor if divide else factor
    if record.tanh and record.softcap is None and not isinstance(factor, Tensor):
        return replace(record, softcap=float(factor), scale=record.scale * factor)
    if record.tanh or (record.masks and isinstance(factor, Tensor) and factor.dim() > 0):
        return replace(record, exact=False)
    masks = tuple(_rescaled(mask, factor) for mask in record.masks)
    return replace(record, scale=record.scale * factor, masks=masks)


def _rescaled(
    mask: Callable[[], Tensor | None], factor: float | Tensor
) -> Callable[[], Tensor | None]:
    """A float mask scaled along with the scores; a bool mask as it is."""

    def scaled() -> Tensor | None:
        tensor = mask()
        if tensor is None or tensor.dtype == torch.bool:
            return tensor
        return tensor * factor

    return scaled


def _filled(record: Scores, keep: Tensor, value: Any) -> Scores:
    """A fill with a masking value drops entries; a milder one is a bias nobody can subtract."""
    number = _number(value)
    if number is not None and not number <= MASKING_BIAS:
        return replace(record, exact=False)
    return replace(record, masks=(*record.masks, lambda: keep))


def _reshaped(record: Scores, before: Tensor, out: Tensor) -> Scores:
    """Leading dimensions may be split, merged or added; the query and key axes must stay."""
    if (
        record.axes != (-2, -1)
        or out.dim() < 2
        or out.shape[-2:] != before.shape[-2:]
        or out.numel() != before.numel()
    ):
        return replace(record, exact=False)
    old, new = before.shape, out.shape

    def laid_out(mask: Callable[[], Tensor | None]) -> Callable[[], Tensor | None]:
        def reshaped() -> Tensor | None:
            tensor = mask()
            return None if tensor is None else tensor.expand(old).reshape(new)

        return reshaped

    scale = record.scale
    if isinstance(scale, Tensor) and scale.dim() > 0:
        scale = scale.expand(*old[:-2], 1, 1).reshape(*new[:-2], 1, 1)
    return replace(record, masks=tuple(laid_out(m) for m in record.masks), scale=scale)


def _permuted(
    func: Any,
    record: Scores,
    before: Tensor,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    out: Tensor,
) -> Scores:
    """Follows the query and key axes by permuting a tensor that carries its axes' numbers."""
    n = before.dim()
    probe = torch.empty(tuple(range(2, n + 2)), device="meta")
    sizes = func(probe, *args[1:], **kwargs).shape
    axes = (sizes.index(n + record.axes[0] + 2) - n, sizes.index(n + record.axes[1] + 2) - n)
    if record.masks or (isinstance(record.scale, Tensor) and record.scale.dim() > 0):
        return replace(record, axes=axes, exact=False)
    return replace(record, axes=axes)


def _is_parameter(tensor: Tensor) -> bool:
    """Whether the tensor is a parameter or a view of one."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def _reference(tensor: Tensor, scores: Tensor) -> Callable[[], Tensor | None]:
    """A reference that keeps a small mask alive, and leaves one of the scores' size alone.

    While a compiler traces there is no memory to spare, and its tensors die early.
    """
    if torch.compiler.is_compiling():
        return lambda: tensor
    if tensor.numel() < scores.numel() or tensor._base is not None:
        return lambda: tensor
    return weakref.ref(tensor)


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], index: int, name: str) -> Any:
    return args[index] if len(args) > index else kwargs[name]


def _number(value: Any) -> float | None:
    """A Python or CPU scalar as a float; None where reading it would wait for a device."""
    if torch.compiler.is_compiling() and isinstance(value, Tensor):
        return None  # it holds no value yet
    if isinstance(value, Tensor):
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else None
    return float(value)
