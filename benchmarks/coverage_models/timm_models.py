"""Vision transformers of timm, one of each kind of attention."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .case import CannotBuildError, Case

MODELS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 2, "embed_dim": 48},
    "vit_base_patch16_rope_224": {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 3},
    "deit3_small_patch16_224": {"img_size": 64, "depth": 2, "embed_dim": 48},
    "beit_base_patch16_224": {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 3},
    "eva02_tiny_patch14_224": {"img_size": 56, "depth": 2, "embed_dim": 48},
    "swin_tiny_patch4_window7_224": {
        "img_size": 56, "embed_dim": 24, "depths": (1, 2), "num_heads": (2, 3)},
    "swinv2_tiny_window8_256": {
        "img_size": 64, "embed_dim": 24, "depths": (1, 2), "num_heads": (2, 3)},
    "swinv2_cr_tiny_224": {
        "img_size": 56, "embed_dim": 24, "depths": (1, 2), "num_heads": (2, 3)},
    "cait_xxs24_224": {"img_size": 64, "depth": 2, "embed_dim": 48},
    "xcit_nano_12_p16_224": {"img_size": 64, "depth": 2, "embed_dim": 48},
    "crossvit_tiny_240": {},
    "coat_tiny": {"img_size": 64},
    "convit_tiny": {"img_size": 64, "depth": 3, "embed_dim": 12},
    "levit_128s": {"img_size": 224},
    "pit_ti_224": {"img_size": 224},
    "pvt_v2_b0": {},
    "twins_svt_small": {"img_size": 224, "embed_dims": (16, 32, 64, 128), "depths": (1, 1, 1, 1)},
    "tnt_s_patch16_224": {"img_size": 64, "depth": 2, "embed_dim": 48},
    "mvitv2_tiny": {"img_size": 64},
    "davit_tiny": {"embed_dims": (24, 48), "depths": (1, 1), "num_heads": (2, 3)},
    "hiera_tiny_224": {},
    "mobilevit_xxs": {},
    "mobilevitv2_050": {},
    "nest_tiny": {"img_size": 224},
    "volo_d1_224": {"img_size": 224},
    "sam2_hiera_tiny": {"img_size": 256},
    "samvit_base_patch16": {"img_size": 128, "embed_dim": 48, "depth": 2, "num_heads": 3,
                            "global_attn_indexes": (1,), "window_size": 4},
    "vit_base_patch16_siglip_224": {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 3},
    "naflexvit_base_patch16_gap": {"depth": 2, "embed_dim": 48, "num_heads": 3},
}  # fmt: skip


def names() -> list[str]:
    """All of them."""
    return list(MODELS)


def cases(name: str) -> Iterator[Case]:
    """The named model, with timm's fused attention and without."""
    timm = _timm()

    def make(dropout: bool, fused: bool = True) -> nn.Module:
        timm.layers.set_fused_attn(fused)
        for extra in ({"attn_drop_rate": 0.1, "proj_drop_rate": 0.1}, {"drop_rate": 0.1}, {}):
            rates = {n: (v if dropout else 0.0) for n, v in extra.items()}
            try:
                model: nn.Module = timm.create_model(
                    name, pretrained=False, num_classes=10, **rates, **MODELS[name]
                )
                return model.train()
            except TypeError as error:
                last = error
        raise last

    try:
        model = make(True)
        size = MODELS[name].get("img_size") or model.default_cfg["input_size"][-1]
        x = torch.randn(2, 3, size, size)
        model(x).sum().backward()
    except Exception as error:
        raise CannotBuildError(f"{type(error).__name__}: {error}"[:300]) from error
    for fused in (True, False):
        yield Case(name, "fused" if fused else "eager", "timm",
                   lambda dropout, f=fused: make(dropout, f), {"x": x}, "images")  # type: ignore[misc]  # fmt: skip


def _timm() -> Any:
    """timm; where torchvision is not installed, with stand-ins for the names it imports.

    Nothing of torchvision takes part in these models: timm needs the names of a frozen
    normalisation to recognise it, of a tracer, and of image transforms.
    """
    stand_ins = _StandIns()
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(stand_ins)
    try:
        import timm
    except ImportError as error:
        raise CannotBuildError(f"import timm: {error}") from error
    finally:
        if stand_ins in sys.meta_path:  # other libraries must not take them for torchvision
            sys.meta_path.remove(stand_ins)
            for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
    return timm


class _StandIns:
    """Finds every module below `torchvision`, each empty but for classes made on demand."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        """The import system's question."""
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """An empty module."""
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: _stand_in(name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def _stand_in(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {"BILINEAR": 1, "BICUBIC": 2, "NEAREST": 0, "LANCZOS": 3, "HAMMING": 4,
                           "BOX": 5})  # fmt: skip
