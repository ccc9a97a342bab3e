"""What pooling over ranks costs: bytes and time of one pooled step.

    python benchmarks/pooling.py [--ranks 2,4,8] [--layers 48] [--heads 32] [--rounds 30] [--json]

Processes on this machine, connected by gloo over the loopback interface, send what a model of so
many layers and heads sends. Printed are bytes, the medians of the time to pack and to unpack (CPU
time, one thread), and the median and the best of the time from the start of the collective to its
result, all ranks starting together. Where there are more processes than cores, that time is the
scheduler's more than the network's. From two sizes of message follow the two constants of the
model in `docs/performance.md`: time a hop, and time a byte.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from stability_probe.handover import HeadBlock
from stability_probe.plan import Plan
from stability_probe.ranks.channel import Channel
from stability_probe.ranks.layout import Hello, LocalLayer, unite
from stability_probe.ranks.packing import Contribution, pack, unpack
from stability_probe.ranks.reduced import Reduced
from stability_probe.records import StepScalars
from stability_probe.stats.accumulators import MAXIMA, MINIMA, PEAK, SUMS

WIDTH = len(MAXIMA) + len(MINIMA) + len(PEAK)


def contribution(layers: int, heads: int) -> Contribution:
    """One rank's measured step, of random numbers."""
    generator = np.random.default_rng(0)
    blocks = tuple(HeadBlock(f"layers.{i}", heads, 0, heads, 8) for i in range(layers))
    extrema = generator.normal(size=(WIDTH, layers * heads)).astype(np.float32)
    sums = generator.uniform(1, 1e6, size=(len(SUMS), layers * heads))
    return Contribution(1, 1, full=True, numbers={"loss": 2.0}, parts=[(blocks, extrema, sums)])


def layout_of(layers: int, heads: int) -> Any:
    names = [LocalLayer(f"layers.{i}", heads, 0, heads) for i in range(layers)]
    return unite([Hello.of(names, Plan(), 1)])


def timed(work: Any, rounds: int) -> list[float]:
    took = []
    for _ in range(rounds):
        start = time.thread_time()
        work()
        took.append(time.thread_time() - start)
    return took


def one_rank(rank: int, world: int, folder: str, sizes: list[tuple[int, int]], rounds: int) -> None:
    """Times reductions of each size, and leaves them in a file."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    channel = Channel(dist.FileStore(f"{folder}/store", world), rank, world)
    channel.largest(rank)
    told: dict[str, Any] = {"connect": time.perf_counter() - start, "seconds": []}
    for layers, heads in sizes:
        layout, given = layout_of(layers, heads), contribution(layers, heads)
        took = []
        for _ in range(rounds):
            arrays = pack(layout, given)
            channel.largest(0)  # a barrier
            start = time.perf_counter()
            pending = channel.reduce(*arrays)
            pending.result()
            took.append(time.perf_counter() - start)
        told["seconds"].append(took)
    channel.largest(0)
    channel.close()
    with open(f"{folder}/{rank}.json", "w") as file:  # noqa: PTH123
        json.dump(told, file)


def many_ranks(world: int, sizes: list[tuple[int, int]], rounds: int) -> dict[str, Any]:
    """Medians and bests over rounds, of the slowest rank of each round, by size."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(one_rank, args=(world, folder, sizes, rounds), nprocs=world)
        ranks = [json.loads(open(f"{folder}/{r}.json").read()) for r in range(world)]  # noqa: PTH123, SIM115
    slowest = [np.max([r["seconds"][i] for r in ranks], axis=0) for i in range(len(sizes))]
    return {
        "connect_ms": 1e3 * max(r["connect"] for r in ranks),
        "median_ms": [1e3 * float(np.median(s)) for s in slowest],
        "best_ms": [1e3 * float(s.min()) for s in slowest],
    }


def alone(layers: int, heads: int, rounds: int) -> dict[str, float]:
    """Bytes of a pooled step, and the medians of what a rank does by itself."""
    layout, given = layout_of(layers, heads), contribution(layers, heads)
    ints, floats = pack(layout, given)
    merged = unpack(layout, ints, floats)

    def record() -> object:
        return Reduced.of(layout, merged).record(StepScalars(1))

    columns = layers * heads
    return {
        "bytes": ints.nbytes + floats.nbytes,
        "max_bytes": ints.nbytes,
        "sum_bytes": floats.nbytes,
        "from_device_bytes": columns * (4 * WIDTH + 8 * len(SUMS)),
        "pack_ms": 1e3 * statistics.median(timed(lambda: pack(layout, given), rounds)),
        "unpack_ms": 1e3 * statistics.median(timed(lambda: unpack(layout, ints, floats), rounds)),
        "record_ms": 1e3 * statistics.median(timed(record, rounds)),
    }


def fit(world: int, bytes_of: list[float], best_ms: list[float]) -> dict[str, float]:
    """The model's two constants, from the smallest and the largest message."""
    hops = 2 * (world - 1)  # of a ring: reduce-scatter, then all-gather; both rings at once
    share = 2 * (world - 1) / world
    per_byte = (best_ms[-1] - best_ms[0]) / (share * (bytes_of[-1] - bytes_of[0]))
    per_hop = (best_ms[0] - per_byte * share * bytes_of[0]) / hops
    return {"microseconds_a_hop": 1e3 * per_hop, "nanoseconds_a_byte": 1e6 * per_byte}


def modelled(size: float, hop_us: float, byte_ns: float) -> dict[int, float]:
    """Milliseconds of a pooled step of so many bytes, by number of ranks, in a ring."""
    return {
        n: 2 * (n - 1) * hop_us / 1e3 + 2 * (n - 1) / n * size * byte_ns / 1e6
        for n in (8, 64, 512, 4096)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes = [(1, 1), (arguments.layers, arguments.heads)]
    found: dict[str, Any] = {"one": alone(*sizes[-1], arguments.rounds)}
    bytes_of = [alone(*size, 1)["bytes"] for size in sizes]
    for world in map(int, arguments.ranks.split(",")):
        seen = many_ranks(world, sizes, arguments.rounds)
        found[str(world)] = seen | fit(world, bytes_of, seen["best_ms"])
    size = found["one"]["bytes"]
    for hop_us in (20.0, 50.0, 1000.0):
        found[f"model, {hop_us:.0f} us a hop"] = {
            f"{n} ranks": ms for n, ms in modelled(size, hop_us, 0.8).items()
        }
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"{arguments.layers} layers of {arguments.heads} heads; small message: one head")
    for name, value in found.pop("one").items():
        print(f"  {name:18} {value:12,.2f}" if "ms" in name else f"  {name:18} {value:12,.0f}")
    for what, seen in found.items():
        name = f"{what} ranks" if what.isdecimal() else f"{what}, 10 Gbit/s, ms"
        print(f"{name}: " + ", ".join(f"{k} {_text(v)}" for k, v in seen.items()))


def _text(value: float | list[float]) -> str:
    return " / ".join(f"{x:.2f}" for x in (value if isinstance(value, list) else [value]))


if __name__ == "__main__":
    main()
