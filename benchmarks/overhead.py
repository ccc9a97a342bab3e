"""What watching costs: a training step of one block, unwatched, and watched at each level.

    python benchmarks/overhead.py [--only REGEX] [--quick] [--rounds N] [--json FILE] [--write]
    python benchmarks/overhead.py --parts [--only REGEX]

All kinds of step are interleaved in one process, each round in a random order and then in the
reverse of it. Compared are a second unwatched block (how far from 1 is noise), one lane for each
level, and the default plan as it really runs once its dense phase is over. On one thread it is CPU
time of that thread, which other programs disturb less than wall time; on more it is wall time.

Levels are medians over rounds of the ratio to the unwatched step of the same round. The plan is
the ratio of sums over whole tens of steps, as a mean and its standard error: the steps it
measures are in it as often as they come.

With `--parts` the CPU time inside all that the probe does is summed and divided by that of the
step: shares too small to be told from noise as a ratio of two steps. What is not in it: torch's
own dispatch to the probe's mode for calls that are not read, a few microseconds each.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from conditions import conditions, put, sentence
from torch import Tensor, nn

import stability_probe as sp
from stability_probe.capture.functions import AttentionMode
from stability_probe.capture.gradients import GradientHook, Gradients
from stability_probe.capture.hooks import BeginHook, EndHook, EnterHook, LeaveHook
from stability_probe.records import Level
from stability_probe.remedies import Attention

WIDTH, HEADS, BATCH = 512, 8, 4
TEN = 10  # steps of the default plan from one measured step to the next


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


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of training step."""

    length: int
    dtype: str = "float32"  # bfloat16: autocast
    threads: int = 1

    @property
    def name(self) -> str:
        """In words."""
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"T={self.length}, {self.dtype}, {threads}"

    @property
    def clock(self) -> Callable[[], float]:
        """CPU time of the thread, or wall time where there are more."""
        return time.thread_time if self.threads == 1 else time.perf_counter


CASES = tuple(Case(T, d, n) for n in (1, 2) for T in (512, 1024) for d in ("float32", "bfloat16"))


class Lane:
    """A block with its optimizer: not watched, at one level, or under the default plan."""

    def __init__(self, case: Case, watch: Level | sp.Plan | None) -> None:
        torch.manual_seed(0)
        self.block = Block()
        self.optimizer = torch.optim.AdamW(self.block.parameters(), lr=1e-4, fused=True)
        self.case, self.level = case, watch if isinstance(watch, Level) else None
        plan = watch if isinstance(watch, sp.Plan) else None
        self.probe = None if watch is None else sp.watch(self.block, plan=plan, strict=True)

    def step(self, x: Tensor, target: Tensor) -> float:
        """One training step; its time in seconds."""
        if self.probe is not None and self.level is not None:
            self.probe._meter.level = self.level
        start = self.case.clock()
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.case.dtype == "bfloat16"):
            loss = F.mse_loss(self.block(x), target)
        loss.backward()
        self.optimizer.step()
        if self.probe is not None:
            self.probe.step(loss=loss)
        return self.case.clock() - start

    def close(self) -> None:
        """Ends the watch."""
        if self.probe is not None:
            self.probe.close()


def batch(case: Case) -> tuple[Tensor, Tensor]:
    """An input and a target."""
    torch.set_num_threads(case.threads)
    x, target = (torch.randn(BATCH, case.length, WIDTH) for _ in range(2))
    return x, target


def levels(case: Case, rounds: int) -> dict[str, dict[str, float]]:
    """Median ratio to the unwatched step and its quartiles, by kind of step."""
    lanes = {"unwatched": Lane(case, None), "unwatched again": Lane(case, None)}
    lanes |= {level.value: Lane(case, level) for level in Level}
    data = batch(case)
    ratios: dict[str, list[float]] = {name: [] for name in lanes if name != "unwatched"}
    for turn in range(rounds + 2):  # the first two warm up
        order = random.sample(list(lanes), len(lanes))
        took = {name: lanes[name].step(*data) for name in order}
        for name in reversed(order):
            took[name] += lanes[name].step(*data)
        if turn >= 2:
            for name, values in ratios.items():
                values.append(took[name] / took["unwatched"])
    for lane in lanes.values():
        lane.close()
    return {name: _spread(values) for name, values in ratios.items()}


def _spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "low": low, "high": high}


def plan(case: Case, tens: int) -> dict[str, float]:
    """The default plan after its dense phase: ratio of sums over each ten steps."""
    watched, free = Lane(case, sp.Plan(dense=0)), Lane(case, None)
    data = batch(case)
    ratios = []
    for turn in range(tens + 1):  # the first ten warm up
        sums = {watched: 0.0, free: 0.0}
        for _ in range(TEN):
            for lane in random.sample([watched, free], 2):
                sums[lane] += lane.step(*data)
        if turn:
            ratios.append(sums[watched] / sums[free])
    watched.close()
    error = statistics.stdev(ratios) / len(ratios) ** 0.5 if tens > 1 else float("nan")
    return {"steps": TEN * tens, "mean": statistics.mean(ratios), "error": error}


PARTS: dict[str, tuple[tuple[type, str], ...]] = {
    "scope of the modules": tuple(
        (hook, "__call__") for hook in (BeginHook, EnterHook, LeaveHook, EndHook)
    ),
    "reading the calls": ((AttentionMode, "read"),),
    "of it: gradient hooks set": ((Gradients, "watch"),),
    "gradients": ((GradientHook, "__call__"),),
    "end of the step": ((sp.Probe, "step"),),
}


def parts(case: Case, rounds: int, level: Level) -> dict[str, float]:
    """Median share of a step at a level, by part of the probe's work."""
    spent = dict.fromkeys(PARTS, 0.0)
    kept = [(owner, name, getattr(owner, name)) for part in PARTS.values() for owner, name in part]
    for part, places in PARTS.items():
        for owner, name in places:
            setattr(owner, name, timed(getattr(owner, name), spent, part))
    lane, data = Lane(case, level), batch(case)
    shares: dict[str, list[float]] = {name: [] for name in PARTS}
    for turn in range(rounds + 4):  # the layers are found in the first steps
        spent.update(dict.fromkeys(PARTS, 0.0))
        took = lane.step(*data)
        if turn >= 4:
            for name, values in shares.items():
                values.append(spent[name] / took)
    lane.close()
    for owner, name, function in kept:
        setattr(owner, name, function)
    found = {name: statistics.median(values) for name, values in shares.items()}
    return {**found, "all": sum(v for name, v in found.items() if not name.startswith("of it"))}


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


def measured(case: Case, rounds: int, tens: int) -> dict[str, Any]:
    """All numbers of one case."""
    found: dict[str, Any] = {"name": case.name, "case": asdict(case), "rounds": rounds}
    found["levels"], found["plan"] = levels(case, rounds), plan(case, tens)
    if case.threads == 1:
        found["parts"] = {level.value: parts(case, rounds, level) for level in Level}
    return found


def table(found: dict[str, Any]) -> str:
    """The results as docs/performance.md shows them: percent over the unwatched step."""
    kinds = ["unwatched again", *(level.value for level in Level)]
    heads = ["unwatched again", *(f"{level.value} step" for level in Level)]
    cells = [f"{head} | its parts" for head in heads[1:]]
    rows = [
        sentence(found["conditions"]),
        "",
        f"| training step | {heads[0]} | {' | '.join(cells)} | default plan |",
        "|---" * (2 * len(kinds) + 1) + "|",
    ]
    for result in found["cases"]:
        row = [_percent(result["levels"][kinds[0]])]
        for kind in kinds[1:]:
            share = result.get("parts", {}).get(kind)
            row += [_percent(result["levels"][kind])]
            row += ["-" if share is None else f"{100 * share['all']:.2f} %"]
        known = result["plan"]
        row.append(f"{100 * (known['mean'] - 1):.2f} +- {100 * known['error']:.2f} %")
        rows.append(f"| {result['name']} | {' | '.join(row)} |")
    return "\n".join(rows)


def _percent(spread: dict[str, float]) -> str:
    low, middle, high = (100 * (spread[name] - 1) for name in ("low", "median", "high"))
    return f"{middle:.1f} % ({low:.1f} to {high:.1f})"


def print_parts(case: Case, rounds: int) -> None:
    for level in Level:
        print(f"{level.value} step, {case.name}")
        for name, share in parts(case, rounds, level).items():
            print(f"  {name:26} {100 * share:5.2f} % of the step")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="a regular expression over the kinds of step")
    parser.add_argument("--quick", action="store_true", help="T=512, float32, one thread")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tens", type=int, default=10, help="tens of steps under the plan")
    parser.add_argument("--parts", action="store_true", help="shares of the probe's parts alone")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--no-run", action="store_true", help="take what --json holds")
    parser.add_argument("--write", action="store_true", help="put the table into the document")
    arguments = parser.parse_args()
    chosen = CASES[:1] if arguments.quick else CASES
    chosen = tuple(case for case in chosen if re.search(arguments.only, case.name))
    if arguments.parts:
        for case in chosen:
            print_parts(case, arguments.rounds)
        return
    if arguments.no_run:
        found = json.loads(arguments.json.read_text())
    else:
        found = {"conditions": conditions(), "cases": []}
        for case in chosen:
            found["cases"].append(measured(case, arguments.rounds, arguments.tens))
            print(json.dumps(found["cases"][-1]), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1))
    print(table(found))
    if arguments.write:
        put("overhead", table(found))


if __name__ == "__main__":
    main()
