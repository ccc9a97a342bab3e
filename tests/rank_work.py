"""What the processes of the distributed tests do; imported by each of them anew."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rank_models import (
    RowSharded,
    Stage,
    dropping_model,
    sharded_model,
    small_model,
    tensor_parallel,
)
from rank_tools import (
    Keeper,
    batches,
    blind,
    pooling,
    probe_model,
    train,
    until_pooling,
    until_told,
)
from tiny_models import Model, loss_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import stability_probe as sp
from stability_probe.ranks.schedule import LAG


def ddp(rank: int, world: int, folder: str, *, write: bool = False) -> dict[str, Any]:
    """Data parallel training, pooled from some step on."""
    model, keeper = small_model(), Keeper()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5)
    plan = sp.every(1, full_every=3)
    logdir = f"{folder}/run" if write else None
    probe = sp.watch(wrapped, logdir, plan=plan, sinks=[keeper], strict=True)

    weights: dict[int, dict[str, Tensor]] = {}  # that a step began with

    def step(number: int) -> None:
        weights[number] = {name: x.clone() for name, x in model.state_dict().items()}
        loss = loss_of(wrapped, batches(number, world)[rank])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        probe.step(loss=loss, grad_norm=torch.tensor(float(rank)))

    numbers = iter(range(1, 10000))
    first = until_pooling(probe, lambda: step(next(numbers))) + 1
    for _ in range(6):
        step(next(numbers))
    probe.close()
    return {
        "first": first,
        "records": keeper.plain(),
        "alerts": [a.to_dict() for a in probe.alerts],
        "logdir": probe.logdir,
        "weights": weights,
    }


def lost(rank: int, world: int, folder: str) -> dict[str, Any]:
    """All the ways for ranks to lose each other. Nothing here may hang."""
    told: dict[str, Any] = {}

    probe, keeper = pooling(small_model(), rank)  # rank 1 stops stepping and lives on
    if rank == 0:
        train(probe_model(probe), probe, rank, 20)
        told["stops"] = blind(probe)
        told["stopped records"] = len(keeper.records) == probe._step
    dist.barrier()
    probe.close()

    probe, keeper = pooling(small_model(), rank)  # the ranks count differently
    probe.step(step=probe._step + 1 + rank)
    for _ in range(2):
        dist.barrier()
        time.sleep(0.1)
        probe.step()
    probe.close()
    told["differ"] = blind(probe)

    probe = sp.watch(small_model(), strict=True)  # rank 0 alone steps
    if rank == 0:
        until_told(probe)
        told["steps alone"] = blind(probe)
    dist.barrier()
    probe.close()

    if rank == 0:  # rank 0 alone watches
        with sp.watch(small_model(), strict=True) as probe:
            train(probe_model(probe), probe, rank, 25)
        told["watches alone"] = blind(probe)
    dist.barrier()
    return told


def two(rank: int, world: int, folder: str) -> dict[str, Any]:
    """What two ranks are asked for, in one go: starting processes is what takes long."""
    told = {"ddp": ddp(rank, world, folder), "lost": lost(rank, world, folder)}
    torch.save(told, f"{folder}/{rank}.pt")
    return told | {"vanish": vanish(rank, world, folder)}


def vanish(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Rank 1 dies without a word while ranks pool."""
    probe, keeper = pooling(small_model(), rank)
    dist.barrier()
    if rank == 1:
        os._exit(0)
    time.sleep(0.5)
    train(probe_model(probe), probe, rank, 3)
    time.sleep(0.5)
    train(probe_model(probe), probe, rank, 3)
    probe.close()
    told = {"blind": blind(probe), "all": len(keeper.records) == probe._step}
    dist.distributed_c10d._get_default_group()  # the user's own is untouched
    return told


def of_users_groups() -> tuple[object, ...]:
    """What of the user's process groups a probe must not move."""
    group = dist.distributed_c10d._get_default_group()
    world = dist.distributed_c10d._world
    names = tuple(world.pg_names.values())
    return group._get_sequence_number_for_group(), world.group_count, names


WRAPPERS: dict[str, Callable[[Model], nn.Module]] = {
    "plain": DistributedDataParallel,
    "static graph": lambda m: DistributedDataParallel(m, static_graph=True),
    "unused": lambda m: DistributedDataParallel(m, find_unused_parameters=True),
    "FSDP2": fully_shard,
    "tensor parallel": lambda m: tensor_parallel(m, init_device_mesh("cpu", (2,))),
}
WATCHED = [
    *((name, "after") for name in WRAPPERS),  # watched after it was wrapped
    ("plain", "before"),
    ("FSDP2", "before"),
    ("plain", "rank 0"),  # which alone watches
]


def faithful(rank: int, world: int, folder: str) -> dict[str, Any]:
    """The same training without and with a probe, under every wrapper."""

    def one(wrapper: str, watch: str) -> dict[str, Any]:
        model = sharded_model() if wrapper == "tensor parallel" else dropping_model()
        keeper, probe = Keeper(), None
        options: dict[str, Any] = {"plan": sp.every(1), "sinks": [keeper], "strict": True}
        if watch == "before":
            probe = sp.watch(model, **options)
        wrapped = WRAPPERS[wrapper](model)
        if watch == "after" or (watch == "rank 0" and rank == 0):
            probe = sp.watch(wrapped, **options)
        torch.manual_seed(rank)
        groups = of_users_groups()
        losses = []
        for number in range(10):
            losses += train(wrapped, probe, rank, 1, at=number)
            time.sleep(0.05)
        moved = [b - a for a, b in zip(groups, of_users_groups(), strict=True) if a != b]
        if probe is not None:
            probe.close()
        return {
            "losses": losses,
            "weights": [local(p.detach()).clone() for p in wrapped.parameters()],
            "random": torch.get_rng_state(),
            "groups": moved,
            "records": keeper.plain(),
            "alerts": [] if probe is None else [a.message for a in probe.alerts],
        }

    return {
        (wrapper, how): [one(wrapper, watch) for watch in ("", how)] for wrapper, how in WATCHED
    }


def local(tensor: Tensor) -> Tensor:
    """The part of a parameter that lies here."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def unlike(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Ranks that hold different layers, see different things, or do different things."""
    scenes = (stages, idle, bad_on_one, marked_on_one, rows_cut, each_for_itself)
    return {scene.__name__: scene(rank, folder) for scene in scenes}


def together(steps: int, step: Callable[[int], object]) -> None:
    """Steps that no rank runs ahead in."""
    for number in range(steps):
        step(number)
        dist.barrier()
        time.sleep(0.02)


def stages(rank: int, folder: str) -> dict[str, Any]:
    """Each rank has another layer."""
    model = Stage(rank)
    probe, keeper = pooling(model, rank)
    together(3, lambda n: train(model, probe, rank, 1, at=n))
    probe.close()
    return {"layers": keeper.plain()[-1]["layers"], "blind": blind(probe)}


def idle(rank: int, folder: str) -> dict[str, Any]:
    """Rank 1 steps, and measures nothing."""
    model = small_model()
    probe, keeper = pooling(model, rank)
    start = probe._step + 1
    together(5, lambda n: probe.step() if rank else train(model, probe, rank, 1, at=n))
    probe.close()
    layers = [r["layers"] for r in keeper.plain() if r["step"] >= start]
    return {"layers": layers, "blind": blind(probe)}


def bad_on_one(rank: int, folder: str) -> dict[str, Any]:
    """Rank 1 has NaN at a step that is not measured."""
    model, keeper = small_model(), Keeper()
    with sp.watch(model, plan=sp.Plan(dense=0, every=5), sinks=[keeper]) as probe:
        until_pooling(probe, lambda: train(model, probe, rank, 1))
        while probe._step % 5 != 2:
            together(1, lambda n: train(model, probe, rank, 1))
        if rank == 1:
            with torch.no_grad():
                model.blocks[1].attention.qkv.weight[0] = float("nan")
        step = probe._step + 1
        together(1, lambda n: (loss_of(model, batches(0, 2)[rank]), probe.step()))
        if rank == 1:
            model.load_state_dict(small_model().state_dict())
        together(6, lambda n: train(model, probe, rank, 1))
    return {
        "step": step,
        "bad": {bad for r in keeper.plain() for bad in r["bad"]},
        "critical": [(a.rule, a.layer) for a in probe.alerts if a.severity == "critical"],
    }


def marked_on_one(rank: int, folder: str) -> dict[str, Any]:
    """Rank 0 alone begins a phase."""
    model, keeper = small_model(), Keeper()
    with sp.watch(model, plan=sp.Plan(dense=3, every=2), sinks=[keeper]) as probe:
        until_pooling(probe, lambda: train(model, probe, rank, 1))
        while probe._step < 6:  # past the dense steps of the run's start
            together(1, lambda n: train(model, probe, rank, 1))
        if rank == 0:
            probe.mark("only rank 0 says so")
        step = probe._step
        together(30, lambda n: train(model, probe, rank, 1))
    pooled = [
        (r["step"], {ranks for _, _, ranks, _ in r["layers"].values()})
        for r in keeper.plain()
        if r["level"] in ("default", "full") and r["step"] > step
    ]
    return {"pooled": pooled, "blind": blind(probe)}


def rows_cut(rank: int, folder: str) -> list[tuple[Any, ...]]:
    """The rows of each call are spread over the ranks."""
    model = Model(RowSharded())
    with sp.watch(model) as probe:
        for _ in range(4):
            loss_of(model, batches(0, 2)[0])
            probe.step()
    return [(a.rule, a.layer, a.message) for a in probe.alerts]


def each_for_itself(rank: int, folder: str) -> dict[str, Any]:
    """The ranks do not pool, and write."""
    model = small_model()
    with sp.watch(model, f"{folder}/own{rank}", pool=False, strict=True) as probe:
        together(4, lambda n: train(model, probe, rank, 1))
    run = sp.load(f"{folder}/own{rank}")
    seen = {(o.sequences, o.ranks) for r in run.records() for o in r.observations}
    return {"ranks": run.ranks, "steps": len(run.scalars), "seen": seen, "alerts": probe.alerts}


def four(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Four ranks: data parallel, then tensor parallel in two data parallel halves."""
    return {
        "ddp": ddp(rank, world, folder, write=True),
        "local": two_dimensional(rank, local=True),
        "distributed": two_dimensional(rank, local=False),
    }


EVERY, ESCALATION = 5, 6  # of the plan in `danger`


def danger(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Ranks that keep different time train one model; the logits of one of them take off."""
    model, keeper = small_model(), Keeper()
    wrapped = DistributedDataParallel(model)
    plan = sp.Plan(dense=0, every=EVERY, full_every=10**6, escalation=ESCALATION)
    clock = random.Random(rank)

    def step() -> None:
        time.sleep(clock.uniform(0, 0.004) + 0.004 * (rank == 3))
        loss_of(wrapped, batches(0, world)[rank]).backward()
        probe.step()

    with sp.watch(wrapped, plan=plan, sinks=[keeper], rules=[], strict=True) as probe:
        first = until_pooling(probe, step) + 1
        while probe._step < first + LAG + 20 or probe._step % EVERY:
            step()
        if rank == 2:  # from a step on that is not measured: the next one that is shows it
            with torch.no_grad():
                model.blocks[0].attention.qkv.weight.mul_(12.0)
        hot = probe._step + 1
        while probe._step < hot + LAG + 60:
            step()
    return {"records": keeper.plain(), "first": first, "hot": hot, "blind": blind(probe)}


def two_dimensional(rank: int, *, local: bool) -> dict[str, Any]:
    """FSDP2 over two halves, each of which shares the heads; the weights stay as they are."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "heads"))
    model = fully_shard(
        tensor_parallel(sharded_model(fused=local), mesh["heads"], local=local),
        mesh=mesh["data"],
    )
    keeper = Keeper()
    probe = sp.watch(model, plan=sp.every(1, full_every=1), sinks=[keeper], strict=True)
    numbers = iter(range(10_000))

    def step() -> None:
        loss = loss_of(model, batches(next(numbers), 2)[rank // 2])
        loss.backward()
        model.zero_grad()
        probe.step(loss=loss)

    first = until_pooling(probe, step) + 1
    for _ in range(3):
        step()
    probe.close()
    return {"first": first, "records": keeper.plain(), "alerts": [a.message for a in probe.alerts]}
