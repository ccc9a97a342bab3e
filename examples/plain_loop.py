"""Watch your own loop: the lines marked `probe` are all that is added.

    python examples/plain_loop.py [--steps N] [--logdir DIR]

A two-layer encoder learns which of two bytes is more frequent in a line of this very file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stability_probe as sp  # probe


class Classifier(nn.Module):
    """Bytes [B, T] to two logits [B, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(32, 2)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(text)).mean(1))


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    """Random windows of this file, labelled by whether "e" outnumbers "t"."""
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    starts = torch.randint(0, len(text) - 32, (steps, 16))
    windows = text[starts.unsqueeze(-1) + torch.arange(32)]
    labels = (windows == ord("e")).sum(-1) > (windows == ord("t")).sum(-1)
    return list(zip(windows, labels.long(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--logdir", type=Path, default=None)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with sp.watch(model, arguments.logdir, optimizer=optimizer) as probe:  # probe
        for text, label in batches(arguments.steps):
            loss = F.cross_entropy(model(text), label)
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            probe.step(loss=loss, grad_norm=norm)  # probe
    for site in probe.coverage:
        print(f"{site.layer}: {site.heads} heads, verified against {site.verified}")
    print(probe.frame().groupby("layer", observed=True).entropy_ratio.last())
    print(f"final loss {loss.item():.3f}, {len(probe.alerts)} alerts")


if __name__ == "__main__":
    main()
