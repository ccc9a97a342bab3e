"""Memory that a monitor keeps, and disks that it fills."""

from __future__ import annotations

import gc
import resource
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import Attention, Model, loss_of, tokens
from torch import Tensor

import stability_probe as sp


def make(spelling: str = "torch.softmax") -> Model:
    return Model(Attention("sdpa", 0.1), Attention(spelling, 0.1))


# ------------------------------------------------------------------ memory


def live_tensors() -> int:
    """How many there are; their types are looked at and not the objects, some of which warn."""
    gc.collect()
    return sum(issubclass(type(o), Tensor) for o in gc.get_objects())


def grown(work: Callable[[], object], times: int) -> tuple[int, int]:
    """Bytes of Python memory and of live tensors that `times` calls leave behind."""
    for _ in range(250):
        work()  # caches fill, buffers reach their length
    gc.collect()
    tensors = live_tensors()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(times):
        work()
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return after - before, live_tensors() - tensors


@pytest.mark.slow
@pytest.mark.parametrize("where", ["in memory", "in a directory"])
def test_a_thousand_steps_keep_nothing(where: str, tmp_path: Path) -> None:
    """Without a detach a monitor kept 1 MB a forward (jacobgil/pytorch-grad-cam#88)."""
    torch.manual_seed(0)
    model = Model(Attention("sdpa"), Attention("torch.softmax"))
    logdir = None if where == "in memory" else tmp_path
    with sp.watch(model, logdir, plan=sp.Plan(dense=0, every=1, full_every=50)) as probe:
        if logdir is None:
            probe._kept = type(probe._kept)(maxlen=20)  # its own bound is reached later

        def work() -> None:
            loss = loss_of(model, tokens(2, 6))
            loss.backward()
            probe.step(loss=loss, grad_norm=loss)

        start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        leftover, tensors = grown(work, 1000)
        rss = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) * 1024
    assert tensors <= 10
    assert leftover < 1_500_000, leftover  # the rules' histories grow to their windows
    assert rss < 60_000_000


def test_steps_without_probe_step_do_not_pile_up() -> None:
    """A loop that forgets to call it, or an actor that only rolls out."""
    torch.manual_seed(0)
    model = make()
    with sp.watch(model, strict=True) as probe:
        loss_of(model, tokens()).backward()
        probe.step()

        with torch.no_grad():
            model(tokens())
        loss_of(model, tokens()).backward()
        before = live_tensors()
        for _ in range(30):
            with torch.no_grad():
                model(tokens())
            loss_of(model, tokens()).backward()
        assert live_tensors() - before < 30, "a rollout without a step keeps its pools"


# ------------------------------------------------------------------ disks


DISK_FULL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.path.insert(0, {tests!r})
import torch
from tiny_models import Attention, Model, loss_of, tokens
import stability_probe as sp
torch.manual_seed(0)
model = Model(Attention(), Attention("torch.softmax"))
probe = sp.watch(model, {logdir!r}) if {watched} else None
if {watched}:
    resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
for step in range({steps}):
    loss = loss_of(model, tokens())
    loss.backward()
    if probe is not None:
        probe.step(loss=loss)
    print(loss.item().hex())
if probe is not None:
    probe.close()
    faults = [a for a in probe.alerts if a.rule == "probe_fault"]
    assert 1 <= len(faults) <= 6, [a.message for a in probe.alerts]
    assert all("File too large" in a.message for a in faults), faults
    assert not probe._attachment._handles
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "limit",
    [
        0,
        3000,
        30000,
    ],
)
def test_a_full_disk_does_not_end_the_run(tmp_path: Path, limit: int) -> None:
    """Twenty-one hours were lost in a flush (kohya-ss/sd-scripts#1160)."""
    told = []
    for watched in (False, True):
        code = DISK_FULL.format(
            tests=str(Path(__file__).parents[1]), logdir=str(tmp_path / "run"), watched=watched,
            limit=limit, steps=60,
        )  # fmt: skip
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        told.append(done.stdout)
    assert told[0] == told[1]
    assert len(told[0].split()) == 60
