from __future__ import annotations

import numpy as np
import pytest

from stability_probe.detect.past import Past
from stability_probe.detect.span import LONG, Span


def filled(steps, value=float, columns=1) -> Past:
    past = Past(keep=Span())
    for step in steps:
        past.append(step, np.full(columns, value(step)))
    return past


@pytest.mark.parametrize("every", [1, 2, 5, 10, 20])
@pytest.mark.parametrize("last", [640, 1000, 3000, 10_000])
def test_the_long_reference_lies_200_steps_or_a_tenth_back(every, last):
    last -= last % every
    past = filled(range(every, last + 1, every))
    back = last - past.reference(LONG).step_C[0]
    reach = max(200, 0.1 * (last - every))
    assert reach <= back <= reach * (1 + 1 / 16) + 2 * every


def test_it_is_not_armed_before_the_phase_is_three_times_as_long():
    assert filled(range(1, 595)).reference(LONG).step_C[0] == -1
    assert filled(range(1, 640)).reference(LONG).step_C[0] > 0


def test_eight_samples_are_needed_however_many_steps_they_take():
    seldom = filled(range(100, 2001, 100))
    assert 2000 - seldom.reference(LONG).step_C[0] >= 700
    assert filled(range(300, 2101, 300)).reference(LONG).step_C[0] == -1  # seven in all


def test_a_column_without_a_sample_reaches_further_back_or_is_not_armed():
    past = Past(keep=Span())
    for step in range(1, 1201):
        gone = 900 <= step < 1015
        past.append(step, np.array([1.0, np.nan if gone else 2.0, np.nan]))
    at = past.reference(LONG).step_C
    assert at[1] < 900 < at[0]
    assert at[2] == -1


def test_memory_is_bounded_over_a_long_run():
    past = filled(range(1, 20_000))
    assert len(past.far.steps) <= 20
    assert len(past.near.steps) <= 131


def test_rewind_takes_the_later_steps_out():
    past = filled(range(1, 2001), value=lambda s: 1.0 if s < 1900 else 99.0)
    past.rewind(1900)
    assert max(past.far.steps) < 1900
    for step in range(1900, 2150):
        past.append(step, np.ones(1))
    assert past.reference(LONG).value_C[0] == 1.0


def test_going_back_farther_than_the_window_keeps_the_age_of_the_phase():
    past = filled(range(1, 5001))
    past.rewind(1000)
    for step in range(1000, 1230):
        past.append(step, np.ones(1))
    assert past.reference(LONG).step_C[0] >= 1000


def test_columns_may_move_and_new_ones_are_missing():
    past = filled(range(1, 1001), columns=2)
    then = past.reference(LONG).step_C[0]
    past.spread(np.array([0, 3]), 4)
    past.append(1001, np.full(4, 1001.0))
    assert past.reference(LONG).step_C.tolist()[::3] == pytest.approx([then, then], abs=20)
    assert past.reference(LONG).step_C.tolist()[1:3] == [-1, -1]
    assert past.reference(Span()).step_C.tolist() == [961, -1, -1, 961]


def test_forgotten_columns_are_not_armed():
    past = filled(range(1, 1001), columns=2)
    past.forget(slice(1, 2))
    past.append(1001, np.full(2, 1.0))
    assert (past.reference(LONG).step_C >= 0).tolist() == [True, False]
