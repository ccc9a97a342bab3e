from __future__ import annotations

import numpy as np
import pytest

from stability_probe.detect.forecast import LEAST, log_slopes, steps_left


def test_the_slope_is_that_of_least_squares_and_missing_samples_do_not_matter():
    rng = np.random.default_rng(0)
    steps = np.cumsum(rng.integers(1, 9, size=40))
    samples = np.exp(0.02 * steps[:, None] + 0.1 * rng.normal(size=(40, 3)))
    samples[rng.random((40, 3)) < 0.2] = np.nan
    slopes = log_slopes(steps, samples)
    for column in range(3):
        known = ~np.isnan(samples[:, column])
        fit, covariance = np.polyfit(steps[known], np.log(samples[known, column]), 1, cov=True)
        assert slopes.middle[column] == pytest.approx(fit[0], rel=1e-9)
        error = 2 * np.sqrt(covariance[0, 0])
        assert slopes.high[column] - slopes.middle[column] == pytest.approx(error, rel=1e-9)


def test_few_samples_give_no_slope():
    steps = np.arange(LEAST)
    samples = np.exp(0.1 * steps)[:, None] * np.ones((1, 2))
    samples[0, 1] = 0.0
    assert np.isnan(log_slopes(steps, samples).middle).tolist() == [False, True]


def test_what_does_not_grow_never_arrives():
    assert steps_left(3.0, 0.01) == pytest.approx(300)
    assert steps_left(3.0, -0.01) == steps_left(3.0, 0.0) == np.inf
