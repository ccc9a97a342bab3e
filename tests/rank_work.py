"""What the processes of the distributed tests do; imported by each of them anew."""

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
import torch.nn.functional as F
from tiny_models import HEADS, WIDTH, Attention, Model, loss_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

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


def small_model() -> Model:
    torch.manual_seed(0)
    return Model(Attention("sdpa"), Attention("torch.softmax"))


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


def probe_model(probe: sp.Probe) -> nn.Module:
    """The model that a probe watches."""
    return probe._attachment._model


def until_told(probe: sp.Probe) -> None:
    """Steps until the probe says that it is alone."""
    end = time.monotonic() + 30
    while not blind(probe) and time.monotonic() < end:
        train(probe_model(probe), probe, 0, 5)
        time.sleep(0.05)


class Sharded(nn.Module):
    """Causal self-attention with projections of their own, which tensor parallelism can cut."""

    def __init__(self, *, fused: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (
            p(x).view(b, t, -1, WIDTH // HEADS).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:  # distributed tensors have no fused attention on a CPU
            y = torch.softmax(q @ k.mT * (WIDTH // HEADS) ** -0.5, dim=-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, -1))


def sharded_model(*, fused: bool = True) -> Model:
    """Two layers of `Sharded`, their scores not too small."""
    torch.manual_seed(0)
    model = Model(Sharded(fused=fused), Sharded(fused=fused))
    with torch.no_grad():
        for block in model.blocks:
            block.attention.q.weight.mul_(4)
    return model


def tensor_parallel(model: Model, mesh: DeviceMesh, *, local: bool = True) -> Model:
    """Cuts the heads of every layer over the ranks of a mesh."""
    cut = ColwiseParallel(use_local_output=local)
    for block in model.blocks:
        plan = {"q": cut, "k": cut, "v": cut, "out": RowwiseParallel()}
        parallelize_module(block.attention, mesh, plan)
    return model


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


def dropping_model() -> Model:
    torch.manual_seed(0)
    return Model(Attention("sdpa", 0.1), Attention("torch.softmax", 0.1))


def local(tensor: Tensor) -> Tensor:
    """The part of a parameter that lies here."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Stage(nn.Module):
    """One block of a model that is cut in stages; it keeps its name."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)
        self.blocks = nn.ModuleDict({str(number): Attention("sdpa")})

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks.values():
            x = x + block(x)
        return self.head(x)


class RowSharded(nn.Module):
    """Attention whose rows are cut over ranks, as context parallelism does."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, HEADS, -1).transpose(1, 2)
        mesh = init_device_mesh("cpu", (2,))
        part = q.chunk(2, dim=2)[dist.get_rank()].contiguous()
        k = DTensor.from_local(q, mesh, [Replicate()])
        q = DTensor.from_local(part, mesh, [Shard(2)])
        y = (torch.softmax(q @ k.mT, dim=-1) @ k).full_tensor()  # fused is slow to dispatch
        return y.transpose(1, 2).reshape(b, t, -1)


def unlike(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Ranks that hold different layers, see different things, or do different things."""
    told: dict[str, Any] = {}

    def together(probe: sp.Probe, steps: int, rank_steps: Callable[[int], object]) -> None:
        for number in range(steps):
            rank_steps(number)
            dist.barrier()
            time.sleep(0.02)

    model = Stage(rank)
    probe, keeper = pooling(model, rank)
    together(probe, 3, lambda n: train(model, probe, rank, 1, at=n))
    probe.close()
    told["stages"] = keeper.plain()[-1]["layers"]
    told["stages blind"] = blind(probe)

    model = small_model()
    probe, keeper = pooling(model, rank)
    start = probe._step + 1
    together(probe, 5, lambda n: probe.step() if rank else train(model, probe, rank, 1, at=n))
    probe.close()
    told["idle"] = [r["layers"] for r in keeper.plain() if r["step"] >= start]
    told["idle blind"] = blind(probe)

    model = small_model()
    with sp.watch(model, plan=sp.Plan(dense=0, every=5), sinks=[keeper := Keeper()]) as probe:
        until_pooling(probe, lambda: train(model, probe, rank, 1))
        while probe._step % 5 != 2:
            together(probe, 1, lambda n: train(model, probe, rank, 1))
        if rank == 1:
            with torch.no_grad():
                model.blocks[1].attention.qkv.weight[0] = float("nan")
        told["bad step"] = probe._step + 1
        together(probe, 1, lambda n: loss_of(model, batches(0, 2)[rank]) and probe.step())
        if rank == 1:
            model.load_state_dict(small_model().state_dict())
        together(probe, 6, lambda n: train(model, probe, rank, 1))
    told["bad"] = {bad for r in keeper.plain() for bad in r["bad"]}
    told["bad alerts"] = [(a.rule, a.layer) for a in probe.alerts if a.severity == "critical"]

    model = small_model()
    with sp.watch(model, plan=sp.Plan(dense=3, every=2), sinks=[keeper := Keeper()]) as probe:
        until_pooling(probe, lambda: train(model, probe, rank, 1))
        while probe._step < 6:  # past the dense steps of the run's start
            together(probe, 1, lambda n: train(model, probe, rank, 1))
        if rank == 0:
            probe.mark("only rank 0 says so")
        told["mark"] = probe._step
        together(probe, 30, lambda n: train(model, probe, rank, 1))
    told["marked"] = [
        (r["step"], {ranks for _, _, ranks, _ in r["layers"].values()})
        for r in keeper.plain()
        if r["layers"] and r["step"] > told["mark"]
    ]
    told["mark blind"] = blind(probe)

    model = Model(RowSharded())
    with sp.watch(model) as probe:
        for _ in range(4):
            loss_of(model, batches(0, 2)[0])
            probe.step()
    told["rows cut"] = [(a.rule, a.layer, a.message) for a in probe.alerts]
    return told


def four(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Four ranks: data parallel, then tensor parallel in two data parallel halves."""
    return {
        "ddp": ddp(rank, world, folder, write=True),
        "local": two_dimensional(rank, local=True),
        "distributed": two_dimensional(rank, local=False),
    }


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
