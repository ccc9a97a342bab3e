"""Attention as PyTorch itself offers it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case

WIDTH, HEADS, T, S, B = 32, 4, 12, 9, 3


class Kernel(nn.Module):
    """Self-attention by a function of q, k, v."""

    def __init__(self, function: Callable[..., Tensor], groups: int = HEADS) -> None:
        super().__init__()
        self.function, self.groups = function, groups
        self.q = nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * groups * (WIDTH // HEADS))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] to [B, T, C]."""
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, self.groups, -1)).permute(2, 0, 3, 1, 4)
        return self.function(q, k, v).transpose(1, 2).flatten(2)


class Called(nn.Module):
    """A module called with further arguments that do not change."""

    def __init__(self, module: nn.Module, **arguments: Any) -> None:
        super().__init__()
        self.inner, self.arguments = module, arguments

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Any:
        """The inner module's output."""
        if isinstance(self.inner, nn.MultiheadAttention):
            other = x if memory is None else memory
            return self.inner(x, other, other, **self.arguments)[0]
        rest = () if memory is None else (memory,)
        return self.inner(x, *rest, **self.arguments)


def _padding(length: int) -> Tensor:
    mask = torch.zeros(B, length, dtype=torch.bool)
    mask[0, -3:] = True
    return mask


def _causal() -> Tensor:
    return torch.ones(T, T, dtype=torch.bool).triu(1)


def _sdpa(**arguments: Any) -> Callable[[], nn.Module]:
    return lambda: Kernel(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **arguments))


def _multi_head(
    need: bool, inside: dict[str, Any], **arguments: Any
) -> Callable[[float], nn.Module]:
    return lambda p: Called(
        nn.MultiheadAttention(WIDTH, HEADS, dropout=p, batch_first=True, **inside),
        need_weights=need, **arguments,
    )  # fmt: skip


def _layer(kind: type[nn.Module], **arguments: Any) -> Callable[[float], nn.Module]:
    return lambda p: Called(kind(WIDTH, HEADS, 64, dropout=p, batch_first=True), **arguments)


def _gqa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _manual(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(_causal(), float("-inf"))
    return scores.softmax(-1) @ v


MODELS: dict[str, Callable[[float], nn.Module]] = {
    "F.scaled_dot_product_attention": lambda p: _sdpa(dropout_p=p)(),
    "sdpa, causal": lambda p: _sdpa(dropout_p=p, is_causal=True)(),
    "sdpa, bool mask": lambda p: _sdpa(dropout_p=p, attn_mask=~_causal())(),
    "sdpa, float mask": lambda p: _sdpa(
        dropout_p=p, attn_mask=torch.zeros(T, T).masked_fill(_causal(), -1e9)
    )(),
    "sdpa, grouped queries": lambda p: Kernel(_gqa, groups=2),
    "matmul, softmax, matmul": lambda p: Kernel(_manual),
    "MultiheadAttention": _multi_head(False, {}),
    "MultiheadAttention, weights": _multi_head(True, {}),
    "MultiheadAttention, weights by head": _multi_head(True, {}, average_attn_weights=False),
    "MultiheadAttention, causal": _multi_head(False, {}, attn_mask=_causal(), is_causal=True),
    "MultiheadAttention, padding": _multi_head(False, {}, key_padding_mask=_padding(T)),
    "MultiheadAttention, bias and zero": _multi_head(
        False, {"add_bias_kv": True, "add_zero_attn": True}
    ),
    "TransformerEncoderLayer": _layer(nn.TransformerEncoderLayer),
    "TransformerEncoder, padding": lambda p: Called(
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=p, batch_first=True), 2
        ),
        src_key_padding_mask=_padding(T),
    ),
}
CROSS: dict[str, Callable[[float], nn.Module]] = {
    "MultiheadAttention, cross": _multi_head(False, {}),
    "MultiheadAttention, cross, weights": _multi_head(True, {}),
    "TransformerDecoderLayer, causal": _layer(
        nn.TransformerDecoderLayer, tgt_mask=_causal(), tgt_is_causal=True
    ),
    "TransformerDecoder": lambda p: Called(
        nn.TransformerDecoder(
            nn.TransformerDecoderLayer(WIDTH, HEADS, 64, dropout=p, batch_first=True), 2
        )
    ),
    "Transformer": lambda p: nn.Transformer(WIDTH, HEADS, 1, 1, 64, dropout=p, batch_first=True),
}


def names() -> list[str]:
    """All of them."""
    return [*MODELS, *CROSS]


def cases(name: str) -> Iterator[Case]:
    """The named module, on random activations."""
    make = (MODELS | CROSS)[name]
    x = torch.randn(B, T, WIDTH)
    if name == "Transformer":
        inputs = {"src": torch.randn(B, S, WIDTH), "tgt": x}
    elif name in CROSS:
        inputs = {"x": x, "memory": torch.randn(B, S, WIDTH)}
    else:
        inputs = {"x": x}
    yield Case(name, "torch", "torch.nn", lambda dropout: make(0.1 if dropout else 0.0).train(),
               inputs, "activations")  # fmt: skip
