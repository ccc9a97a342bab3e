"""Where a probe's records and alerts go by default: on rank 0 alone, when ranks pool."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

from stability_probe.records import Alert, RunHeader
from stability_probe.runlog.write import RunWriter
from stability_probe.sinks import Event, Sink
from stability_probe.sinks.console import ConsoleSink
from stability_probe.sinks.tensorboard import TensorBoardSink


def own_rank() -> int:
    """The number of this process among its ranks; 0 where there is one process."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    rank = os.environ.get("RANK", "0")  # a launcher sets it before the process group is there
    return int(rank) if rank.isdecimal() else 0


class OwnFaults(ConsoleSink):
    """The console of a rank whose records are told elsewhere: only faults of its own probe."""

    def emit(self, event: Event) -> None:
        """Shows an alert about this rank's probe."""
        if isinstance(event, Alert) and event.rule == "probe_fault":
            super().emit(event)


def own_sinks(logdir: Path | None, header: RunHeader, *, rank: int, writes: bool) -> list[Sink]:
    """The sinks that a probe has from its start.

    Args:
        logdir: the run directory; None for none.
        header: what is known of the run at its start.
        rank: of this process.
        writes: whether this rank writes files and tells alerts; else another one does.

    Raises:
        LogDirectoryError: the directory cannot be made or written.
    """
    if not writes:
        return [OwnFaults()]
    console: list[Sink] = [ConsoleSink()]
    return console if logdir is None else [RunWriter(logdir, header, rank=rank), *console]


def board(logdir: Path, first: int) -> Sink:
    """TensorBoard files for a run whose first step is `first`."""
    return TensorBoardSink(logdir, start_step=0 if first == 1 else first)
