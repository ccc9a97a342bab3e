"""PyTorch's fused attention kernels, as the operators that a torch-function mode sees."""

from __future__ import annotations

from typing import Any

import torch

_NAMES = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
_PACKETS = tuple(packet for n in _NAMES if (packet := getattr(torch.ops.aten, n, None)) is not None)
KERNELS: frozenset[Any] = frozenset((*_PACKETS, *(packet.default for packet in _PACKETS)))
