"""Follows a score matrix from q k^T to its softmax, through whatever happens in between.

The softmax's input alone gives the exact scores. Its history gives q and k, the scale, the
soft-cap and the masks, so that the largest logit before bias and cap is known too. Each
operation maps one record to the next. An operation that is not understood clears `exact`, and
the scores are then taken from the input of softmax; one that may have changed the scale of
q k^T also clears `raw`, and q and k are then not used at all.

Shape suffixes: as in `stability_probe.records`; `...` stands for any leading dimensions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from stability_probe.capture import families as f
from stability_probe.capture.einsum import einsum_operands
from stability_probe.capture.ledger import (
    Exponentials,
    Ledger,
    LogWeights,
    Normalised,
    Record,
    Reference,
    Scores,
    Total,
    Weights,
)
from stability_probe.capture.scope import Frame

MASKING_BIAS = -9e3  # an additive value at or below it masks: -1e4 rounded to bfloat16 is -9984


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
    masks: tuple[Reference, ...] = ()
    axes = (-2, -1)
    if func is torch.einsum:
        operands = einsum_operands(args)
        if operands is None:
            return None
        q, k, axes, factors = operands
    elif func in f.BADDBMM:
        bias, q, k_t = operands_of(args, kwargs, "input", "batch1", "batch2")
        beta, scale = kwargs.get("beta", 1), float(kwargs.get("alpha", 1))
        masks = (_reference(bias * beta if beta != 1 else bias, out),) if beta != 0 else ()
        k, factors = k_t.transpose(-2, -1), (q, k_t)
    else:
        q, k_t = operands_of(args, kwargs, "input", ("other", "mat2"))
        if func is torch.Tensor.__rmatmul__:
            q, k_t = k_t, q
        if min(q.dim(), k_t.dim()) < 2:
            return None
        k, factors = k_t.transpose(-2, -1), (q, k_t)
    if _is_parameter(q) or _is_parameter(k) or out.dim() < 2 or not out.is_floating_point():
        return None
    return Scores(
        q, k, (q._version, k._version), out.dtype, path,
        axes=axes, scale=scale, masks=masks, factors=factors,
    )  # fmt: skip


def follow(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Tensor, ledger: Ledger
) -> Record | Normalised | None:
    """The record of `out`, an operation's result, from the records of its operands."""
    if "input" in kwargs and not args:
        args, kwargs = (kwargs["input"],), {k: v for k, v in kwargs.items() if k != "input"}
    if "other" in kwargs and len(args) == 1:
        args, kwargs = (*args, kwargs["other"]), {k: v for k, v in kwargs.items() if k != "other"}
    operands = args[0] if func in f.CAT and isinstance(args[0], list | tuple) else args
    found = [
        (i, record)
        for i, a in enumerate(operands)
        if (record := ledger.get(a, writes=int(a is out))) is not None
    ]
    if not found:
        return None
    position, record = found[0]
    before = operands[position]
    others = [a for i, a in enumerate(operands) if i != position] + list(kwargs.values())
    if isinstance(record, Weights):
        return record if _stay_weights(func, before, others, out) else None
    if isinstance(record, LogWeights | Exponentials | Total):
        return _by_hand(func, record, args, kwargs, out, ledger)
    if func in f.CAT:
        return _with_sink(record, operands, before, args, kwargs) if len(found) == 1 else None
    if func in f.EXP:
        return Exponentials(record)
    if func in f.MIX:
        return _mixed(record, before, out)
    if func in f.SUM | f.DROPOUT:
        return None
    return _follow_scores(func, record, before, others, args, kwargs, out)


def _stay_weights(func: Any, before: Tensor, others: list[Any], out: Tensor) -> bool:
    """Whether an operation on attention weights gives attention weights.

    A router's weights that scale hidden states give hidden states, and so does a sum with them.
    """
    if func in f.EXP | f.SUM | f.TANH | f.CAT:
        return False
    if func in f.ADD | f.SUBTRACT:
        return not any(isinstance(o, Tensor) and o.numel() >= before.numel() for o in others)
    return func not in f.MULTIPLY | f.DIVIDE | f.MIX or out.numel() <= before.numel()


def _by_hand(
    func: Any,
    record: LogWeights | Exponentials | Total,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    out: Tensor,
    ledger: Ledger,
) -> Record | Normalised | None:
    """The steps of a softmax that is written out."""
    if func in f.SAME:
        return record
    if isinstance(record, LogWeights):
        return Normalised(record.scores, record.dim, record.level) if func in f.EXP else None
    if isinstance(record, Total):
        return None
    if func in f.SUM and out.dim() == args[0].dim():
        dim = _argument(args, kwargs, 1, "dim")
        dim = dim[0] if isinstance(dim, list | tuple) else dim
        return Total(record, dim if dim < 0 else dim - out.dim())
    if func in f.DIVIDE:
        total = ledger.get(args[1])
        if isinstance(total, Total) and total.of is record:
            shifts = sum(s for ref in record.scores.shifts if (s := ref()) is not None)
            scores = replace(record.scores, shifts=())
            return Normalised(scores, total.dim, args[1].detach().log() + shifts)
    if func in f.FILL | f.MULTIPLY:
        return Exponentials(record.scores.blurred())
    return None


def _mixed(record: Scores, before: Tensor, out: Tensor) -> Scores | None:
    """Heads mixed with each other ("talking heads"): scores still, of no q and k in particular."""
    if out.dim() != before.dim() or min(record.axes) < -out.dim() or -1 in record.axes:
        return None if out.shape != before.shape else record.lost()
    stays = all(out.shape[axis] == before.shape[axis] for axis in record.axes)
    return record.lost() if stays else None


def _with_sink(
    record: Scores,
    operands: Any,
    before: Tensor,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Scores | None:
    """A column of logits beside the scores takes part in softmax, and has no value to weigh."""
    dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    dim = dim if dim < 0 else dim - before.dim()
    if len(operands) != 2 or dim != record.axes[1] or record.sink is not None:
        return None
    first = operands[1] is before
    column = operands[0] if first else operands[1]
    if column.dim() != before.dim() or column.shape[dim] != 1:
        return None
    return replace(record, sink=column.detach(), sink_first=first)


def _follow_scores(
    func: Any,
    record: Scores,
    before: Tensor,
    others: list[Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    out: Tensor,
) -> Scores | None:
    other = others[0] if others else None
    if func in f.SAME:
        return record
    if func in f.SUBTRACT and isinstance(other, Tensor) and args[0] is before:
        keeps = other.dim() == out.dim() and other.shape[record.axes[1]] == 1
        if not keeps:
            return record.blurred()
        constant = other.detach()
        return replace(record, shifts=(*record.shifts, lambda: constant))
    if record.sink is not None:
        return record.lost()  # what happens to the column is not followed any further
    if func in f.MULTIPLY or func in f.DIVIDE:
        return _scaled(record, other, func in f.DIVIDE, args, before)
    if func in f.ADD and _number(kwargs.get("alpha", 1)) == 1 and isinstance(other, Tensor):
        return replace(record, masks=(*record.masks, _reference(other, out)))
    if func in f.TANH and not record.masks and not record.tanh:
        return replace(record, tanh=True)
    if func in f.FILL:
        return _filled(record, ~_argument(args, kwargs, 1, "mask"),
                       _argument(args, kwargs, 2, "value"))  # fmt: skip
    if func in f.WHERE and len(args) == 3:
        condition, one, two = args
        if before is condition:  # Tensor.where(scores, condition, other)
            condition, one = args[1], before
        if one is before:
            return _filled(record, condition, two)
        return _filled(record, ~condition, one)
    if func in f.RESHAPE:
        return _reshaped(record, before, out)
    if func in f.PERMUTE:
        return _permuted(func, record, before, args, kwargs)
    if out.dim() != before.dim():
        return None  # which axes are the query's and the key's is not known any more
    return record.blurred() if out.shape == before.shape else record.lost()


def _scaled(
    record: Scores, factor: Any, divide: bool, args: tuple[Any, ...], before: Tensor
) -> Scores:
    if factor is None or (divide and args[0] is not before):
        return record.lost()
    if isinstance(factor, Tensor):
        if factor.dim() > 0 and (factor.dim() < 2 or factor.shape[-2:] != (1, 1)):
            if factor.numel() != 1:
                return record.lost()
            factor = factor.reshape(())
        if record.tanh and factor.dim() > 0:
            return record.lost()
        factor = factor.detach()
    factor = 1 / factor if divide else factor
    if record.tanh and record.softcap is None and not isinstance(factor, Tensor):
        return replace(record, softcap=float(factor), scale=record.scale * factor)
    per_head = isinstance(factor, Tensor) and factor.dim() > 0
    if record.tanh or ((record.masks or record.shifts) and per_head):
        return record.lost()
    return replace(
        record,
        scale=record.scale * factor,
        masks=tuple(_mapped(mask, lambda m: _times(m, factor)) for mask in record.masks),
        shifts=tuple(_mapped(shift, lambda s: s * factor) for shift in record.shifts),
    )


def _times(mask: Tensor, factor: float | Tensor) -> Tensor:
    """A float mask scaled along with the scores; a bool mask as it is."""
    return mask if mask.dtype == torch.bool else mask * factor


def _mapped(reference: Reference, change: Callable[[Tensor], Tensor]) -> Reference:
    """The same reference, its tensor changed when it is asked for."""

    def changed() -> Tensor | None:
        tensor = reference()
        return None if tensor is None else change(tensor)

    return changed


def _filled(record: Scores, keep: Tensor, value: Any) -> Scores:
    """A fill with a masking value drops entries; a milder one is a bias nobody can subtract."""
    number = _number(value)
    if number is not None and not number <= MASKING_BIAS:
        return record.blurred()
    return replace(record, masks=(*record.masks, lambda: keep))


def _reshaped(record: Scores, before: Tensor, out: Tensor) -> Scores:
    """Leading dimensions may be split, merged or added; the query and key axes must stay."""
    if (
        record.axes != (-2, -1)
        or not record.in_order
        or out.dim() < 2
        or out.shape[-2:] != before.shape[-2:]
        or out.numel() != before.numel()
    ):
        return replace(record.lost(), axes=(-2, -1))
    old, lead = before.shape, out.shape[:-2]

    def mask(m: Tensor) -> Tensor:
        return m.expand(old).reshape(out.shape)

    def row(s: Tensor) -> Tensor:
        return s.expand(*old[:-1], 1).reshape(*out.shape[:-1], 1)

    scale = record.scale
    if isinstance(scale, Tensor) and scale.dim() > 0:
        scale = scale.expand(*old[:-2], 1, 1).reshape(*lead, 1, 1)
    return replace(
        record,
        scale=scale,
        masks=tuple(_mapped(m, mask) for m in record.masks),
        shifts=tuple(_mapped(s, row) for s in record.shifts),
    )


def _permuted(
    func: Any, record: Scores, before: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Scores:
    """Follows the axes by permuting a tensor whose sizes are their numbers."""
    n = before.dim()
    probe = torch.empty(tuple(range(2, n + 2)), device="meta")
    sources = [int(size) - 2 for size in func(probe, *args[1:], **kwargs).shape]
    query, key = (sources.index(n + axis) - n for axis in record.axes)
    lead = [axis for axis in range(n) if axis - n not in record.axes]
    before_that = record.order or tuple(range(len(lead)))
    order = tuple(before_that[lead.index(source)] for source in sources if source in lead)
    if isinstance(record.scale, Tensor) and record.scale.dim() > 0:
        return replace(record.lost(), axes=(query, key), order=order)

    def along(tensor: Tensor) -> Tensor:
        wide = tensor[(None,) * (n - tensor.dim())]
        return func(wide, *args[1:], **kwargs)  # type: ignore[no-any-return]

    return replace(
        record,
        axes=(query, key),
        order=order,
        masks=tuple(_mapped(mask, along) for mask in record.masks),
        shifts=tuple(_mapped(shift, along) for shift in record.shifts),
    )


def operands_of(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], *names: str | tuple[str, ...]
) -> list[Any]:
    """The operands of a call, wherever they were given by keyword."""
    given = list(args)
    for name in names[len(args) :]:
        spelled = (name,) if isinstance(name, str) else name
        given.append(next(kwargs[n] for n in spelled if n in kwargs))
    return given


def _is_parameter(tensor: Tensor) -> bool:
    """Whether the tensor is a parameter or a view of one."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def _reference(tensor: Tensor, scores: Tensor) -> Reference:
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
