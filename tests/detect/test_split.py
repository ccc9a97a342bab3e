from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stability_probe.detect.split import PEAK_FACTORS, growth_factors

FACTOR = hnp.arrays(np.float64, (4, 3), elements=st.floats(0.1, 100))


@settings(deadline=None, max_examples=80)
@given(FACTOR, FACTOR)
def test_factors_multiply_to_the_growth_of_the_product(then, now):
    names = list(PEAK_FACTORS.values())
    grown = growth_factors(
        dict(zip(names, then, strict=True)),
        dict(zip(names, now, strict=True)),
        statistics=PEAK_FACTORS,
    )
    whole = np.exp(np.mean(np.log(now.prod(axis=0) / then.prod(axis=0))))
    assert np.prod(list(grown.values())) == pytest.approx(whole, rel=1e-9)


def test_each_factor_is_named_and_signs_do_not_matter():
    then = {"peak_q_norm": np.array([2.0]), "peak_cosine": np.array([-0.5])}
    now = {"peak_q_norm": np.array([6.0]), "peak_cosine": np.array([0.75])}
    named = {"|q|": "peak_q_norm", "cosine": "peak_cosine"}
    assert growth_factors(then, now, statistics=named) == pytest.approx({"|q|": 3, "cosine": 1.5})


def test_heads_that_lack_one_factor_count_for_none():
    then = {"a": np.array([1.0, 1.0, 0.0]), "b": np.array([1.0, np.nan, 1.0])}
    now = {"a": np.array([2.0, 50.0, 50.0]), "b": np.array([3.0, 50.0, 50.0])}
    grown = growth_factors(then, now, statistics={"x": "a", "y": "b"})
    assert grown == pytest.approx({"x": 2.0, "y": 3.0})


def test_a_factor_that_was_not_recorded_gives_nothing():
    one = {"a": np.ones(2)}
    assert growth_factors(one, one, statistics={"x": "a", "y": "b"}) == {}
    assert growth_factors({"a": np.ones(3)}, one, statistics={"x": "a"}) == {}
    assert growth_factors({"a": np.zeros(2)}, one, statistics={"x": "a"}) == {}
