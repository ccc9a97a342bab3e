"""The reference attention module: one, for the demo, the benchmarks and every logit control.

Shape suffixes: B batch, T positions, C model width, H heads, D head width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stability_probe.errors import ShapeError


class Attention(nn.Module):
    """Multi-head self-attention with separate W_q, W_k, W_v, W_o and a pluggable logit control.

    With q, k, v = x W_q, x W_k, x W_v split into heads and (q, k) passed through `qk_control`:

        y = softmax(q k^T / sqrt(D)) v W_o        (Vaswani et al. 2017, arXiv:1706.03762, eq. 1)

    Without a control nothing bounds the logits: |q . k| grows with the norms of W_q and W_k.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        causal: bool = False,
        qk_control: nn.Module | None = None,
        dropout: float = 0.0,
        eager: bool = False,
    ) -> None:
        """Weights start as `nn.Linear` starts them.

        Args:
            width: C, the model's width; a multiple of `heads`.
            heads: H.
            causal: each position sees itself and what came before.
            qk_control: maps q and k [B, H, T, D] to what the product is taken of, such as
                `RMSQKNorm(width // heads)`; None leaves them as they are.
            dropout: of the attention weights, while training.
            eager: spell the softmax out instead of calling SDPA; same result, T x T memory.

        Raises:
            ShapeError: the width is no multiple of the heads.
        """
        super().__init__()
        if width % heads:
            raise ShapeError(
                f"got width {width} for {heads} heads; expected a multiple. "
                f"Take {width // heads * heads} or {(width // heads + 1) * heads}."
            )
        self.num_heads, self.causal, self.dropout, self.eager = heads, causal, dropout, eager
        self.w_q = nn.Linear(width, width, bias=False)
        self.w_k = nn.Linear(width, width, bias=False)
        self.w_v = nn.Linear(width, width, bias=False)
        self.w_o = nn.Linear(width, width, bias=False)
        self.qk_control = qk_control

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Attends: [B, T, C] to [B, T, C]."""
        q, k, v = (self._split(w(x_BTC)) for w in (self.w_q, self.w_k, self.w_v))
        if self.qk_control is not None:
            q, k = self.qk_control(q, k)
        dropout = self.dropout if self.training else 0.0
        if self.eager:
            y_BHTD = self._spelled_out(q, k, v, dropout)
        else:
            y_BHTD = F.scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, is_causal=self.causal
            )
        y_BTC: Tensor = self.w_o(y_BHTD.transpose(1, 2).flatten(2))
        return y_BTC

    def _split(self, x_BTC: Tensor) -> Tensor:
        return x_BTC.view(*x_BTC.shape[:2], self.num_heads, -1).transpose(1, 2)

    def _spelled_out(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        scores_BHTT = q @ k.mT / math.sqrt(q.shape[-1])
        if self.causal:
            t = q.shape[-2]
            hidden_TT = torch.ones(t, t, dtype=torch.bool, device=q.device).triu(1)
            scores_BHTT = scores_BHTT.masked_fill(hidden_TT, -math.inf)
        return F.dropout(torch.softmax(scores_BHTT, -1), dropout) @ v
