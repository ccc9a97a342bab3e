"""The same short run with and without a probe, so that the two can be compared bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from tiny_models import loss_of, tokens
from torch import Tensor, nn

import stability_probe as sp

Step = Callable[[nn.Module, Tensor], Tensor]


def run(
    make: Callable[[], nn.Module],
    *,
    watched: bool,
    step: Step = loss_of,
    steps: int = 4,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    backward: Callable[[Tensor], None] = lambda loss: loss.backward(),
    **options: object,
) -> tuple[list[Tensor], sp.Probe | None]:
    """Losses, gradients, weights and the random state of a run; `around` goes round each step."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    probe = sp.watch(model, strict=True, **options) if watched else None  # type: ignore[arg-type]
    traces: list[Tensor] = []
    try:
        for _ in range(steps):
            optimizer.zero_grad()
            with around():
                loss = step(model, tokens())
                backward(loss)
            optimizer.step()
            if probe is not None:
                probe.step(loss=loss.detach().float())
            traces.append(loss.detach())
        traces += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        traces += [p.detach().clone() for p in model.parameters()]
        traces.append(torch.get_rng_state())
    finally:
        if probe is not None:
            probe.close()
    return traces, probe


def both(make: Callable[[], nn.Module], **options: object) -> sp.Probe:
    """Runs it twice; fails unless every trace is the same. The watched run's probe."""
    bare, _ = run(make, watched=False, **options)  # type: ignore[arg-type]
    watched, probe = run(make, watched=True, **options)  # type: ignore[arg-type]
    assert_same(bare, watched)
    assert probe is not None
    return probe


def assert_same(one: list[Tensor], two: list[Tensor]) -> None:
    """Equal in every bit; NaN where the other has NaN."""
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a.nan_to_num(nan=12345.0), b.nan_to_num(nan=12345.0))
        assert a.is_floating_point() is False or torch.equal(a.isnan(), b.isnan())


def calls(probe: sp.Probe) -> dict[str, int]:
    """How many calls each site gave."""
    return {r.layer: r.calls for r in probe.coverage}


def sequences(probe: sp.Probe) -> list[dict[str, int]]:
    """Per recorded step, how many sequences each layer pooled."""
    return [{o.layer: o.sequences for o in r.observations} for r in probe._kept]


@contextmanager
def grown(model: nn.Module, name: str, module: nn.Module) -> Iterator[None]:
    """Puts another module in the place of one, for a while."""
    before = model.get_submodule(name)
    model.set_submodule(name, module)
    yield
    model.set_submodule(name, before)
