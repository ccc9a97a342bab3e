"""Small models that attend in different ways; each maps tokens [B, T] to logits [B, T, 50]."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as early_bound

VOCABULARY, WIDTH, HEADS = 50, 32, 4


class Attention(nn.Module):
    """Causal self-attention in one of many spellings."""

    def __init__(self, spelling: str = "sdpa", dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.spelling, self.dropout = spelling, dropout
        self.num_heads = HEADS
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (z.view(b, t, HEADS, -1).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
        y = self.attend(q, k, v)
        return self.out(y.transpose(1, 2).reshape(b, t, d))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = self.dropout if self.training else 0.0
        if self.spelling in KERNELS:
            return KERNELS[self.spelling](q, k, v, dropout_p=p, is_causal=True)
        scores = PRODUCTS[self.spelling](q, k)
        weights = SOFTMAXES.get(self.spelling, lambda s: torch.softmax(s, -1))(scores)
        if self.spelling == "nn.Softmax":
            weights = self.softmax(scores)
        weights = F.dropout(weights, self.dropout, self.training)
        if weights.dim() == 3:
            weights = weights.view(*q.shape[:3], -1)
        if self.spelling == "einsum":
            return torch.einsum("bhqk,bhkd->bhqd", weights, v)
        return weights @ v


def hidden(t: int) -> Tensor:
    return torch.ones(t, t, dtype=torch.bool).triu(1)


def scale(q: Tensor) -> float:
    return 1 / math.sqrt(q.shape[-1])


def filled(scores: Tensor) -> Tensor:
    return scores.masked_fill(hidden(scores.shape[-1]), float("-inf"))


def with_setitem(q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k.mT * scale(q)
    scores[..., hidden(q.shape[-2])] = float("-inf")
    return scores


def with_in_place(q: Tensor, k: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3))
    scores *= scale(q)
    scores += torch.zeros(q.shape[-2], q.shape[-2]).masked_fill(hidden(q.shape[-2]), -1e9)
    return scores


def with_baddbmm(q: Tensor, k: Tensor) -> Tensor:
    bias = torch.zeros(q.shape[-2], q.shape[-2]).masked_fill(hidden(q.shape[-2]), -1e4)
    flat_q, flat_k = (z.reshape(-1, *z.shape[-2:]) for z in (q, k))
    bias = bias.expand(len(flat_q), -1, -1)
    return torch.baddbmm(bias, flat_q, flat_k.mT, beta=1, alpha=scale(q))


def with_bmm(q: Tensor, k: Tensor) -> Tensor:
    flat_q, flat_k = (z.reshape(-1, *z.shape[-2:]) for z in (q, k))
    return filled(torch.bmm(flat_q, flat_k.mT).view(*q.shape[:3], -1) * scale(q))


def with_where(q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return torch.where(hidden(q.shape[-2]), torch.finfo(scores.dtype).min, scores)


def with_soft_cap(q: Tensor, k: Tensor) -> Tensor:
    return filled(torch.tanh(q @ k.mT * scale(q) / 2.0) * 2.0)


def with_shift(q: Tensor, k: Tensor) -> Tensor:
    scores = filled(q @ k.mT * scale(q))
    return scores - scores.amax(-1, keepdim=True)


def with_temperature(q: Tensor, k: Tensor) -> Tensor:
    tau = torch.tensor([0.2, 0.4, 0.8, 1.6]).view(1, HEADS, 1, 1)
    return filled(q @ k.mT * tau)


def with_bias(q: Tensor, k: Tensor) -> Tensor:
    t = q.shape[-2]
    distance = -(torch.arange(t)[:, None] - torch.arange(t)).abs().float()
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]).view(1, HEADS, 1, 1)
    return filled(q @ k.mT * scale(q) + distance * slopes)


def with_clamp(q: Tensor, k: Tensor) -> Tensor:
    return filled((q @ k.mT * scale(q)).clamp(-5e4, 5e4))


def with_mT(q: Tensor, k: Tensor) -> Tensor:
    return filled((k @ q.mT).mT * scale(q))


def with_late_transpose(q: Tensor, k: Tensor) -> Tensor:
    t = q.shape[-2]
    scores = torch.einsum("bhid,bhjd->bhji", q, k) * scale(q)
    scores = scores + torch.zeros(t, t).masked_fill(hidden(t).T, -1e5)
    return scores.transpose(-1, -2)


def by_hand(scores: Tensor) -> Tensor:
    exponentials = torch.exp(scores - scores.amax(-1, keepdim=True))
    return exponentials / exponentials.sum(-1, keepdim=True)


def by_hand_in_place(scores: Tensor) -> Tensor:
    exponentials = (scores - scores.max(dim=-1, keepdim=True).values).exp()
    total = exponentials.sum(dim=-1, keepdim=True)
    return exponentials.div(total)


def plain(q: Tensor, k: Tensor) -> Tensor:
    return filled(q @ k.mT * scale(q))


KERNELS = {
    "sdpa": lambda *a, **k: F.scaled_dot_product_attention(*a, **k),
    "early": early_bound,
    "aten": torch.ops.aten.scaled_dot_product_attention,
    "aten.default": torch.ops.aten.scaled_dot_product_attention.default,
}
PRODUCTS = {
    "torch.softmax": plain,
    "F.softmax": plain,
    "Tensor.softmax": plain,
    "special.softmax": plain,
    "aten.softmax": plain,
    "nn.Softmax": plain,
    "einsum": lambda q, k: filled(torch.einsum("bhqd,bhkd->bhqk", q, k) * scale(q)),
    "setitem": with_setitem,
    "in-place": with_in_place,
    "baddbmm": with_baddbmm,
    "bmm": with_bmm,
    "where": with_where,
    "soft-cap": with_soft_cap,
    "shift": with_shift,
    "temperature": with_temperature,
    "bias": with_bias,
    "clamp": with_clamp,
    "mT": with_mT,
    "late transpose": with_late_transpose,
    "log_softmax": plain,
    "Tensor.log_softmax": plain,
    "log_softmax, setitem": with_setitem,
    "by hand": plain,
    "by hand, div": plain,
    "by hand, clamp": with_clamp,
    "by hand, bias": with_bias,
}
SOFTMAXES = {
    "F.softmax": lambda s: F.softmax(s, dim=-1),
    "Tensor.softmax": lambda s: s.softmax(dim=-1),
    "special.softmax": lambda s: torch.special.softmax(s, -1),
    "aten.softmax": lambda s: torch.ops.aten.softmax.int(s, -1),
    "nn.Softmax": lambda s: s,
    "log_softmax": lambda s: F.log_softmax(s, dim=-1).exp(),
    "Tensor.log_softmax": lambda s: torch.exp(s.log_softmax(-1)),
    "log_softmax, setitem": lambda s: F.log_softmax(s, dim=-1).exp(),
    "by hand": by_hand,
    "by hand, div": by_hand_in_place,
    "by hand, clamp": by_hand,
    "by hand, bias": by_hand,
}


class Block(nn.Module):
    """Attention and an MLP, with residuals."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class Model(nn.Module):
    """A language model of blocks."""

    def __init__(self, *attentions: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block(a) for a in attentions))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


class Encoder(nn.Module):
    """nn.TransformerEncoder with padding."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = torch.zeros(tokens.shape, dtype=torch.bool)
        padding[0, -3:] = True
        return self.head(self.encoder(self.embedding(tokens), src_key_padding_mask=padding))


class MultiHead(nn.Module):
    """nn.MultiheadAttention, with or without its weights."""

    def __init__(self, *, need_weights: bool, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, dropout=dropout, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.need_weights = need_weights

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(x + self.attention(x, x, x, need_weights=self.need_weights)[0])


def tokens(batch: int = 3, length: int = 12) -> Tensor:
    """Random tokens [B, T]; draws from the global random state."""
    return torch.randint(0, VOCABULARY, (batch, length))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Next-token-like cross entropy, in nats."""
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
