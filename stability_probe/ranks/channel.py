"""A process group of the probe's own, on gloo, beside the user's.

`torch.distributed.new_group` would have to be called by every rank at the same moment, and would
move the counters by which the user's own groups are named. This one is made from the store
alone: nothing of the user's is touched.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stability_probe.ranks.packing import Floats, Ints

CONNECT_SECONDS = 60.0
REDUCE_SECONDS = 1800.0  # a rank may evaluate or save for long while the others have gone on


class Pending:
    """Two all-reduces on their way."""

    def __init__(self, arrays: Sequence[Tensor], works: Sequence[Any]) -> None:
        self._arrays, self._works = arrays, works

    @property
    def done(self) -> bool:
        """Whether `result` would return, or raise, at once."""
        return all(work.is_completed() for work in self._works)

    def result(self) -> tuple[Ints, Floats]:
        """The maximum and the sum over ranks.

        Raises:
            RuntimeError: a rank is gone, or did not come in time.
        """
        for work in self._works:
            work.wait()
        ints, floats = (array.numpy() for array in self._arrays)
        return ints, floats


class Channel:
    """Collectives between the ranks that have met. Every rank issues the same, in one order."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        """Connects; every rank must do so within `CONNECT_SECONDS`.

        Args:
            store: a store of the probe's own; a clone of the default one under a prefix.
            rank: of this process.
            world: number of ranks.

        Raises:
            RuntimeError: a rank did not come.
        """
        from torch._C._distributed_c10d import ProcessGroupGloo

        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=CONNECT_SECONDS)
        options._threads = 2  # the two reductions of a step run side by side
        # connections are made when first used: a ring needs two a rank and not one to each other
        name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        make: Any = ProcessGroupGloo
        options._devices = [
            make.create_device(interface=name, lazy_init=True)
            if name
            else make.create_default_device(lazy_init=True)
        ]
        self._world = world
        self._group: Any = make(store, rank, world, options)
        # Destroying a group waits for what it has in flight. At the end of a process that would
        # hang where another rank never comes, so it is destroyed by a clean `close` alone.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))

    def exchange(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in the order of ranks. Waits for all of them."""
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self._world)]
        mine = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
        self._group.allgather([sizes], [mine]).wait()
        width = max(int(size) for size in sizes)
        padded = np.frombuffer(data.ljust(width, b"\0"), np.uint8).copy()
        rows = [torch.from_numpy(np.zeros(width, np.uint8)) for _ in range(self._world)]
        self._group.allgather([rows], [torch.from_numpy(padded)]).wait()
        pairs = zip(rows, sizes, strict=True)
        return [row.numpy().tobytes()[: int(size)] for row, size in pairs]

    def largest(self, value: int) -> int:
        """The largest of every rank's values. Waits for all of them."""
        tensor = torch.tensor([value], dtype=torch.int64, device="cpu")
        self._start(tensor, "MAX").wait()
        return int(tensor)

    def reduce(self, ints: Ints, floats: Floats) -> Pending:
        """Starts the maximum of the first and the sum of the second over ranks; never waits."""
        arrays = (torch.from_numpy(ints), torch.from_numpy(floats))
        works = [self._start(array, how) for array, how in zip(arrays, ("MAX", "SUM"), strict=True)]
        return Pending(arrays, works)

    def _start(self, tensor: Tensor, how: str) -> Any:
        from torch._C._distributed_c10d import AllreduceOptions, ReduceOp

        options = AllreduceOptions()
        options.reduceOp = ReduceOp(getattr(ReduceOp, how))
        options.timeout = timedelta(seconds=REDUCE_SECONDS)
        return self._group.allreduce([tensor], options)

    def close(self) -> None:
        """Disconnects, when nothing is in flight any more."""
        if self._group is not None:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._group))
            self._group = None
