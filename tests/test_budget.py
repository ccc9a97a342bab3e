"""How the plan is thinned to keep to a share of the time."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import Attention, Model, loss_of, tokens

import stability_probe as sp
from stability_probe.budget import WINDOW, Budget
from stability_probe.plan import WIDEST, Past, Thinning
from stability_probe.records import Level
from stability_probe.stopwatch import Stopwatch


def run(
    budget: Budget, plan: sp.Plan, steps: int, *, cost: float, between: float = 0.0
) -> list[Thinning]:
    """Steps of 100 ms, of which a measured one takes `cost` more, and another one `between`."""
    thinnings = []
    for step in range(1, steps):
        level = plan.level(step, Past(thinning=budget.thinning))
        own = cost if level.whole else between if level is Level.BRACKET else 0.0
        budget.note(own, 0.1 + own, whole=level.whole)
        thinnings.append(budget.thinning)
    return thinnings


def test_a_plan_that_costs_too_much_is_thinned_until_it_does_not() -> None:
    thinnings = run(Budget(0.01), sp.every(1), 3000, cost=0.010)  # 9 percent of each step
    assert thinnings[WINDOW - 2] == Thinning()
    assert thinnings[-1] == Thinning(16)
    strides = [t.stride for t in thinnings]
    assert strides == sorted(strides)


def test_a_plan_within_its_budget_is_left_alone() -> None:
    assert set(run(Budget(0.01), sp.every(10), 1000, cost=0.005)) == {Thinning()}


def test_nothing_is_thinned_without_a_budget() -> None:
    assert set(run(Budget(None), sp.every(1), 1000, cost=0.5)) == {Thinning()}


def test_it_is_as_dense_again_once_there_is_time() -> None:
    budget = Budget(0.01)
    run(budget, sp.every(1), 3000, cost=0.010)
    assert run(budget, sp.every(1), 6000, cost=0.0001)[-1] == Thinning()


def test_there_is_a_widest() -> None:
    assert run(Budget(0.0001), sp.every(1), 20000, cost=1.0)[-1] == Thinning(WIDEST, bare=True)


def test_what_costs_more_goes_first_and_does_not_come_back_while_it_does() -> None:
    budget = Budget(0.01)
    thinnings = run(budget, sp.every(10), 5000, cost=0.005, between=0.005)
    assert set(thinnings[200:]) == {Thinning(bare=True)}
    assert run(budget, sp.every(10), 5000, cost=0.0001)[-1].bare  # what it would cost is not known


def test_it_settles() -> None:
    for cost, between in ((0.8, 0.0), (0.005, 0.002), (0.02, 0.0005), (0.001, 0.0001)):
        thinnings = run(Budget(0.01), sp.every(10), 40_000, cost=cost, between=between)
        assert len(set(thinnings[20_000:])) == 1, (cost, between)


@given(st.sampled_from((1, 2, 32, WIDEST)), st.booleans())
def test_a_thinning_survives_being_sent(stride: int, bare: bool) -> None:
    thinning = Thinning(stride, bare)
    assert Thinning.of(thinning.code) == thinning
    assert thinning.code > 0


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
