from __future__ import annotations

import numpy as np

from stability_probe.detect.growth import GrowthTest
from stability_probe.detect.series import Series, Span

TEST = GrowthTest(level=30.0, factor=1.5, window=Span(steps=40, samples=8))


def grown(columns, *, every=1):
    series = Series(keep=TEST.window)
    for i, row in enumerate(np.transpose(columns)):
        series.append((i + 1) * every, row)
    return TEST(series)


def jump(before, after):
    return [before] * 60 + [after] * 20


def test_needs_level_and_factor_together():
    result = grown([jump(20, 30.1), jump(20, 30.0), jump(20.1, 30.1), jump(100, 149)])
    assert result.armed_L.all()
    assert result.grown_L.tolist() == [True, False, False, False]


def test_reports_both_ends_of_the_window():
    result = grown([jump(20, 33)])
    assert (result.then_L[0], result.now_L[0], result.since_L[0]) == (20, 33, 40)


def test_growth_from_zero_or_below_counts():
    assert grown([jump(0, 31), jump(-5, 31)]).grown_L.all()


def test_a_layer_without_a_sample_now_or_then_is_not_armed():
    gone = [20.0] * 60 + [np.nan] * 20
    late = [np.nan] * 75 + [50.0] * 5
    result = grown([gone, late, jump(20, 31)])
    assert result.armed_L.tolist() == [False, False, True]
    assert result.grown_L.tolist() == [False, False, True]
