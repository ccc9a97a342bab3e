"""How the plan is thinned to keep to a share of the time."""

from __future__ import annotations

import time

import pytest
import torch
from tiny_models import Attention, Model, loss_of, tokens

import stability_probe as sp
from stability_probe.budget import WINDOW, Budget
from stability_probe.plan import WIDEST, Past
from stability_probe.records import Level
from stability_probe.stopwatch import Stopwatch


def run(budget: Budget, plan: sp.Plan, steps: int, *, cost: float) -> list[int]:
    """Steps of 100 ms, of which a measured one takes `cost` more."""
    strides = []
    for step in range(1, steps):
        measured = plan.level(step, Past(stride=budget.stride)).whole
        own = cost if measured else 0.0
        budget.note(own, 0.1 + own)
        strides.append(budget.stride)
    return strides


def test_a_plan_that_costs_too_much_is_thinned_until_it_does_not() -> None:
    strides = run(Budget(0.01), sp.every(1), 3000, cost=0.010)  # 9 percent of each step
    assert strides[WINDOW - 2] == 1
    assert strides[-1] == 16
    assert strides == sorted(strides)


def test_a_plan_within_its_budget_is_left_alone() -> None:
    assert set(run(Budget(0.01), sp.every(10), 1000, cost=0.005)) == {1}


def test_nothing_is_thinned_without_a_budget() -> None:
    assert set(run(Budget(None), sp.every(1), 1000, cost=0.5)) == {1}


def test_it_is_as_dense_again_once_there_is_time() -> None:
    budget = Budget(0.01)
    run(budget, sp.every(1), 3000, cost=0.010)
    assert run(budget, sp.every(1), 3000, cost=0.0001)[-1] == 1


def test_there_is_a_widest() -> None:
    assert run(Budget(0.0001), sp.every(1), 20000, cost=1.0)[-1] == WIDEST


def test_the_stopwatch_sums_what_runs() -> None:
    watch = Stopwatch(on=True)
    for _ in range(2):
        with watch.running(torch.device("cpu")):
            time.sleep(0.01)
    assert watch.take() >= 0.02
    assert watch.take() == 0.0


def test_a_stopwatch_that_is_off_takes_no_time() -> None:
    watch = Stopwatch(on=False)
    with watch.running():
        time.sleep(0.001)
    assert watch.take() == 0.0


@pytest.mark.parametrize("overhead", [None, 1e-6])
def test_a_watched_run_keeps_to_it(overhead: float | None) -> None:
    model = Model(Attention())
    plan = sp.Plan(dense=1000, full_every=10**6, overhead=overhead)
    whole = 0
    with sp.watch(model, plan=plan, strict=True) as probe:
        for _ in range(130):
            whole += probe._meter.level in (Level.DEFAULT, Level.FULL)
            loss_of(model, tokens()).backward()
            probe.step()
    assert (whole == 130) if overhead is None else (whole < 100)
