from __future__ import annotations

import numpy as np

from stability_probe.detect.growth import GrowthTest
from stability_probe.detect.past import Past
from stability_probe.detect.span import LONG, Span

TEST = GrowthTest(level=30.0, factor=1.5, window=Span(steps=40, samples=8))


def grown(columns, *, every=1, heads=1, test=TEST):
    past = Past(keep=TEST.window)
    for i, row in enumerate(np.transpose(columns)):
        past.append((i + 1) * every, row)
    return test(past, heads=heads)


def jump(before, after):
    return [before] * 60 + [after] * 20


def test_needs_level_and_factor_together():
    result = grown([jump(20, 30.1), jump(20, 30.0), jump(20.1, 30.1), jump(100, 149)])
    assert result.armed_L.all()
    assert result.grown_L.tolist() == [True, False, False, False]


def test_reports_both_ends_of_the_window():
    result = grown([jump(20, 33)])
    assert (*result.ends(0), result.since(0)) == (20, 33, 40)


def test_growth_from_zero_or_below_counts():
    assert grown([jump(0, 31), jump(-5, 31)]).grown_L.all()


def test_a_layer_without_a_sample_now_or_then_is_not_armed():
    gone = [20.0] * 60 + [np.nan] * 20
    late = [np.nan] * 75 + [50.0] * 5
    result = grown([gone, late, jump(20, 31)])
    assert result.armed_L.tolist() == [False, False, True]
    assert result.grown_L.tolist() == [False, False, True]


def breadth(grown_heads, heads, **options):
    columns = [jump(20, 33)] * grown_heads + [jump(20, 21)] * (heads - grown_heads)
    test = GrowthTest(window=TEST.window, **options)
    return bool(grown(columns, heads=heads, test=test).grown_L[0])


def test_a_share_of_the_heads_but_two_at_least_must_have_grown():
    assert [breadth(n, 4) for n in range(4)] == [False, False, True, True]
    assert [breadth(n, 64) for n in (15, 16)] == [False, True]
    assert [breadth(n, 64, share=0.1) for n in (6, 7)] == [False, True]
    assert [breadth(n, 64, share=0.0, least=1) for n in (0, 1)] == [False, True]


def test_a_layer_of_one_head_is_judged_by_it():
    assert breadth(1, 1)
    assert not breadth(1, 2)


def test_an_eighth_of_the_heads_that_a_median_hides_is_found():
    assert breadth(8, 64, share=0.1)
    columns = [jump(20, 33)] * 8 + [jump(20, 21)] * 56
    assert np.median(np.transpose(columns)[-1]) == 21


def test_heads_that_grew_are_named_and_the_largest_is_the_badness():
    result = grown([jump(20, 21), jump(20, 40), jump(30, 60), jump(20, 5)], heads=4)
    assert result.heads(0) == (1, 2)
    assert result.largest[0] == 60
    assert result.ends(0) == (25, 50)


def test_missing_heads_do_not_count_as_heads():
    gone = [np.nan] * 80
    columns = [jump(20, 33), jump(20, 33), *[jump(20, 21)] * 2, *[gone] * 12]
    assert grown(columns, heads=16).grown_L[0]


def test_slow_growth_is_seen_by_the_long_window_alone():
    slow = [20.0 * 1.0046 ** max(step - 600, 0) for step in range(1, 1001)]  # 2.5 times in 200
    assert not grown([slow]).grown_L[0]
    assert grown([slow], test=GrowthTest(level=50, factor=2.0, window=LONG)).grown_L[0]
