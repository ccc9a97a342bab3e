"""Two processes on gloo: each watches its own share, and training is what it was."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tiny_models import Attention, Model, loss_of, tokens
from torch.nn.parallel import DistributedDataParallel

import stability_probe as sp

LAYERS = ["blocks.0.attention", "blocks.1.attention"]


def work(rank: int, folder: str, how: str) -> None:
    store = dist.FileStore(f"{folder}/{how}", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model(Attention("sdpa", 0.1), Attention("torch.softmax", 0.1))
    probe = sp.watch(model, strict=True) if how == "before" else None
    wrapped = DistributedDataParallel(model)
    if how == "after" or (how == "rank 0 alone" and rank == 0):
        probe = sp.watch(wrapped, strict=True)
    torch.manual_seed(rank)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        loss = loss_of(wrapped, tokens())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if probe is not None:
            probe.step(loss=loss)
    seen = None if probe is None else [r.layer for r in probe.coverage]
    if probe is not None:
        probe.close()
    result: dict[str, Any] = {"losses": losses, "weights": list(model.parameters()), "seen": seen}
    torch.save(result, f"{folder}/{how}-{rank}.pt")
    dist.destroy_process_group()


def run(folder: Path, how: str) -> list[dict[str, Any]]:
    mp.spawn(work, args=(str(folder), how), nprocs=2)
    return [torch.load(folder / f"{how}-{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="gloo with a file store needs a POSIX system")
def test_ddp_is_bit_identical_however_it_is_watched(tmp_path: Path) -> None:
    bare = run(tmp_path, "unwatched")
    for how, seen in (
        ("before", [LAYERS, LAYERS]),
        ("after", [LAYERS, LAYERS]),
        ("rank 0 alone", [LAYERS, None]),  # must not hang the other
    ):
        watched = run(tmp_path, how)
        assert [w["seen"] for w in watched] == seen
        for one, two in zip(bare, watched, strict=True):
            for key in ("losses", "weights"):
                assert all(torch.equal(a, b) for a, b in zip(one[key], two[key], strict=True))
