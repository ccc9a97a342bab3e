"""Real data that any machine has: the standard library's sources, and scikit-learn's digits."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stability_probe.demo.model import ByteModel, DigitModel
from stability_probe.demo.schedule import Schedule
from stability_probe.errors import StabilityProbeError

Batch = tuple[Tensor, Tensor]

LENGTH = 64  # bytes a sequence
CHUNK = 4096  # bytes; every twentieth chunk is held out


class MissingExtraError(StabilityProbeError, ImportError):
    """An optional dependency is not installed."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained on, and how.

    Attributes:
        model: makes the model; its argument says whether with QK-norm.
        draw: a training batch, from the generator.
        evaluation: the fixed batch, held out from training.
        loss: of logits and targets, in nats.
        schedule: when the learning rate of W_q and W_k is raised.
    """

    model: Callable[[bool], nn.Module]
    draw: Callable[[torch.Generator], Batch]
    evaluation: Batch
    loss: Callable[[Tensor, Tensor], Tensor]
    schedule: Schedule


def load_task(name: str) -> Task:
    """The task "text" or "digits"."""
    return {"text": _text, "digits": _digits}[name]()


def corpus() -> Tensor:
    """The bytes of the standard library's top-level modules, in the order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def _text() -> Task:
    text = corpus()
    chunks = text[: len(text) // CHUNK * CHUNK].view(-1, CHUNK)
    held_out = torch.arange(len(chunks)) % 20 == 19
    train, evaluate = chunks[~held_out].flatten(), chunks[held_out].flatten()

    def windows(source: Tensor, count: int, generator: torch.Generator) -> Batch:
        starts = torch.randint(0, len(source) - LENGTH, (count, 1), generator=generator)
        window = source[starts + torch.arange(LENGTH + 1)]
        return window[:, :-1], window[:, 1:]

    return Task(
        model=lambda qk_norm: ByteModel(LENGTH, qk_norm=qk_norm),
        draw=lambda generator: windows(train, 16, generator),
        evaluation=windows(evaluate, 32, torch.Generator().manual_seed(7)),
        loss=lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten()),
        schedule=Schedule(start=600, ramp=300, hold=0, learning_rate=4e-3),
    )


def _digits() -> Task:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtraError(
            "got no scikit-learn, which the digits come with; expected the extra `demo`. "
            'Run: pip install "stability-probe[demo]", or choose --task text.'
        ) from error
    data = load_digits()
    order = torch.randperm(len(data.images), generator=torch.Generator().manual_seed(3))
    images = torch.tensor(data.images, dtype=torch.float32)[order] / 8 - 1
    labels = torch.tensor(data.target)[order]
    held_out = 200

    def draw(generator: torch.Generator) -> Batch:
        chosen = torch.randint(held_out, len(images), (32,), generator=generator)
        return images[chosen], labels[chosen]

    return Task(
        model=lambda qk_norm: DigitModel(qk_norm=qk_norm),
        draw=draw,
        evaluation=(images[:held_out], labels[:held_out]),
        loss=F.cross_entropy,
        schedule=Schedule(start=200, ramp=250, hold=50, learning_rate=3e-3),
    )
