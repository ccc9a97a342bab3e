"""Controls of the attention logits, and the reference attention module that takes them."""

from stability_probe.remedies.attention import Attention
from stability_probe.remedies.qk_norm import RMSQKNorm

__all__ = ["Attention", "RMSQKNorm"]
