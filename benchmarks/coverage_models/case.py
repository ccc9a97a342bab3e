"""What the sweep trains: a model that can be made again, its inputs and its loss."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class CannotBuildError(Exception):
    """The model cannot be made or run here; the message says why."""


@dataclass(frozen=True)
class Case:
    """One model in one attention implementation.

    `make(dropout)` builds it in train mode; without dropout every dropout in it is zero.
    """

    name: str
    implementation: str
    model_class: str
    make: Callable[[bool], nn.Module]
    inputs: dict[str, Any]
    fed: str  # which inputs, in a word
    has_dropout: bool = True

    def loss(self, model: nn.Module) -> Tensor:
        """The model's own loss, or the mean of a fixed random projection of its outputs."""
        out = model(**{n: copied(v) for n, v in self.inputs.items()})
        own = getattr(out, "loss", None)
        return own.mean() if isinstance(own, Tensor) and own.requires_grad else surrogate(out)


def seed(number: int) -> None:
    """Seeds every global source of randomness that a model may draw from."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def copied(value: Any) -> Any:
    """Inputs are given as copies: some models write into them."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, list | tuple):
        return type(value)(copied(v) for v in value)
    return value


def surrogate(out: Any) -> Tensor:
    """A loss for models that have none: fixed random weights over all outputs with gradients."""
    found = [t for t in _tensors(out) if t.requires_grad and t.is_floating_point() and t.numel()]
    if not found:
        raise CannotBuildError("no output has a gradient")
    generator = torch.Generator().manual_seed(1)
    terms = []
    for tensor in found:
        width = tensor.shape[-1] if tensor.dim() else 1
        weights = torch.randn(width, generator=generator).to(tensor.dtype)
        finite = torch.where(torch.isfinite(tensor), tensor, 0.0)
        terms.append((finite * weights).float().mean())
    return torch.stack(terms).sum()


def _tensors(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, dict):
        for value in out.values():
            yield from _tensors(value)
    elif isinstance(out, list | tuple):
        for value in out:
            yield from _tensors(value)
    elif hasattr(out, "to_tuple"):
        yield from _tensors(out.to_tuple())
    elif hasattr(out, "sample"):
        yield from _tensors(out.sample)
