"""When what is measured."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stability_probe.plan import Plan, every
from stability_probe.records import Level


def test_the_default_plan_is_dense_for_200_steps_then_every_10() -> None:
    plan = Plan()
    measured = [s for s in range(1, 301) if plan.level(s) is not Level.SENTINEL]
    assert measured == [*range(1, 201), *range(210, 301, 10)]
    assert [s for s in range(1, 301) if plan.level(s) is Level.FULL] == [1, 100, 200, 300]


@given(st.integers(1, 50), st.integers(1, 10**6))
def test_every_n(n: int, step: int) -> None:
    measured = every(n, full_every=10**9).level(step) is not Level.SENTINEL
    assert measured == (step == 1 or step % n == 0)


@given(st.integers(1, 10**6), st.integers(0, 400))
def test_a_phase_starts_dense_wherever_it_starts(start: int, offset: int) -> None:
    level = Plan().level(start + offset, phase_start=start)
    if offset < 200:
        assert level is not Level.SENTINEL
    if offset == 0:
        assert level is Level.FULL
