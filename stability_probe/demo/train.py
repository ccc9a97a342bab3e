"""Trains one run of the demo, watched: what a process of its own does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import stability_probe as sp
from stability_probe.demo.tasks import Task, load_task

EVALUATE_EVERY = 5  # steps
RAMP = "learning-rate ramp on W_q and W_k"


def train(
    task_name: str,
    logdir: Path,
    *,
    qk_norm: bool,
    seed: int = 0,
    progress: Callable[[int], object] = lambda step: None,
) -> None:
    """Trains to the end of the task's schedule; what came of it is in the run directory.

    Args:
        task_name: "text" or "digits".
        logdir: of this run.
        qk_norm: with RMS QK-norm, or plain.
        seed: of the weights and the data order.
        progress: called with every step.
    """
    logging.getLogger("stability_probe").setLevel(logging.CRITICAL + 1)  # the table says it all
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    task = load_task(task_name)
    model = task.model(qk_norm)
    optimizer = _optimizer(model)
    data = torch.Generator().manual_seed(1000 + seed)
    with sp.watch(model, logdir, optimizer=optimizer) as probe:
        for step in range(1, task.schedule.steps + 1):
            if step == task.schedule.start + 1:
                probe.mark(RAMP)
            for group, rate in zip(optimizer.param_groups, task.schedule.rates(step), strict=True):
                group["lr"] = rate
            inputs, targets = task.draw(data)
            loss = task.loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            due = step % EVALUATE_EVERY == 0
            evaluated = _evaluate(model, task) if due else None
            probe.step(loss=loss, grad_norm=norm, eval_loss=evaluated)
            progress(step)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with W_q and W_k as its first group."""
    qk = [p for name, p in model.named_parameters() if ".w_q." in name or ".w_k." in name]
    of_qk = {id(p) for p in qk}
    rest = [p for p in model.parameters() if id(p) not in of_qk]
    groups = [{"params": qk}, {"params": rest}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


@torch.no_grad()
def _evaluate(model: nn.Module, task: Task) -> torch.Tensor:
    model.eval()
    inputs, targets = task.evaluation
    loss = task.loss(model(inputs), targets)
    model.train()
    return loss
