"""What watching costs: a training step of one block, unwatched, unmeasured and measured.

    python benchmarks/overhead.py [--length 512] [--rounds 15] [--dtype bfloat16] [--parts] [--json]

The three kinds of step are interleaved in one process, in a random order each round, on one
thread, in CPU time of that thread. Printed are the medians over rounds of the ratio to the
unwatched step of the same round. CPU time is less disturbed by other programs than wall time is,
but not undisturbed.

With `--parts` only unmeasured steps are made, and the CPU time inside the sentinel's own functions
is summed and divided by that of the step: shares too small to be told from noise as a ratio of two
steps.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stability_probe as sp
from stability_probe import meter
from stability_probe.capture.gradients import Gradients
from stability_probe.records import Level
from stability_probe.remedies import Attention

WIDTH, HEADS, BATCH = 512, 8, 4


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(WIDTH, HEADS, causal=True)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] to [B, T, C]."""
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Lane:
    """A block with its optimizer, watched at a fixed level or not at all."""

    def __init__(self, level: Level | None) -> None:
        torch.manual_seed(0)
        self.block = Block()
        self.optimizer = torch.optim.AdamW(self.block.parameters(), lr=1e-4, fused=True)
        self.level = level
        self.probe = None if level is None else sp.watch(self.block, strict=True)

    def step(self, x: Tensor, target: Tensor) -> float:
        """One training step; its CPU time in seconds."""
        if self.probe is not None and self.level is not None:
            self.probe._meter.level = self.level
        start = time.thread_time()
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.block(x), target)
        loss.backward()
        self.optimizer.step()
        if self.probe is not None:
            self.probe.step(loss=loss)
        return time.thread_time() - start


def measure(length: int, rounds: int) -> dict[str, float]:
    """Median ratio to the unwatched step, by kind of step."""
    torch.set_num_threads(1)
    lanes = {"unwatched": Lane(None)} | {level.value: Lane(level) for level in Level}
    x, target = (torch.randn(BATCH, length, WIDTH) for _ in range(2))
    order = list(lanes)
    ratios: dict[str, list[float]] = {name: [] for name in lanes if name != "unwatched"}
    for turn in range(rounds + 2):  # the first two warm up
        random.shuffle(order)
        took = {name: lanes[name].step(x, target) for name in order}
        if turn >= 2:
            for name in ratios:
                ratios[name].append(took[name] / took["unwatched"])
    for lane in lanes.values():
        if lane.probe is not None:
            lane.probe.close()
    return {name: statistics.median(values) for name, values in ratios.items()}


PARTS = {
    "forward reductions": (meter, "call_witness"),
    "setting gradient hooks": (Gradients, "watch"),
    "gradient reductions": (Gradients, "take"),
    "end of the step": (meter.Meter, "drain"),
}


def parts(length: int, rounds: int, dtype: torch.dtype) -> dict[str, float]:
    """Median share of an unmeasured step, by part of the sentinel."""
    torch.set_num_threads(1)
    spent = dict.fromkeys(PARTS, 0.0)
    for name, (owner, attribute) in PARTS.items():
        setattr(owner, attribute, timed(getattr(owner, attribute), spent, name))
    lane = Lane(Level.SENTINEL)
    x, target = (torch.randn(BATCH, length, WIDTH, dtype=dtype) for _ in range(2))
    lane.block.to(dtype)
    shares: dict[str, list[float]] = {name: [] for name in PARTS}
    for turn in range(rounds + 2):
        spent.update(dict.fromkeys(PARTS, 0.0))
        took = lane.step(x, target)
        if turn >= 2:
            for name in PARTS:
                shares[name].append(spent[name] / took)
    if lane.probe is not None:
        lane.probe.close()
    return {name: statistics.median(values) for name, values in shares.items()}


def timed(
    function: Callable[..., object], spent: dict[str, float], name: str
) -> Callable[..., object]:
    """The function, with the CPU time inside it summed under a name."""

    def call(*args: object, **kwargs: object) -> object:
        start = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent[name] += time.thread_time() - start

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", default="float32", help="with --parts")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.parts:
        shares = parts(arguments.length, arguments.rounds, getattr(torch, arguments.dtype))
        print(f"unmeasured step of a block, {arguments.dtype}, B={BATCH}, T={arguments.length}")
        for name, share in {**shares, "all": sum(shares.values())}.items():
            print(f"  {name:24} {100 * share:5.2f} % of the step")
        return
    found = measure(arguments.length, arguments.rounds)
    if arguments.json:
        print(json.dumps({"length": arguments.length, **found}))
        return
    default = 0.9 * (found["sentinel"] - 1) + 0.1 * (found["default"] - 1)
    print(f"training step of a block, d={WIDTH}, {HEADS} heads, B={BATCH}, T={arguments.length}")
    for name, ratio in found.items():
        print(f"  {name:9} step: {100 * (ratio - 1):6.2f} % over the unwatched step")
    print(f"  default plan, every 10: {100 * default:.2f} %")


if __name__ == "__main__":
    main()
