"""The functions that attention outside a kernel is made of, each in all of its spellings."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def _family(*names: str) -> frozenset[Any]:
    """Every spelling of the named functions: torch.f, F.f, Tensor.f, f_, and the operators."""
    homes = (torch, F, torch.Tensor, torch.special)
    spelled = [f for name in names for f in (name, f"{name}_", f"__{name}__", f"__i{name}__")]
    return frozenset(getattr(home, f) for home in homes for f in spelled if hasattr(home, f))


SDPA = frozenset({
    F.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
})  # fmt: skip
SOFTMAX = _family("softmax") | {
    torch.ops.aten.softmax,
    torch.ops.aten.softmax.int,
    torch.ops.aten._softmax,
    torch.ops.aten._softmax.default,
}
LOG_SOFTMAX = _family("log_softmax") | {
    torch.ops.aten.log_softmax,
    torch.ops.aten.log_softmax.int,
    torch.ops.aten._log_softmax,
    torch.ops.aten._log_softmax.default,
}
PRODUCT = _family("matmul", "bmm", "baddbmm") | {torch.Tensor.__rmatmul__, torch.einsum}
BADDBMM = _family("baddbmm")
MULTIPLY = _family("mul", "multiply") | {torch.Tensor.__rmul__}
DIVIDE = _family("div", "divide", "true_divide", "truediv")
ADD = _family("add") | {torch.Tensor.__radd__}
SUBTRACT = _family("sub", "subtract")
TANH = _family("tanh")
FILL = _family("masked_fill")
WHERE = _family("where")
CAT = _family("cat", "concat", "concatenate")
SLICE = _family("getitem", "narrow")
SET = frozenset({torch.Tensor.__setitem__})
MIX = frozenset({F.linear, torch.conv2d, F.conv2d})  # of heads, where rows and keys stay
EXP = _family("exp")
SUM = _family("sum")
DROPOUT = _family("dropout", "alpha_dropout", "feature_dropout") | {torch.dropout}
SAME = _family(
    "to", "float", "half", "bfloat16", "double", "type", "type_as", "contiguous", "clone"
)
RESHAPE = _family(
    "view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "expand", "view_as"
)
PERMUTE = _family("transpose", "permute", "swapaxes", "swapdims", "movedim") | {
    torch.Tensor.mT.__get__,  # type: ignore[attr-defined]
}
VIEWS = RESHAPE | PERMUTE
# Scores stay scores in these, in a way that is not followed.
BLUR = _family(
    "clamp", "clip", "clamp_min", "clamp_max", "nan_to_num", "maximum", "minimum", "roll",
    "masked_scatter", "index_fill", "pad", "gather", "index_select",
)  # fmt: skip
FOLLOWED = (
    MULTIPLY | DIVIDE | ADD | SUBTRACT | TANH | FILL | WHERE | CAT | SLICE | EXP | SUM | DROPOUT
    | SAME | RESHAPE | PERMUTE | BLUR | MIX
)  # fmt: skip
BEGINS = SDPA | SOFTMAX | LOG_SOFTMAX | PRODUCT  # of whose operands nothing need be known before
WATCHED = BEGINS | FOLLOWED | SET
