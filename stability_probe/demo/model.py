"""The demo's two small transformers; only their attention is the reference module.

Shape suffixes: B batch, T positions, C model width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from stability_probe.remedies import Attention, RMSQKNorm

WIDTH, HEADS, LAYERS = 64, 4, 2


class Block(nn.Module):
    """Pre-norm attention and MLP with residuals."""

    def __init__(self, *, causal: bool, qk_norm: bool) -> None:
        super().__init__()
        control = RMSQKNorm(WIDTH // HEADS) if qk_norm else None
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(WIDTH, HEADS, causal=causal, qk_control=control)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x_BTC: Tensor) -> Tensor:
        """[B, T, C] to [B, T, C]."""
        x_BTC = x_BTC + self.attention(self.norm_1(x_BTC))
        y_BTC: Tensor = x_BTC + self.mlp(self.norm_2(x_BTC))
        return y_BTC


class ByteModel(nn.Module):
    """A causal language model over bytes: [B, T] integers to logits [B, T, 256]."""

    def __init__(self, length: int, *, qk_norm: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.position = nn.Parameter(_sines(length))
        blocks = [Block(causal=True, qk_norm=qk_norm) for _ in range(LAYERS)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.5)

    def forward(self, bytes_BT: Tensor) -> Tensor:
        """Logits of the next byte."""
        x_BTC = self.embedding(bytes_BT) + self.position
        logits: Tensor = self.head(self.norm(self.blocks(x_BTC)))
        return logits


class DigitModel(nn.Module):
    """A vision transformer over 16 patches of 2 x 2: [B, 8, 8] images to logits [B, 10]."""

    def __init__(self, *, qk_norm: bool) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, WIDTH)
        self.position = nn.Parameter(torch.randn(17, WIDTH) / 2)  # the first: the class token
        blocks = [Block(causal=False, qk_norm=qk_norm) for _ in range(LAYERS)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the digit."""
        patches = images.view(len(images), 4, 2, 4, 2).transpose(2, 3)
        x_BTC = self.embedding(patches.reshape(len(images), 16, 4))
        x_BTC = nn.functional.pad(x_BTC, (0, 0, 1, 0)) + self.position
        logits: Tensor = self.head(self.norm(self.blocks(x_BTC))[:, 0])
        return logits


def _sines(length: int) -> Tensor:
    """Sinusoidal positions [T, C] (Vaswani et al. 2017, arXiv:1706.03762, section 3.5)."""
    rates_C = torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(1e4) / WIDTH))
    angles_TC = torch.arange(length).unsqueeze(-1) * rates_C
    return torch.stack([angles_TC.sin(), angles_TC.cos()], -1).flatten(1)
