"""What a benchmark ran on, how its lanes are interleaved, and where its table goes."""

from __future__ import annotations

import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # measure this checkout, whatever is installed
DOCUMENT = ROOT / "docs" / "performance.md"


def conditions() -> dict[str, Any]:
    """Machine, versions and load at this moment."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 1),
        "date": time.strftime("%Y-%m-%d"),
    }


def sentence(found: Mapping[str, Any]) -> str:
    """The conditions as a line above a table."""
    return (
        f"{found['processor']}, {found['cores']} cores, {found['vectors']}; "
        f"torch {found['torch']}, Python {found['python']}; load at the start {found['load']}; "
        f"{found['date']}."
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def interleaved(
    lanes: Mapping[str, Callable[[], object]], *, base: str, rounds: int, threads: int
) -> dict[str, float]:
    """Median over rounds of each lane's time in units of the base lane's of the same round.

    The order is drawn anew each round, and the first round warms up. On one thread it is the CPU
    time of that thread, which other programs disturb less; on more it is wall time.
    """
    torch.set_num_threads(threads)
    clock = time.thread_time if threads == 1 else time.perf_counter
    ratios: dict[str, list[float]] = {name: [] for name in lanes}
    for turn in range(rounds + 1):
        took = {}
        for name in random.sample(list(lanes), len(lanes)):
            start = clock()
            lanes[name]()
            took[name] = clock() - start
        if turn:
            for name, seconds in took.items():
                ratios[name].append(seconds / took[base])
    return {name: statistics.median(r) for name, r in ratios.items() if name != base}


def put(name: str, table: str) -> None:
    """Puts a table between its markers in docs/performance.md."""
    sys.path.insert(0, str(ROOT / "docs"))
    from tables import with_table

    DOCUMENT.write_text(with_table(DOCUMENT.read_text(), name, table))
