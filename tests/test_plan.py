"""What is measured at which step, after which past."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stability_probe.plan import LONGEST, WIDEST, Past, Plan, Thinning, every, rotating
from stability_probe.records import Level


def test_the_default_plan_is_dense_for_200_steps_then_every_10() -> None:
    plan = Plan()
    levels = {s: plan.level(s) for s in range(1, 301)}
    assert [s for s in levels if levels[s].whole] == [*range(1, 201), *range(210, 301, 10)]
    assert [s for s in levels if levels[s] is Level.FULL] == [1, 100, 200, 300]
    assert {levels[s] for s in levels if not levels[s].whole} == {Level.BRACKET}


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_the_default_plan_measures_every_head_at_least_every_10_steps(
    start: int, offset: int
) -> None:
    past = Past(phase_start=start)
    ten = [Plan().level(start + offset + i, past) for i in range(10)]
    assert any(level.whole for level in ten)
    assert all(level in (Level.BRACKET, Level.DEFAULT, Level.FULL) for level in ten)


@given(st.integers(1, 50), st.integers(1, 10**6))
def test_every_n(n: int, step: int) -> None:
    measured = every(n, full_every=10**9).level(step).whole
    assert measured == (step == 1 or step % n == 0)


def test_one_rotating_sequence_each_step_and_all_every_n() -> None:
    levels = [rotating(5, full_every=20).level(step) for step in range(1, 21)]
    assert [i for i, level in enumerate(levels, 1) if level.whole] == [1, 5, 10, 15, 20]
    assert {level for level in levels if not level.whole} == {Level.SEQUENCE}


@given(st.integers(1, 10**6), st.integers(0, 400))
def test_a_phase_starts_dense_wherever_it_starts(start: int, offset: int) -> None:
    level = Plan().level(start + offset, Past(phase_start=start))
    if offset < 200:
        assert level.whole
    if offset == 0:
        assert level is Level.FULL


def test_after_danger_everything_is_measured_for_ten_steps() -> None:
    plan = Plan()
    past = plan.after(Past(), 1001, danger=True)
    full = [s for s in range(980, 1040) if plan.level(s, past) is Level.FULL]
    assert full == [1000, *range(1001, 1011)]
    assert plan.after(Past(), 1001, danger=False) == Past()
    assert Plan(escalation=0).after(Past(), 1001, danger=True) == Past()


def test_danger_that_lasts_is_measured_for_a_while_and_then_rests_as_long() -> None:
    plan, past, full = every(10), Past(), []
    for step in range(1, 1001):
        past = plan.after(past, step, danger=True)
        full.append(plan.level(step, past) is Level.FULL)
    turns = [s for s, (a, b) in enumerate(pairwise(full), start=2) if a != b]
    runs = [b - a for a, b in pairwise(turns)]
    assert max(runs) <= LONGEST * plan.escalation + 1  # the step 100 n may follow at once
    assert 0.4 < sum(full) / len(full) < 0.6


@given(st.lists(st.booleans(), min_size=1, max_size=400), st.integers(1, 20))
def test_no_danger_makes_more_than_half_of_all_steps_full(
    dangers: list[bool], escalation: int
) -> None:
    plan = Plan(dense=0, every=10**9, full_every=10**9, escalation=escalation)
    past, full = Past(), 0
    for step, danger in enumerate(dangers, start=2):
        past = plan.after(past, step, danger=danger)
        full += plan.level(step, past) is Level.FULL
    assert full <= max(len(dangers) / 2, 0) + LONGEST * escalation


@given(st.sampled_from((1, 2, 4, 8, 16, 32)), st.integers(1, 10**5))
def test_a_stride_thins_the_plan_by_as_much(stride: int, step: int) -> None:
    plan = Plan(dense=100, every=5, full_every=50)
    level = plan.level(step, Past(thinning=Thinning(stride)))
    cadence = (1 if step < 101 else 5) * stride
    assert level.whole == (step == 1 or step % cadence == 0 or step % (50 * stride) == 0)
    assert level.whole or level is Level.BRACKET


def test_a_bare_plan_gives_the_steps_between_the_sentinel_alone() -> None:
    levels = [Plan().level(step, Past(thinning=Thinning(bare=True))) for step in range(201, 300)]
    assert set(levels) == {Level.SENTINEL, Level.DEFAULT}


def test_an_escalation_is_not_thinned() -> None:
    past = Past(thinning=Thinning(WIDEST, bare=True), escalated=(501, 510))
    assert all(Plan().level(step, past) is Level.FULL for step in range(501, 511))


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"between": Level.FULL}, r"got between=.*FULL.*; expected Level.SENTINEL, Level.BRACKET"),
        ({"overhead": 1.0}, "got overhead=1.0; expected a share of the time between 0 and 1"),
        ({"escalation": -1}, "escalation=-1; expected dense and escalation >= 0"),
    ],
)
def test_a_plan_that_cannot_be_meant_is_refused(given_: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Plan(**given_)  # type: ignore[arg-type]


def test_a_plan_says_what_it_does() -> None:
    assert str(Plan(overhead=0.01)) == (
        "every step for 200 steps of a phase, then every 10; all statistics every 100, and for "
        "10 steps after danger; between: bracket; at most 1.0% of the time"
    )
    assert str(every(5)).startswith("every 5; all statistics every 100")


def test_a_run_that_goes_back_before_its_phase_is_measured_as_before() -> None:
    levels = [Plan().level(step, Past(phase_start=5000)) for step in range(1001, 1101)]
    assert sum(level.whole for level in levels) == 10
    past = Plan().after(Past(escalated=(5001, 5010)), 1001, danger=True)
    assert past.escalated == (1001, 1010)
