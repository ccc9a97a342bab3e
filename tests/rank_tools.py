"""Tools for tests that run in several gloo processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tiny_models import loss_of
from torch import Tensor, nn

import stability_probe as sp
from stability_probe.records import StepRecord
from stability_probe.sinks import Event

Work = Callable[[int, int, str], Any]


class Keeper:
    """A sink that keeps the records."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, StepRecord):
            self.records.append(event)

    def close(self) -> None:
        pass

    def plain(self) -> list[dict[str, Any]]:
        """The records as what a file can hold."""
        return [
            {
                "step": r.step,
                "level": str(r.level),
                "loss": r.scalars.loss,
                "grad_norm": r.scalars.grad_norm,
                "bad": [(b.layer, b.tensor, b.step) for b in r.scalars.first_bad],
                "layers": {
                    o.layer: (o.layer_index, o.sequences, o.ranks, dict(o.values))
                    for o in r.observations
                },
            }
            for r in self.records
        ]


def _enter(rank: int, work: Work, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    torch.save(work(rank, world, folder), f"{folder}/{rank}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


def run(work: Work, world: int, folder: Path) -> list[Any]:
    """What `work(rank, world, folder)` returned on each of `world` gloo processes."""
    folder.mkdir(parents=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    mp.spawn(_enter, args=(work, world, str(folder)), nprocs=world)
    found = (folder / f"{rank}.pt" for rank in range(world))
    return [torch.load(path, weights_only=False) if path.exists() else None for path in found]


def batches(step: int, world: int) -> list[Tensor]:
    """The shares of each rank of the global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    return list(torch.randint(0, 50, (2 * world, 12), generator=generator).split(2))


def until_pooling(probe: sp.Probe, step: Callable[[], object], *, limit: float = 30.0) -> int:
    """Steps until every rank pools; how many steps that took. Ranks must step together."""
    end, steps = time.monotonic() + limit, 0
    while True:
        step()
        steps += 1
        ready = torch.tensor([float(probe._pool.due)])
        dist.all_reduce(ready, dist.ReduceOp.MIN)
        if ready.item() == 1:
            return steps
        time.sleep(0.02)
        if time.monotonic() > end:
            raise TimeoutError(f"the ranks did not meet in {limit} s: {probe.alerts}")


def train(model: nn.Module, probe: sp.Probe | None, rank: int, steps: int, *, at: int = 1) -> Any:
    """Plain steps; the losses, one a step."""
    world, losses = dist.get_world_size(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(at, at + steps):
        loss = loss_of(model, batches(number, world)[rank])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if probe is not None:
            probe.step(loss=loss)
    return losses


def blind(probe: sp.Probe) -> list[str]:
    """What the probe said of its own blindness."""
    return [a.message for a in probe.alerts if a.rule == "blind"]


def pooling(model: nn.Module, rank: int, **options: Any) -> tuple[sp.Probe, Keeper]:
    """A probe that pools, after some training."""
    keeper = Keeper()
    probe = sp.watch(model, plan=sp.every(1), sinks=[keeper], strict=True, **options)
    numbers = iter(range(10_000))
    until_pooling(probe, lambda: train(model, probe, rank, 1, at=next(numbers)))
    return probe, keeper


def probe_model(probe: sp.Probe) -> nn.Module:
    """The model that a probe watches."""
    return probe._attachment._model


def until_told(probe: sp.Probe) -> None:
    """Steps until the probe says that it is alone."""
    end = time.monotonic() + 30
    while not blind(probe) and time.monotonic() < end:
        train(probe_model(probe), probe, 0, 5)
        time.sleep(0.05)
