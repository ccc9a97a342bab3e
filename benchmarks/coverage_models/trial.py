"""Trains a case unwatched and watched, and compares: bits, coverage, checks, entropies."""

from __future__ import annotations

import contextlib
import io
import random
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import stability_probe as sp
from stability_probe.errors import NoAttentionError
from stability_probe.plan import Plan
from stability_probe.records import Origin

from .case import Case, seed
from .oracle import Call, Oracle

STEPS = 2  # the first is the probe's discovery; at the second it only follows the sites
PATIENCE = 3  # so many steps of discovery before the probe says what it did not see
NO_ATTENTION = "watch() says that there is no attention"
EVERY_STEP = Plan(dense=0, every=1, full_every=1)


@dataclass
class Result:
    """What the sweep found for one case."""

    name: str
    implementation: str
    model_class: str
    fed: str
    attention: int = 0  # modules that computed softmax attention, says the oracle
    seen: int = 0  # of those, the ones that the probe has a site for
    calls: int = 0  # attention calls of the last step, says the oracle
    calls_seen: int = 0  # and the probe
    sites: int = 0
    with_qk: int = 0  # sites where q and k are known, and not only the scores
    verified: int = 0
    worst_error: float = 0.0  # largest absolute difference, without dropout
    identical: bool = False
    differs: str = ""  # what is not bit-identical
    entropy_error: float = 0.0  # the worst site's, in nats, against the oracle
    logit_error: float = 0.0  # relative
    alerts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problem: str = ""  # the trial itself failed

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


@dataclass
class Trace:
    """All that a run leaves behind, to be compared bit by bit."""

    losses: list[Tensor]
    state: dict[str, Tensor]
    randomness: tuple[Any, ...]


def run(case: Case) -> Result:
    """The whole trial of a case."""
    result = Result(case.name, case.implementation, case.model_class, case.fed)
    bare, calls = _unwatched(case)
    try:
        watched, probe, result.calls_seen = _watched(case, dropout=True)
    except NoAttentionError:
        result.attention = len({c.module for c in calls})
        result.identical = True  # nothing was attached
        result.notes.append(NO_ATTENTION)
        return result
    result.differs = differences(bare, watched)
    if result.differs and differences(bare, _unwatched(case, oracle=False)[0]):
        result.notes.append("two unwatched runs differ too")
    result.identical = not result.differs
    _coverage(result, calls, probe)
    _entropies(result, calls, probe)
    without = probe
    if case.has_dropout and any(r.verified == "reissued" for r in probe.coverage):
        _, without, _ = _watched(case, dropout=False, steps=1)
    _checks(result, without)
    operational = [a for p in (probe, without) for a in p.alerts if a.origin is Origin.OPERATIONAL]
    result.alerts = list(dict.fromkeys(f"{a.rule}: {a.layer}: {a.message}" for a in operational))
    return result


def _unwatched(case: Case, *, oracle: bool = True) -> tuple[Trace, list[Call]]:
    """The run without the probe; the oracle looks at its last forward."""
    model, optimizer = _begin(case, dropout=True)
    watcher = Oracle(model)
    losses = []
    for step in range(STEPS):
        looks = oracle and step == STEPS - 1
        with watcher.watching() if looks else contextlib.nullcontext():
            loss = case.loss(model)
        losses.append(_update(loss, optimizer))
    return _trace(model, losses), watcher.calls


def _watched(case: Case, *, dropout: bool, steps: int = STEPS) -> tuple[Trace, sp.Probe, int]:
    """The run with the probe; the last number is how many calls it saw at the last step."""
    model, optimizer = _begin(case, dropout=dropout)
    losses = []
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        probe = sp.watch(model, plan=EVERY_STEP, rules=(), allow_eval=True)
        before = 0
        for _ in range(steps):
            before = _calls(probe)
            losses.append(_update(case.loss(model), optimizer))
            probe.step(loss=losses[-1])
        calls = _calls(probe) - before
        trace = _trace(model, losses)
        while dropout and probe._attachment.discovering and len(losses) < PATIENCE:
            losses.append(_update(case.loss(model), optimizer))
            probe.step(loss=losses[-1])
        probe.close()
    return trace, probe, calls


def _calls(probe: sp.Probe) -> int:
    return sum(r.calls for r in probe.coverage if r.seam)


def _begin(case: Case, *, dropout: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    seed(0)
    model = case.make(dropout)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
    seed(1)
    return model, optimizer


def _update(loss: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def _trace(model: nn.Module, losses: list[Tensor]) -> Trace:
    state = {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}
    state |= {
        f"grad {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }
    randomness = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())
    return Trace(list(losses), state, randomness)


def differences(one: Trace, two: Trace) -> str:
    """What two runs differ in, in a few words; empty where they are bit-identical."""
    found = []
    pairs = zip(one.losses, two.losses, strict=True)
    worst = [i + 1 for i, (a, b) in enumerate(pairs) if not _same(a, b)]
    if worst:
        found.append(f"loss from step {worst[0]}")
    if one.state.keys() != two.state.keys():
        found.append("names of the state")
    weights = [n for n in one.state if n in two.state and not _same(one.state[n], two.state[n])]
    if weights:
        found.append(f"{len(weights)} of {len(one.state)} tensors, first {weights[0]}")
    names = ("torch", "python", "numpy")
    for name, a, b in zip(names, one.randomness, two.randomness, strict=True):
        same = a == b if name == "python" else bool((a == b).all())
        if not same:
            found.append(f"random state of {name}")
    return ", ".join(found)


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )


def _coverage(result: Result, calls: list[Call], probe: sp.Probe) -> None:
    """Which of the oracle's modules have a site at, in or around them."""
    reports = [r for r in probe.coverage if r.seam]
    sites = [r.layer for r in reports]
    modules = list(dict.fromkeys(c.module for c in calls))
    result.attention = len(modules)
    result.seen = sum(any(same_branch(m, s) for s in sites) for m in modules)
    result.sites, result.calls = len(sites), len(calls)
    missed = [m for m in modules if not any(same_branch(m, s) for s in sites)]
    if missed:
        kinds = sorted({c.operator for c in calls if c.module in missed})
        result.notes.append(f"not seen: {', '.join(missed[:4])} ({', '.join(kinds)})")
    extra = [s for s in sites if not any(same_branch(m, s) for m in modules)]
    if extra:
        result.notes.append(f"a site that the oracle does not count: {', '.join(extra[:4])}")


def same_branch(one: str, two: str) -> bool:
    """Whether one module holds the other, or they are the same."""
    return one == two or one.startswith(f"{two}.") or two.startswith(f"{one}.")


def _checks(result: Result, probe: sp.Probe) -> None:
    reports = [r for r in probe.coverage if r.seam]
    result.with_qk = sum(r.sees == "qk" for r in reports)
    result.verified = sum(r.verified != "no" for r in reports)
    result.worst_error = max((r.error for r in reports if r.error is not None), default=0.0)
    for r in reports:
        if r.verified == "no":
            result.notes.append(f"not verified: {r.layer}: {r.reason}")


def _entropies(result: Result, calls: list[Call], probe: sp.Probe) -> None:
    """The probe's mean entropy and largest logit of each site against the oracle's."""
    frame = probe.frame()
    if frame.empty or "entropy" not in frame:
        return
    last = frame[frame["step"] == STEPS]
    for layer, rows in last.groupby(last["layer"].str.split("#").str[0]):
        mine = [c for c in calls if c.module == layer]
        if not mine or any(c.sink for c in mine) or rows["entropy_rows"].sum() == 0:
            continue
        seen = (rows["entropy"] * rows["entropy_rows"]).sum() / rows["entropy_rows"].sum()
        true = sum(c.entropy_sum for c in mine) / max(1, sum(c.rows for c in mine))
        gap = abs(float(seen) - true)
        if gap > 1e-3:
            result.notes.append(f"entropy of {layer}: {seen:.4f}, the oracle says {true:.4f}")
        result.entropy_error = max(result.entropy_error, gap)
        largest, truth = float(rows["abs_max_logit"].max()), max(c.largest for c in mine)
        off = abs(largest - truth) / max(1.0, truth)
        if off > 1e-3:
            result.notes.append(f"|logit| of {layer}: {largest:.4g}, the oracle says {truth:.4g}")
        result.logit_error = max(result.logit_error, off)
