from __future__ import annotations

import warnings

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stability_probe.detect.median import row_medians

SAMPLE = st.one_of(st.floats(-1e6, 1e6), st.just(float("nan")))


@settings(deadline=None, max_examples=150)
@given(hnp.arrays(np.float64, hnp.array_shapes(min_dims=2, max_dims=2), elements=SAMPLE))
def test_equals_nanmedian_of_each_row(values):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        expected = np.nanmedian(values, axis=1)
    np.testing.assert_allclose(row_medians(values), expected, rtol=1e-12)


def test_a_row_of_missing_samples_is_missing_and_leaves_others_alone():
    values = np.array([[np.nan, np.nan, np.nan], [3.0, np.nan, 1.0]])
    np.testing.assert_array_equal(row_medians(values), [np.nan, 2.0])
