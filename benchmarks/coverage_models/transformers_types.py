"""Tiny models of every type that transformers' mappings name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from . import overrides
from .case import CannotBuildError, Case, seed
from .inputs import parameters, variants
from .shrink import IMAGE, Shrinker

transformers.logging.set_verbosity_error()

MAX_PARAMETERS = 40_000_000
WIDE = 1024  # from this width on, dividing leaves many heads: widths by name are tried first

# The mappings whose models have a loss of their own, the likeliest to be trained first.
TASKS = {
    "SEQ_TO_SEQ_CAUSAL_LM": "tokens", "SPEECH_SEQ_2_SEQ": "tokens",
    "IMAGE_TEXT_TO_TEXT": "tokens", "MULTIMODAL_LM": "tokens", "MASKED_LM": "tokens",
    "CAUSAL_LM": "tokens",
    "CTC": "ctc", "IMAGE_CLASSIFICATION": "classes", "VIDEO_CLASSIFICATION": "classes",
    "AUDIO_CLASSIFICATION": "classes", "SEQUENCE_CLASSIFICATION": "classes",
}  # fmt: skip


def names() -> list[str]:
    """Every model type of the base mapping."""
    return list(modeling_auto.MODEL_MAPPING_NAMES)


def classes_of(model_type: str) -> Iterator[tuple[str, str]]:
    """(class name, label kind): the class with a loss of its own, then the base class."""
    base = modeling_auto.MODEL_MAPPING_NAMES[model_type]
    base = base if isinstance(base, str) else base[0]
    if "return_loss" in parameters(getattr(transformers, base).forward):
        yield base, "contrastive"
        return
    for task, kind in TASKS.items():
        names = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
        if model_type in names:
            name = names[model_type]
            yield (name if isinstance(name, str) else name[0]), kind
            break
    yield base, ""


def tiny_config(model_type: str, shrinker: Shrinker) -> Any:
    """The type's default configuration made small."""
    kind = CONFIG_MAPPING[model_type]
    small = shrinker.config(kind().to_dict())
    small = overrides.applied(model_type, small)
    for noise in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "mask_time_prob",
                  "mask_feature_prob"):  # fmt: skip
        if small.get(noise):
            small[noise] = 0.0
    return kind.from_dict(small)


def cases(model_type: str) -> Iterator[Case]:
    """The type in each attention implementation that it offers.

    Raises:
        CannotBuildError: no attempt built and ran.
    """
    case = _first_that_runs(model_type)
    yield case
    if case.implementation == "sdpa":
        yield _again(case, "eager")


def _first_that_runs(model_type: str) -> Case:
    reasons: list[str] = []
    for shrinker in attempts(model_type):
        for name, kind in classes_of(model_type):
            try:
                return _case(model_type, name, kind, shrinker)
            except Exception as error:
                reasons.append(f"{name}: {_short(error)}")
    raise CannotBuildError(" | ".join(dict.fromkeys(reasons)))


def attempts(model_type: str) -> list[Shrinker]:
    """How to shrink, the smallest first."""
    config = str(CONFIG_MAPPING[model_type]().to_dict())
    largest = max((int(n) for n in re.findall(r"image_size': \[?(\d+)", config)), default=1)
    widest = max(
        (int(n) for n in re.findall(r"(?:hidden_size|d_model)': (\d+)", config)), default=1
    )
    small, whole = _image_divisor(largest, IMAGE), _image_divisor(largest, 2 * IMAGE)
    ways = [
        Shrinker(16, image_divisor=small),
        Shrinker(8, image_divisor=whole),
        Shrinker(fixed=True, image_divisor=small),
        Shrinker(fixed=True, image_divisor=whole, sections=True),
        Shrinker(8, image_divisor=small, sections=True),
        Shrinker(4, image_divisor=whole),
    ]
    return sorted(ways, key=lambda way: not way.fixed) if widest >= WIDE else ways


def _image_divisor(size: int, limit: int) -> int:
    """The smallest number that makes the image small and leaves it whole patches."""
    whole = [d for d in range(1, size + 1) if size % d == 0 and 64 <= size // d <= limit]
    fits = [d for d in whole if not (size // d % 14 and size // d % 16)]
    return next(iter([*fits, *whole]), 1) if size > limit else 1


def _case(model_type: str, name: str, kind: str, shrinker: Shrinker) -> Case:
    def make(dropout: bool, implementation: str | None = None) -> nn.Module:
        config = tiny_config(model_type, replace(shrinker, tokens={}))
        if not dropout:
            without_dropout(config)
        chosen = {} if implementation is None else {"attn_implementation": implementation}
        model: nn.Module = getattr(transformers, name)._from_config(config, **chosen)
        if not dropout:
            silence(model)
        return model.train()

    _refuse_large(model_type, name, shrinker)
    seed(0)
    model = make(True)
    implementation = getattr(model.config, "_attn_implementation", None) or "eager"
    seed(1)
    found = list(_runnable(model, kind))
    if not found:
        raise CannotBuildError("no inputs are known for it")
    fed, inputs = found[0]
    return Case(model_type, implementation, name, make, inputs, fed, has_dropout(model))


def _runnable(model: nn.Module, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The first inputs that a forward and a backward accept."""
    first: Exception | None = None
    for make_kind in dict.fromkeys((kind, "")):
        for fed, inputs in variants(model, model.config, make_kind):
            try:
                case = Case("", "", "", lambda _: model, inputs, fed)
                case.loss(model).backward()
            except Exception as error:
                first = first or error
                continue
            yield fed, inputs
            return
    if first is not None:
        raise first


def _refuse_large(model_type: str, name: str, shrinker: Shrinker) -> None:
    with torch.device("meta"):
        try:
            model = getattr(transformers, name)._from_config(tiny_config(model_type, shrinker))
        except ImportError:
            raise
        except Exception:
            return  # some models cannot be made without data; then the real one decides
    count = sum(p.numel() for p in model.parameters())
    if count > MAX_PARAMETERS:
        raise CannotBuildError(f"still {count / 1e6:.0f} M parameters after shrinking")


def _again(case: Case, implementation: str) -> Case:
    """The same case in another implementation."""
    make = case.make
    return Case(case.name, implementation, case.model_class,
                lambda dropout: make(dropout, implementation),  # type: ignore[call-arg]
                case.inputs, case.fed, case.has_dropout)  # fmt: skip


def has_dropout(model: nn.Module) -> bool:
    """Whether anything in the model or its configuration drops at random."""
    if any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in model.modules()):
        return True
    return re.search(r"drop\w*': (0\.0*[1-9]|0\.[1-9])", str(model.config.to_dict())) is not None


def without_dropout(config: Any) -> None:
    """Sets every dropout of a configuration, and of those inside it, to zero."""
    for key, value in list(vars(config).items()):
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            without_dropout(value)
        elif isinstance(value, float) and re.search(r"drop", key):
            setattr(config, key, 0.0)


def silence(model: nn.Module) -> None:
    """Sets every dropout of the modules themselves to zero."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for key, value in list(vars(module).items()):
            if isinstance(value, float) and "drop" in key:
                setattr(module, key, 0.0)


def _short(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"[:200]
