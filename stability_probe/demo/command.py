"""The `demo` command: two runs in parallel processes, then a table, a picture and what to type."""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.queues import Queue
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from stability_probe.demo.tasks import load_task
from stability_probe.demo.train import train
from stability_probe.demo.verdict import Outcome, as_announced, outcome
from stability_probe.errors import LogDirectoryError, StabilityProbeError
from stability_probe.runlog.read import Run, load

RUNS: Mapping[str, bool] = {"plain": False, "qk_norm": True}  # name -> with QK-norm
TOLD_EVERY = 10  # steps between two messages to the progress bar


class DemoFailedError(StabilityProbeError, RuntimeError):
    """A process of the demo ended before its run did."""


def run_demo(*, logdir: Path | None, task: str, as_json: bool) -> int:
    """Trains both runs and shows what happened.

    Args:
        logdir: where the two runs go; a fresh folder below `runs/` where None.
        task: "text" or "digits".
        as_json: print the result as JSON on stdout, and nothing else there.

    Returns:
        0 where the plain run was announced before it diverged and its twin stayed healthy, else
        1: both end as they do on any machine, but nothing here makes them.

    Raises:
        StabilityProbeError: the directory cannot be used, an extra is missing, or a run failed.
    """
    logdir = Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S") if logdir is None else logdir
    if any((logdir / name).exists() for name in RUNS):
        raise LogDirectoryError(
            f"got {logdir}, which holds an earlier demo; expected a fresh directory. "
            "Choose another --logdir, or leave it out."
        )
    schedule = load_task(task).schedule  # also finds a missing extra before anything starts
    _train_both(task, logdir, steps=schedule.steps)
    runs = {name: load(logdir / name) for name in RUNS}
    outcomes = {n: outcome(n, run, ramp_start=schedule.start) for n, run in runs.items()}
    picture = _draw(runs, outcomes, logdir / "demo.png")
    if as_json:
        found = {"runs": [o.to_dict() for o in outcomes.values()], "logdir": str(logdir)}
        print(json.dumps(found, indent=1))
    else:
        _show(outcomes, picture, logdir)
    return 0 if as_announced(outcomes) else 1


def _train_both(task: str, logdir: Path, *, steps: int) -> None:
    """Both runs in a process of their own each, with a progress bar on stderr."""
    context = multiprocessing.get_context("spawn")
    told: Queue[tuple[str, int, str]] = context.Queue()
    with _one_thread():
        processes = {
            name: context.Process(
                target=_child, args=(task, logdir / name, qk_norm, name, told), daemon=True
            )
            for name, qk_norm in RUNS.items()
        }
        for process in processes.values():
            process.start()
    bar = Progress(
        TextColumn("{task.description:>8}"),
        BarColumn(),
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    try:
        with bar:
            lines = {name: bar.add_task(name, total=steps) for name in RUNS}
            while any(line.completed < steps for line in bar.tasks):
                name, step, error = _next_message(told, processes)
                if error:
                    raise DemoFailedError(f"the run {name!r} failed:\n{error}")
                bar.update(lines[name], completed=step)
        for process in processes.values():
            process.join()
    finally:
        for process in processes.values():
            process.kill()


def _next_message(
    told: Queue[tuple[str, int, str]],
    processes: Mapping[str, multiprocessing.context.SpawnProcess],
) -> tuple[str, int, str]:
    while True:
        try:
            return told.get(timeout=1.0)
        except queue.Empty:
            for name, process in processes.items():
                if process.exitcode not in (None, 0):
                    return name, 0, f"its process ended with exit code {process.exitcode}"


def _child(
    task: str, logdir: Path, qk_norm: bool, name: str, told: Queue[tuple[str, int, str]]
) -> None:
    steps = load_task(task).schedule.steps

    def progress(step: int) -> None:
        if step % TOLD_EVERY == 0 and step < steps:
            told.put((name, step, ""))

    try:
        train(task, logdir, qk_norm=qk_norm, progress=progress)
        told.put((name, steps, ""))
    except Exception:
        told.put((name, 0, traceback.format_exc()))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Children started here compute on one thread each: two runs share two cores."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _draw(runs: Mapping[str, Run], outcomes: Mapping[str, Outcome], path: Path) -> Path:
    from stability_probe.views.plots import collapse  # matplotlib is slow to import

    diverged = {
        name: o.divergence_step for name, o in outcomes.items() if o.divergence_step is not None
    }
    collapse(runs, diverged=diverged).savefig(path)
    return path


def _show(outcomes: Mapping[str, Outcome], picture: Path, logdir: Path) -> None:
    table = Table(title="What the probe said, and when the loss knew")
    for column in ("run", "first alert", "loss diverged", "lead", "final loss"):
        table.add_column(column)
    for found in outcomes.values():
        first = found.first_alert
        table.add_row(
            found.name,
            "none" if first is None else f"step {first.step}: {first.rule} in {first.layer}",
            "no" if found.divergence_step is None else f"step {found.divergence_step}",
            "" if found.lead is None else f"{found.lead} steps",
            f"{found.final_loss:.2f} nats",
        )
    console = Console(file=sys.stdout)
    console.print(table)
    first = outcomes["plain"].first_alert
    if first is not None:
        console.print(f"\n{first.message}", markup=False)
        if first.cause:
            console.print(f"Cause: {first.cause}", markup=False)
        for remedy in first.remedies:
            console.print(f"To do: {remedy}", markup=False)
    console.print(f"\nPicture: {picture}", markup=False)
    console.print(f"Next:    tensorboard --logdir {logdir}", markup=False)
