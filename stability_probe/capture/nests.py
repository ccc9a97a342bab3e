"""The tensors in what functions are given and give back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in a value, through lists, tuples and the values of mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
