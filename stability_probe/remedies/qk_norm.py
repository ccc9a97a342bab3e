"""QK normalisation: queries and keys of a set length, so that logits cannot grow with weights.

Shape suffixes: B batch, H heads, T positions, D head width.
"""

from __future__ import annotations

import math

from torch import Tensor, nn


class RMSQKNorm(nn.Module):
    """An RMS norm with a learned gain per channel on q and on k, over the width of a head.

    With unit RMS |q| = |k| = sqrt(D) before the gains, so that for gains gamma and delta

        |q . k| / sqrt(D)  <=  sqrt(D) max|gamma| max|delta|.

    The bound is soft: it moves with the gains, which train. It must act after the split into
    heads; over the full width it would couple the heads and bound none of them. The division by
    sqrt(D) stays. One gain vector serves all heads of a layer.

    This is the form of Dehghani et al. 2023 (arXiv:2302.05442) that most open models ship. It is
    not the unit-length form with one scalar per head of Henry et al. 2020 (arXiv:2010.04245),
    whose bound is that scalar. Cost: O(B H T D), beside the O(B H T^2 D) of attention; it can
    keep the projection and the attention kernel from being fused.
    """

    def __init__(self, head_width: int, *, eps: float = 1e-6) -> None:
        """Gains start at one.

        Args:
            head_width: D, the width of one head.
            eps: added to the mean square before the root.
        """
        super().__init__()
        self.q_norm = nn.RMSNorm(head_width, eps=eps)
        self.k_norm = nn.RMSNorm(head_width, eps=eps)

    def forward(self, q_BHTD: Tensor, k_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys with unit RMS times the gains, of the same shapes."""
        return self.q_norm(q_BHTD), self.k_norm(k_BHTD)

    def bound(self) -> Tensor:
        """The ceiling of |q . k| / sqrt(D) that the present gains give, 0-dim."""
        gamma, delta = self.q_norm.weight.detach(), self.k_norm.weight.detach()
        return math.sqrt(len(gamma)) * gamma.abs().max() * delta.abs().max()
