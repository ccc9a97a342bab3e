"""Denoisers of diffusers, tiny, with their default processor and with the classic one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .case import CannotBuildError, Case

CLASSIC = {"UNet2DConditionModel", "AutoencoderKL", "PriorTransformer",
           "PixArtTransformer2DModel"}  # fmt: skip

_HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}
_PATCHED = {**_HEADS, "in_channels": 4, "sample_size": 8, "patch_size": 2}

MODELS: dict[str, dict[str, Any]] = {
    "UNet2DConditionModel": {
        "sample_size": 16, "block_out_channels": (16, 32), "layers_per_block": 1,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 16, "attention_head_dim": 8, "norm_num_groups": 8},
    "UNet2DModel": {
        "sample_size": 16, "block_out_channels": (16, 32), "layers_per_block": 1,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": 8, "norm_num_groups": 8},
    "AutoencoderKL": {"block_out_channels": (16,), "norm_num_groups": 8},
    "Transformer2DModel": {
        **_HEADS, "in_channels": 16, "num_layers": 1, "norm_num_groups": 8,
        "cross_attention_dim": 16},
    "DiTTransformer2DModel": {**_PATCHED, "num_layers": 2, "num_embeds_ada_norm": 10},
    "PixArtTransformer2DModel": {
        **_PATCHED, "num_layers": 2, "cross_attention_dim": 16, "caption_channels": 16,
        "num_embeds_ada_norm": 10},
    "SD3Transformer2DModel": {
        **_PATCHED, "num_layers": 2, "joint_attention_dim": 16, "caption_projection_dim": 16,
        "pooled_projection_dim": 16, "out_channels": 4},
    "AuraFlowTransformer2DModel": {
        **_PATCHED, "num_mmdit_layers": 1, "num_single_dit_layers": 1, "joint_attention_dim": 16,
        "caption_projection_dim": 16, "pos_embed_max_size": 64},
    "FluxTransformer2DModel": {
        "patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1,
        "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 16,
        "pooled_projection_dim": 16, "axes_dims_rope": (4, 4, 8)},
    "SanaTransformer2DModel": {
        **_PATCHED, "patch_size": 1, "out_channels": 4, "num_layers": 1,
        "num_cross_attention_heads": 2, "cross_attention_head_dim": 8, "cross_attention_dim": 16,
        "caption_channels": 16},
    "WanTransformer3DModel": {
        "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4,
        "text_dim": 16, "ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 32},
    "CogVideoXTransformer3DModel": {
        **_HEADS, "in_channels": 4, "out_channels": 4, "time_embed_dim": 2, "text_embed_dim": 16,
        "num_layers": 1, "sample_width": 8, "sample_height": 8, "sample_frames": 8,
        "max_text_seq_length": 5},
    "LTXVideoTransformer3DModel": {
        "num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4,
        "cross_attention_dim": 32, "num_layers": 1, "caption_channels": 16},
    "PriorTransformer": {
        **_HEADS, "num_layers": 2, "embedding_dim": 8, "num_embeddings": 7,
        "additional_embeddings": 4},
}  # fmt: skip


def _inputs(name: str) -> dict[str, Any]:
    """Latents, times and text, in the layout of each family."""
    time, text = torch.tensor([1, 2]), torch.randn(2, 5, 16)
    latents, pooled = torch.randn(2, 4, 8, 8), torch.randn(2, 16)
    denoise = {"hidden_states": latents, "timestep": time, "encoder_hidden_states": text}
    by_name: dict[str, dict[str, Any]] = {
        "UNet2DConditionModel": {"sample": torch.randn(2, 4, 16, 16), "timestep": time,
                                 "encoder_hidden_states": text},
        "UNet2DModel": {"sample": torch.randn(2, 3, 16, 16), "timestep": time},
        "AutoencoderKL": {"sample": torch.randn(2, 3, 16, 16)},
        "Transformer2DModel": {"hidden_states": torch.randn(2, 16, 4, 4),
                               "encoder_hidden_states": text},
        "DiTTransformer2DModel": {"hidden_states": latents, "timestep": time,
                                  "class_labels": time},
        "PixArtTransformer2DModel": {
            **denoise, "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
        "SD3Transformer2DModel": {**denoise, "pooled_projections": pooled},
        "FluxTransformer2DModel": {
            **denoise, "hidden_states": torch.randn(2, 16, 4), "pooled_projections": pooled,
            "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(5, 3)},
        "WanTransformer3DModel": {**denoise, "hidden_states": torch.randn(2, 4, 2, 8, 8)},
        "CogVideoXTransformer3DModel": {**denoise, "hidden_states": torch.randn(2, 2, 4, 8, 8)},
        "LTXVideoTransformer3DModel": {
            **denoise, "hidden_states": torch.randn(2, 16, 4),
            "encoder_attention_mask": torch.ones(2, 5), "num_frames": 1, "height": 4, "width": 4},
        "PriorTransformer": {
            "hidden_states": torch.randn(2, 8), "timestep": time,
            "proj_embedding": torch.randn(2, 8), "encoder_hidden_states": torch.randn(2, 7, 8)},
    }  # fmt: skip
    return by_name.get(name, denoise)


def names() -> list[str]:
    """All of them."""
    return list(MODELS)


def cases(name: str) -> Iterator[Case]:
    """The named model with each processor."""
    try:
        import diffusers
        from diffusers.models.attention_processor import AttnProcessor
    except ImportError as error:
        raise CannotBuildError(f"import diffusers: {error}") from error

    def make(dropout: bool, classic: bool = False) -> nn.Module:
        config = dict(MODELS[name])
        if name in ("UNet2DConditionModel", "Transformer2DModel"):
            config["dropout"] = 0.1 if dropout else 0.0
        model: nn.Module = getattr(diffusers, name)(**config)
        if classic:
            model.set_attn_processor(AttnProcessor())  # type: ignore[operator]
        return model.train()

    inputs = _inputs(name)
    try:
        Case(name, "", "", make, inputs, "").loss(make(True)).backward()
    except Exception as error:
        raise CannotBuildError(f"{type(error).__name__}: {error}"[:300]) from error
    for classic in (False, True) if name in CLASSIC else (False,):
        yield Case(name, "classic" if classic else "sdpa", name,
                   lambda dropout, c=classic: make(dropout, c), inputs, "latents")  # type: ignore[misc]  # fmt: skip
