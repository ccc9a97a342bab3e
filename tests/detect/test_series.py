from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stability_probe.detect.series import Series
from stability_probe.detect.span import Span, longest

SPAN = Span(steps=40, samples=8)


def filled(steps, values, *, keep=SPAN) -> Series:
    series = Series(keep=keep)
    for step, row in zip(steps, values, strict=True):
        series.append(step, np.atleast_1d(np.asarray(row, dtype=float)))
    return series


def reference_by_hand(steps, column, smooth, span):
    """The latest usable row, found by walking back one row at a time."""
    for row in range(len(steps) - 1, -1, -1):
        known_since = sum(not np.isnan(v) for v in column[row:])
        old_enough = steps[row] <= steps[-1] - span.steps
        if old_enough and known_since >= span.samples and not np.isnan(smooth[row]):
            return row
    return -1


@settings(deadline=None, max_examples=100)
@given(
    gaps=st.lists(st.integers(1, 25), min_size=1, max_size=60),
    missing=st.lists(st.integers(0, 119), max_size=40),
    steps=st.integers(1, 80),
    samples=st.integers(2, 12),
)
def test_reference_rows_equal_a_walk_back(gaps, missing, steps, samples):
    span = Span(steps=steps, samples=samples)
    values = np.arange(2.0 * len(gaps)).reshape(-1, 2)
    for place in missing:
        if place < values.size:
            values.flat[place] = np.nan
    series = filled(np.cumsum(gaps), values, keep=span)
    expected = [
        reference_by_hand(series.steps, series.raw[:, i], series.smooth[:, i], span)
        for i in range(2)
    ]
    assert series.reference_rows(span).tolist() == expected


@pytest.mark.parametrize(
    ("every", "last", "reference"),
    [(1, 100, 60), (10, 100, 30), (20, 300, 160), (5, 100, 60), (7, 98, 49)],
)
def test_the_window_is_40_steps_or_8_samples_whichever_is_longer(every, last, reference):
    steps = np.arange(every, last + 1, every)
    series = filled(steps, steps)
    assert series.steps[series.reference_rows(SPAN)[0]] == reference


def test_the_window_spans_a_change_from_dense_to_sparse():
    steps = [*range(1, 201), *range(210, 251, 10)]
    series = filled(steps, steps)
    assert series.steps[series.reference_rows(SPAN)[0]] == 198  # 8 samples: 198-200, 210-250


def test_too_few_samples_or_steps_give_no_reference():
    assert filled(range(1, 41), range(40)).reference_rows(SPAN)[0] == -1
    assert filled(range(1, 42), range(41)).reference_rows(SPAN)[0] == 0
    assert filled(range(0, 700, 100), range(7)).reference_rows(SPAN)[0] == -1
    assert filled(range(0, 800, 100), range(8)).reference_rows(SPAN)[0] == 0


def test_smooth_is_the_median_of_the_last_ten_steps():
    series = filled(range(1, 31), [s if s != 25 else 1e9 for s in range(1, 31)])
    assert series.smooth[-1, 0] == np.median([*range(21, 25), *range(26, 31), 1e9])
    sparse = filled(range(10, 100, 10), range(9))
    np.testing.assert_array_equal(sparse.smooth[:, 0], range(9))


def test_infinite_samples_are_missing():
    series = filled([1, 2, 3], [1.0, np.inf, -np.inf])
    assert np.isnan(series.raw[1:, 0]).all()
    assert series.smooth[-1, 0] == 1.0


def test_a_layer_that_appears_later_is_missing_before():
    series = filled([1, 2, 3], [[1.0], [1.0, 5.0], [1.0, 6.0]])
    np.testing.assert_array_equal(series.raw[:, 1], [np.nan, 5.0, 6.0])


def test_memory_is_bounded_at_any_cadence():
    assert len(filled(range(1000), range(1000)).steps) <= 2 * 40 + 10 + 1
    assert len(filled(range(0, 100_000, 100), range(1000)).steps) <= 2 * 8 + 1


def test_what_is_kept_is_enough_for_the_window():
    for every in (1, 3, 10, 50):
        steps = np.arange(every, 2000 * every, every)
        series = filled(steps, steps)
        row = series.reference_rows(SPAN)[0]
        assert series.steps[row] == series.steps[-1] - max(every * 7, -(-40 // every) * every)


def test_rewind_forgets_the_steps_to_be_done_again():
    series = filled(range(1, 11), range(10))
    series.rewind(6)
    assert series.steps.tolist() == [1, 2, 3, 4, 5]
    assert len(series.raw) == len(series.smooth) == 5


def test_forget_clears_some_columns_alone():
    series = filled(range(1, 60), np.ones((59, 2)))
    assert series.reference_rows(SPAN).min() >= 0
    series.forget(slice(0, 1))
    assert series.reference_rows(SPAN)[0] == -1
    assert series.reference_rows(SPAN)[1] >= 0


def test_spans_that_cannot_hold_a_comparison_are_refused():
    with pytest.raises(ValueError, match="at least 1 step and at least 2 samples"):
        Span(steps=0)
    with pytest.raises(ValueError, match="samples=1"):
        Span(samples=1)


def test_longest_takes_the_most_of_each():
    assert longest([Span(steps=5, samples=9), Span(steps=70, samples=3)]) == Span(
        steps=70, samples=9
    )
