"""Where the general way of shrinking or feeding does not fit a model type: what fits instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

BATCH, LENGTH = 2, 16

_SERIES = {"prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2, 3],
           "num_time_features": 1, "feature_size": ...}  # fmt: skip
_ROPE = {
    kind: {"rope_type": "default", "rope_theta": 1e4}
    for kind in ("full_attention", "sliding_attention")
}

CONFIG: dict[str, dict[str, Any]] = {
    "autoformer": {**_SERIES, "moving_average": 3},
    "informer": _SERIES,
    "time_series_transformer": _SERIES,
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "bamba": {"attn_layer_indices": [1]},
    "cvt": {"depth": [1, 2, 3]},
    "hunyuan_vl": {"text_config": {"head_dim": 16}},
    "hunyuan_vl_text": {"head_dim": 16},
    "dory": {
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
        "num_hidden_layers": 3,
    },
    "cohere_compass_text": {"rope_parameters": _ROPE},
    "cohere_compass": {"text_config": {"rope_parameters": _ROPE}},
    "chameleon": {"vocabulary_map": {"<image>": 8, "IMGIMGA": 9}},
}

INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "bros": lambda facts: {"bbox": torch.rand(BATCH, LENGTH, 4)},
    "clap": lambda facts: {
        "input_features": torch.randn(BATCH, 1, 256, facts.get("num_mel_bins")),
        "is_longer": torch.zeros(BATCH, 1, dtype=torch.bool),
    },
    "blip_2_qformer": lambda facts: {
        "attention_mask": None,
        "encoder_hidden_states": torch.randn(BATCH, 6, facts.get("encoder_hidden_size")),
    },
    "dia": lambda facts: {"decoder_input_ids": torch.randint(3, 50, (BATCH, 6, 9))},
    "decision_transformer": lambda facts: {
        "states": torch.randn(BATCH, 5, facts.get("state_dim")),
        "actions": torch.randn(BATCH, 5, facts.get("act_dim")),
        "rewards": torch.randn(BATCH, 5, 1),
        "returns_to_go": torch.randn(BATCH, 5, 1),
        "timesteps": torch.arange(5).repeat(BATCH, 1),
        "attention_mask": None,
    },
    "clvp": lambda facts: {"input_features": torch.randn(BATCH, facts.get("feature_size"), 32)},
}


def applied(model_type: str, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the type's own entries put over it; nested ones are merged."""
    return _merged(config, CONFIG.get(model_type, {}))


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        if value is ...:  # the default follows from the other entries
            out.pop(key, None)
            continue
        inside = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = _merged(out[key], value) if inside else value
    return out
