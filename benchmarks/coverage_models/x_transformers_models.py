"""x-transformers: one small decoder or encoder for each of its attention options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .case import CannotBuildError, Case

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "flash": {"attn_flash": True},
    "flash, rotary": {"attn_flash": True, "rotary_pos_emb": True},
    "rotary": {"rotary_pos_emb": True},
    "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 2},
    "flash, alibi": {"attn_flash": True, "alibi_pos_bias": True},
    "relative position bias": {"rel_pos_bias": True},
    "dynamic position bias": {"dynamic_pos_bias": True},
    "qk norm": {"attn_qk_norm": True, "attn_qk_norm_scale": 10},
    "flash, qk norm": {"attn_flash": True, "attn_qk_norm": True},
    "soft cap": {"attn_softclamp_logits": True},
    "talking heads before": {"attn_pre_talking_heads": True},
    "talking heads after": {"attn_post_talking_heads": True},
    "one key and value head": {"attn_one_kv_head": True},
    "two key and value heads": {"attn_kv_heads": 2},
    "memory keys": {"attn_num_mem_kv": 3},
    "flash, memory keys": {"attn_flash": True, "attn_num_mem_kv": 3},
    "sparse top-k": {"attn_sparse_topk": 4},
    "gated values": {"attn_gate_values": True},
    "gated heads": {"attn_head_scale": True},
    "zero key and value": {"attn_add_zero_kv": True},
    "value residual": {"add_value_residual": True},
    "data-dependent alibi": {"attn_data_dependent_alibi": True},
    "selective": {"attn_selective": True},
    "sigmoid": {"attn_sigmoid": True},
    "value norm": {"attn_qk_norm": True, "attn_value_rmsnorm": True},
    "cope": {"attn_use_cope": True},
    "hybrid": {"attn_laser": True},
}


def names() -> list[str]:
    """Every option, with a decoder; and an encoder."""
    return [*OPTIONS, "encoder", "encoder-decoder"]


def cases(name: str) -> Iterator[Case]:
    """The named option in a two-layer language model."""
    try:
        import x_transformers as x
    except ImportError as error:
        raise CannotBuildError(f"import x_transformers: {error}") from error

    def make(dropout: bool) -> nn.Module:
        p = {"attn_dropout": 0.1 if dropout else 0.0}
        size = {"dim": 32, "depth": 2, "heads": 4, "attn_dim_head": 8, **p}
        if name == "encoder-decoder":
            sides = {f"{side}_{k}": v for side in ("enc", "dec")
                     for k, v in {"depth": 1, "heads": 4, "num_tokens": 50, "max_seq_len": 16,
                                  **p}.items()}  # fmt: skip
            return x.XTransformer(dim=32, **sides).train()
        kind = x.Encoder if name == "encoder" else x.Decoder
        return x.TransformerWrapper(
            num_tokens=50, max_seq_len=16, attn_layers=kind(**size, **OPTIONS.get(name, {}))
        ).train()

    ids = torch.randint(0, 50, (2, 16))
    inputs = {"src": ids, "tgt": ids} if name == "encoder-decoder" else {"x": ids}
    try:
        make(True)
    except Exception as error:
        raise CannotBuildError(f"{type(error).__name__}: {error}") from error
    implementation = "flash" if "flash" in name else "eager"
    yield Case(name, implementation, "x_transformers", make, inputs, "tokens")
