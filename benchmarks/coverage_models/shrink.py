"""Makes a configuration small: every width is divided by the same number, so all ratios stay.

A configuration of transformers is a nested dictionary. Its keys say what a number means: a
width, a layer count, a vocabulary. Widths are divided and not set, since heads, groups,
projections and sums of widths then still fit each other, in whatever model it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

VOCABULARY = 256  # the size of every vocabulary; special tokens are packed below it
POSITIONS = 128  # the most positions that a shrunk model may have
IMAGE = 128  # the largest image side in pixels, where that works
STAGES = 8  # a list as long as the model is deep, and longer than this, has one entry a layer
WINDOW = 8  # a sliding window shorter than the sequences that are fed

_WIDTH = re.compile(
    r"(^in|_in|vit|stem|mid|hidden|intermediate|embed\w*|embd|inner|ffn|mlp|proj\w*|head|latent|kv|output|out|model|"
    r"state|feature|conv|codebook|expert|lora|rnn|attention|attn|pooler|text|vision|audio|"
    r"encoder|decoder|joint|bottleneck|quantization|hidden_dimension|fpn|memory|adapter|residual|"
    r"per_layer_input)_?(size|dim|dims|sizes|dimension|width|channels|rank|ratio_dim)s?$"
    r"|^(d_model|d_ff|d_kv|d_inner|n_embd|n_inner|dim|dims|width|embed_dims?|hidden_sizes|"
    r"mlp_dim|n_state|d_embed|d_head|d_rel|num_pos_feats|conv_dim|num_filters|stem_channels|"
    r"kv_channels|upsample_initial_channel|width_list|backbone_channel_list|num_channels_list|"
    r"embed_dim_per_stage|encoder_in_channels|decoder_in_channels|neck_hidden_sizes|"
    r"fusion_hidden_size|embedding_size|query_pre_attn_scalar|in_channels_list|"
    r"mamba_headdim|head_dim|mamba_d_head|mamba_d_ssm|mamba_head_dim|mamba_dt_rank|time_step_rank|"
    r"d_conv_out|attention_hidden_size|hidden_channels|linear_\w+_dim|conv_kernel_dim|tdnn_dim|out_features_dim|"
    r"moe_intermediate_size|mask_input_channels|iou_head_hidden_dim|vocab_embed_dim|ssm_\w*dim)$"
)
_NOT_WIDTH = re.compile(
    r"vocab|image|patch|kernel|window|codebook_size|chunk|pool_size|tile|context|"
    r"stride|grid|block_size|position|conv_kernel|cache|max_\w*size|"
    r"pos_emb|batch|segment|bucket|sample|crop|box_dim|beam|query_length|mel"
)
_LAYERS = re.compile(
    r"^(num|n)_?(\w*_)?(layers?|blocks|decoders|encoders)$|^(encoder|decoder|text|vision)_layers$|"
    r"^(depth|layers|n_layer|encoder_depth|decoder_depth|num_hidden_layers|\w+_num_layers|"
    r"num_\w*hidden_layers|\w*_num_hidden_layers)$"
)
_NOT_LAYERS = re.compile(
    r"feat_extract|shared|dense_layers|residual|lstm|adapter|nextn|feature_layers|window_layers|"
    r"deconv|conv_layers|hash|kv_shared|resnet|postnet|prenet|wavenet|flow|upsample"
)
_INDICES = re.compile(
    r"^(global_attn_indexes|deepstack_visual_indexes|fullatt_block_indexes|backbone_out_indices|"
    r"extract_layers|out_indices|full_attn_layers|kda_layers|deepstack_visual_layers)$"
)
_GROUPS = re.compile(r"num_groups$|_groups$|^groups$|group_norm_size$|norm_num_groups$")
_PER_LAYER = re.compile(
    r"layer_types|mlp_layer_types|indexer_types|layer|block|attn|attention|rope"
)
_DEPTHS = re.compile(
    r"^(depths|blocks_per_stage|stage_num_blocks|num_blocks|stage_numb_of_layers)$"
)
_EXPERTS = re.compile(r"experts?$|^num_local_experts$|^moe_num_experts$")
_NOT_EXPERTS = re.compile(r"shared|zero|per_tok|top|null|frequency")
_CHOSEN = re.compile(
    r"experts_per_tok(en)?$|^(moe_)?(top_?k|k)$|moe_topk|num_selected_experts|router_top_k"
)
_VOCABULARY = re.compile(
    r"(^|_)(vocab_size|vocabulary_size|n_words|n_tokens)(_\w+)?$|^num_embeddings$|_vocab$"
)
_TOKEN = re.compile(r"(token_ids?|token_index|_token)$")
_POSITIONS = re.compile(
    r"max_(\w*_)?(position\w*|seq\w*_?len\w*|source_positions|target_positions|length)$|"
    r"^(n_positions|n_ctx|seq_length|max_seq_len|model_max_length|original_max_position_embeddings)$"
)
_IMAGES = re.compile(r"(^|_)(image_size|img_size|image_sizes|image_embedding_size)$")


SMALL_EFFICIENTNET = {"width_coefficient": 1.0, "depth_coefficient": 0.3, "image_size": 64,
                      "hidden_dim": 1280}  # fmt: skip
SMALL_RESNET = {  # instead of a backbone of timm, whose weights would have to be fetched
    "model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 16, 32, 32],
    "depths": [1, 1, 1, 1], "layer_type": "basic",
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}  # fmt: skip


@dataclass
class Shrinker:
    """Shrinks one configuration; the same token or width becomes the same number everywhere."""

    divisor: int = 16
    fixed: bool = False  # widths by name instead: 64 wide, 4 heads of 16
    sections: bool = False  # give rotary sections to models whose default ones are in their code
    layers: int = 2
    image_divisor: int = 1
    tokens: dict[int, int] = field(default_factory=dict)

    def config(self, d: dict[str, Any]) -> dict[str, Any]:
        """The dictionary with every number made small; nested dictionaries too."""
        if "width_coefficient" in d:  # EfficientNet rounds its widths, and one is in its code
            return {**d, **SMALL_EFFICIENTNET}
        kept, depth = self._kept_layers(d)
        out: dict[str, Any] = {}
        for key, value in d.items():
            if (key in ("stage_names", "out_features") and depth) or key.startswith("dim_bbox_"):
                continue  # follow from the other entries
            if depth and _INDICES.search(key) and _is_indices(value):
                out[key] = _fewer_indices(value, len(kept), key == "out_indices")
            elif key == "per_layer_config" and isinstance(value, dict):
                by_layer = {int(i): self.config(v) for i, v in value.items()}
                out[key] = {new: by_layer[i] for new, i in enumerate(kept) if i in by_layer}
            elif isinstance(value, dict) and value.get("model_type") == "timm_backbone":
                out[key] = SMALL_RESNET
            elif isinstance(value, dict):
                out[key] = self.config(value) if _is_config(key, value) else self._rope(value)
            elif isinstance(value, list | tuple) and depth and len(value) == depth and (
                _PER_LAYER.search(key) or depth > STAGES
            ):  # fmt: skip
                out[key] = [self.value(key, value[i], len(kept)) for i in kept]
            else:
                out[key] = self.value(key, value, len(kept))
        heads, groups = "num_attention_heads", "num_key_value_heads"
        if groups in out and d.get(groups) == d.get(heads):
            out[groups] = out[heads]
        if self.sections and "rope_parameters" in out and "vision" not in str(d.get("model_type")):
            _give_sections(out)
        return out

    def value(self, key: str, value: Any, layers: int) -> Any:
        """One entry of a configuration made small."""
        if self.fixed and not _NOT_WIDTH.search(key) and (number := _by_name(key, value)):
            return number
        for applies, change in self._rules(layers):
            if applies(key):
                return _mapped(value, change)
        return value

    def _rope(self, d: dict[str, Any]) -> dict[str, Any]:
        """Rotary parameters: the sections of a head's width shrink with it."""
        out = {k: self._rope(v) if isinstance(v, dict) else v for k, v in d.items()}
        for key in ("mrope_section", "xdrope_section"):
            if isinstance(sections := d.get(key), list):
                half = 8 if self.fixed else sum(sections) // self.divisor
                rest = [half // (len(sections) + 1) for _ in sections[1:]]
                out[key] = [half - sum(rest), *rest]
        return out

    def _rules(self, layers: int) -> list[tuple[Callable[[str], object], Callable[[int], int]]]:
        return [
            (lambda k: "dropout" in k or "ratio" in k, lambda v: v),
            (_VOCABULARY.search, lambda v: min(v, VOCABULARY)),
            (_TOKEN.search, self.token),
            (_DEPTHS.search, lambda v: min(v, 2)),
            (lambda k: _LAYERS.search(k) and not _NOT_LAYERS.search(k), lambda v: min(v, layers)),
            (_CHOSEN.search, lambda v: min(v, 2)),
            (lambda k: _EXPERTS.search(k) and not _NOT_EXPERTS.search(k), lambda v: min(v, 8)),
            (lambda k: k in ("n_group", "topk_group"), lambda v: min(v, 1)),
            (lambda k: k == "first_k_dense_replace", lambda v: min(v, 1)),
            (lambda k: k in ("num_queries", "num_denoising"), lambda v: min(v, 10)),
            (
                _GROUPS.search,
                lambda v: v if v <= 2 else max(1, v // (8 if self.fixed else self.divisor)),
            ),
            (_POSITIONS.search, lambda v: min(v, POSITIONS)),
            (lambda k: k in ("sliding_window", "sliding_window_size"), lambda v: min(v, WINDOW)),
            (_IMAGES.search, lambda v: v // self.image_divisor),
            (lambda k: k == "num_mel_bins", lambda v: min(v, 16)),
            (lambda k: _WIDTH.search(k) and not _NOT_WIDTH.search(k), self.width),
        ]

    def width(self, value: int) -> int:
        """A width divided; what is small already stays."""
        if value <= 8:
            return value
        if self.fixed:
            return 64 if value >= 128 else 16
        return max(1, value // self.divisor)

    def token(self, value: int) -> int:
        """A special token's number below the vocabulary's size, the same one each time."""
        if value < 64:
            return value
        return self.tokens.setdefault(value, VOCABULARY - 1 - len(self.tokens) % 128)

    def _kept_layers(self, d: dict[str, Any]) -> tuple[list[int], int]:
        """Which layers stay, the first of each kind where they differ; how many there were."""
        names = (
            "num_hidden_layers",
            "n_layer",
            "n_layers",
            "num_layers",
            "encoder_layers",
            "depth",
        )
        depth = next((d[n] for n in names if isinstance(d.get(n), int)), 0)
        lists = [
            v for k, v in d.items()
            if isinstance(v, list | tuple) and depth and len(v) == depth and _PER_LAYER.search(k)
        ]  # fmt: skip
        own = {int(i): str(v) for i, v in (d.get("per_layer_config") or {}).items()}
        kinds = [str([x[i] for x in lists]) + own.get(i, "") for i in range(depth)]
        firsts = sorted({kinds.index(kind) for kind in kinds})[:6] if lists or own else []
        wanted = max([self.layers, *(len(v) for k, v in d.items()
                      if _INDICES.search(k) and _is_indices(v))])  # fmt: skip
        extra = [i for i in range(depth) if i not in firsts]
        kept = sorted(firsts + extra[: max(0, wanted - len(firsts))])
        return (kept, depth) if depth else (list(range(self.layers)), 0)


def _is_indices(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(i, int) for i in value)


def _fewer_indices(value: list[int], layers: int, from_one: bool) -> list[int]:
    """Layer numbers of a deep model as those of a shallow one; the last ones, in their order."""
    if max(value) < layers + from_one:
        return value
    ranks = {index: rank for rank, index in enumerate(sorted(set(value)))}
    return [layers - len(ranks) + ranks[index] + from_one for index in value]


def _give_sections(config: dict[str, Any]) -> None:
    """Writes the three sections of a multimodal rotary embedding, for the head width there is."""
    rope, heads = config["rope_parameters"], config.get("num_attention_heads")
    if not isinstance(rope, dict) or not heads or "mrope_section" in rope:
        return
    width = config.get("head_dim") or config["hidden_size"] // heads
    half = int(width * rope.get("partial_rotary_factor", 1.0)) // 2
    config["rope_parameters"] = {
        **rope,
        "mrope_section": [half - 2 * (half // 4), half // 4, half // 4],
    }


def _by_name(key: str, value: Any) -> int | None:
    """Head counts and head widths of the fixed way of shrinking; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    if re.search(r"(key_value|kv)_heads$|num_kv$|^n_head_kv$", key):
        return min(value, 2)
    if re.search(r"(^|_)heads?$|^n_head$", key):
        return min(value, 4)
    if re.search(r"head_dim$|^d_kv$|^kv_channels$|^d_head$|headdim$", key):
        return 8 if "rope" in key or "nope" in key else 16
    return None


def _is_config(key: str, value: dict[str, Any]) -> bool:
    return key.endswith(("config", "configs")) or "model_type" in value or "config" in key


def _mapped(value: Any, change: Callable[[int], int]) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return change(value)
    if isinstance(value, list | tuple):
        return [_mapped(v, change) for v in value]
    return value
