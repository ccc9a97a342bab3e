"""What else touches modules, modes and tensors while a probe watches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stability_probe as sp


def test_a_watched_module_that_attends_itself_is_seen_at_every_step() -> None:
    class SelfAttention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    model = SelfAttention()
    with sp.watch(model, strict=True) as probe:
        for step in range(1, 6):
            model(torch.randn(2, 3, 5, 4, requires_grad=True))
            probe.step()
            assert probe.coverage[0].calls == step
