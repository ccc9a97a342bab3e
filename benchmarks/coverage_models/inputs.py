"""Random inputs for a model, from the names that its forward takes and from its configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .overrides import BATCH, INPUTS, LENGTH


class Facts:
    """Looks an entry up in a configuration and in the ones inside it."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self._inside = list(_configs(config))

    def get(self, *names: str, default: Any = None, under: str = "") -> Any:
        """The first entry of that name which is set; parts named like `under` come first."""
        ranked = sorted(self._inside, key=lambda c: bool(under) and under not in c[0])
        for name in names:
            for _, config in ranked:
                value = getattr(config, name, None)
                if value is not None:
                    return value
        return default

    @property
    def vocabulary(self) -> int:
        """How many ordinary tokens there are."""
        size = self.get("vocab_size", "n_words", under="text", default=100)
        return int(min(size if isinstance(size, int) else 100, 100))


def _configs(config: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    yield name, config
    for key, value in vars(config).items():
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            yield from _configs(value, key)


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The named parameters of a forward."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = inspect.signature(function).parameters
    return {n: p for n, p in found.items() if p.kind not in kinds and n != "self"}


def tokens(facts: Facts, length: int = LENGTH) -> Tensor:
    """Token numbers [B, T] that are no special ones."""
    return torch.randint(8, max(9, facts.vocabulary - 8), (BATCH, length))


def image(facts: Facts, *, frames: int = 0) -> Tensor:
    """Pixels [B, C, H, W], or [B, frames, C, H, W]."""
    size = facts.get("image_size", "img_size", "input_size", under="vision", default=64)
    if isinstance(size, dict):
        size = (size["height"], size["width"])
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    channels = facts.get("num_channels", "in_channels", "in_chans", under="vision", default=3)
    lead = (BATCH, frames) if frames else (BATCH,)
    return torch.randn(*lead, channels if isinstance(channels, int) else 3, height, width)


def patches(facts: Facts, grid: tuple[int, int, int] = (1, 4, 4)) -> tuple[Tensor, Tensor]:
    """Flattened patches [N, C * t * p * p] and the grid [B, 3] that they come from."""
    patch = facts.get("patch_size", under="vision", default=14)
    temporal = facts.get("temporal_patch_size", under="vision", default=1)
    channels = facts.get("in_channels", "num_channels", "in_chans", under="vision", default=3)
    patch = patch if isinstance(patch, int) else patch[0]
    count = BATCH * grid[0] * grid[1] * grid[2]
    return (
        torch.randn(count, channels * temporal * patch * patch),
        torch.tensor([grid] * BATCH),
    )


def spectrogram(facts: Facts) -> Tensor:
    """Audio features: [B, bins, frames] where the length is fixed, else [B, frames, bins]."""
    bins = facts.get("num_mel_bins", "input_feat_per_channel", "feature_size", "n_mels",
                     "input_dim", "input_feat_size", "feat_in", "feature_projection_input_dim",
                     under="audio", default=80)  # fmt: skip
    positions = facts.get("max_source_positions", under="audio")
    if positions is not None and facts.get("input_feat_per_channel") is None:
        return torch.randn(BATCH, bins, 2 * positions)
    return torch.randn(BATCH, 64, bins)


def padded(ids: Tensor) -> Tensor:
    """An attention mask [B, T] that hides the last three tokens of the second sequence."""
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    return mask


def time_series(facts: Facts) -> dict[str, Tensor]:
    """Past and future values, with their features."""
    context = facts.get("context_length", default=32)
    lags = facts.get("lags_sequence", default=[0])
    past = context + max(lags)
    future = facts.get("prediction_length", default=8) or 8
    channels = facts.get("num_input_channels", "input_size", default=1)
    shape: tuple[int, ...] = () if channels == 1 and facts.get("lags_sequence") else (channels,)
    features = max(1, facts.get("num_time_features", default=1) or 0)
    return {
        "past_values": torch.randn(BATCH, past, *shape),
        "past_time_features": torch.randn(BATCH, past, features),
        "past_observed_mask": torch.ones(BATCH, past, *shape),
        "future_values": torch.randn(BATCH, future, *shape),
        "future_time_features": torch.randn(BATCH, future, features),
    }


def known_inputs(model: nn.Module, facts: Facts) -> dict[str, Any]:
    """Every input that the forward takes and that a rule for its name exists for."""
    wants = parameters(model.forward)
    ids = tokens(facts)
    made: dict[str, Any] = {"input_ids": ids, "attention_mask": padded(ids)}
    made |= {"decoder_input_ids": tokens(facts, 12)}
    if "past_values" in wants:
        made |= time_series(facts)
    if "grid_thw" in wants or "image_grid_thw" in wants:
        pixels, grid = patches(facts)
        made |= {"hidden_states": pixels, "grid_thw": grid, "image_grid_thw": grid}
        made |= {"pixel_values": pixels}
    else:
        made["pixel_values"] = image(facts)
    if "pixel_values_videos" in wants and "pixel_values" not in wants:
        made["pixel_values_videos"] = image(facts, frames=facts.get("frames_per_clip", default=4))
    frames = facts.get("num_frames", under="vision")
    if frames and "pixel_values" in wants and facts.get("tubelet_size", "attention_type"):
        made["pixel_values"] = image(facts, frames=frames)
    if "input_features" in wants:
        made["input_features"] = spectrogram(facts)
        shape = made["input_features"].shape
        made["input_features_mask"] = torch.ones(BATCH, max(shape[1:]), dtype=torch.long)
    channels = facts.get("audio_channels", default=0)
    samples = 4000
    made["input_values"] = (
        torch.randn(BATCH, channels, samples) if channels else torch.randn(BATCH, samples)
    )
    size = facts.get("hidden_size", "d_model", "n_embd", default=32)
    if facts.get("num_mel_bins") and facts.get("max_length", "spectrogram_length"):
        made["input_values"] = torch.randn(
            BATCH, facts.get("max_length", "spectrogram_length"), facts.get("num_mel_bins")
        )
    width = size if isinstance(size, int) else 32
    made["audio_mel"] = spectrogram(facts) if "audio_mel" in wants else None
    made["audio_mel_mask"] = torch.zeros(BATCH, 64, dtype=torch.bool)
    made["latents"] = torch.randn(BATCH, width, 12)
    made["query_embeds"] = torch.randn(BATCH, 4, width)
    made["bbox"] = torch.zeros(BATCH, LENGTH, 4, dtype=torch.long) + torch.tensor([1, 2, 5, 9])
    made["inputs_embeds"] = torch.randn(BATCH, LENGTH, width)
    made |= INPUTS.get(facts.config.model_type, lambda _: {})(facts)
    return {name: value for name, value in made.items() if name in wants and value is not None}


def with_labels(
    model: nn.Module, inputs: dict[str, Any], facts: Facts, kind: str
) -> dict[str, Any]:
    """The inputs with labels of the given kind: "tokens", "classes" or "ctc"."""
    if kind == "contrastive":
        return {**inputs, "return_loss": True}
    if "labels" not in parameters(model.forward) or not kind:
        return inputs
    if kind == "tokens":
        target = inputs.get("decoder_input_ids", inputs.get("input_ids"))
        if target is None:
            target = tokens(facts)
        return {**inputs, "labels": target.clone()}
    if kind == "ctc":
        return {**inputs, "labels": torch.randint(1, 20, (BATCH, 4))}
    return {**inputs, "labels": torch.randint(0, 2, (BATCH,))}


def variants(model: nn.Module, config: Any, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Sets of inputs to try, the richest first, each with a word for it."""
    facts = Facts(config)
    everything = known_inputs(model, facts)
    main = getattr(model, "main_input_name", "input_ids")
    main = main if isinstance(main, str) else main[0]
    wants = parameters(model.forward)
    needed = {n for n, p in wants.items() if p.default is inspect.Parameter.empty}
    try:
        multimodal = _with_image_tokens(model, facts, everything)
    except Exception:  # images of its own kind: then text alone
        multimodal = None
    if multimodal is not None:
        yield "text and image", with_labels(model, multimodal, facts, kind)
    few = {"inputs_embeds"}
    fed = {n: v for n, v in everything.items() if n not in few or n in needed}
    text = any(n in fed for n in ("input_ids",))
    if not (text and facts.get("image_token_id", "image_token_index") is not None):
        yield "all", with_labels(model, fed, facts, kind)
    own = set(INPUTS.get(facts.config.model_type, lambda _: {})(facts))
    for extra in ({"attention_mask"}, set()):
        only = {main, "decoder_input_ids", *needed, *extra, *own}
        yield (
            "main",
            with_labels(model, {n: v for n, v in everything.items() if n in only}, facts, kind),
        )
    if (sound := everything.get("input_values")) is not None and sound.dim() == 2:
        yield "main", {main: sound[:, None]}
    if text and main != "input_ids":
        only = {"input_ids", "attention_mask", *needed}
        yield (
            "text",
            with_labels(model, {n: v for n, v in everything.items() if n in only}, facts, kind),
        )


def _with_image_tokens(
    model: nn.Module, facts: Facts, everything: dict[str, Any]
) -> dict[str, Any] | None:
    """Text with as many image tokens as there are image features; None without images."""
    token = facts.get("image_token_id", "image_token_index")
    inner = next((m for m in (model, getattr(model, "model", None))
                  if hasattr(m, "get_image_features")), None)  # fmt: skip
    if token is None or inner is None or "pixel_values" not in everything:
        return None
    names = ("pixel_values", "image_grid_thw", "image_sizes")
    takes = parameters(inner.get_image_features)
    size = torch.tensor([list(everything["pixel_values"].shape[-2:])] * BATCH)
    given = {"image_sizes": size, **everything}
    given = {n: given[n] for n in names if n in given and n in takes}
    with torch.no_grad():
        found = inner.get_image_features(**given)
    found = getattr(found, "pooler_output", found)
    if isinstance(found, Tensor):
        count = found.numel() // found.shape[-1]
    else:
        count = sum(f.numel() // f.shape[-1] for f in found)
    ids = torch.cat([everything["input_ids"][:, :4],
                     torch.full((BATCH, count // BATCH), token),
                     everything["input_ids"][:, 4:8]], 1)  # fmt: skip
    fed = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    wants = parameters(model.forward)
    if "mm_token_type_ids" in wants:
        fed["mm_token_type_ids"] = (ids == token).long()
    if "token_type_ids" in wants:
        fed["token_type_ids"] = (ids == token).long()
    return {**fed, **{n: v for n, v in given.items() if n in wants}}
