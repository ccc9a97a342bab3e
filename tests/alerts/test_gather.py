from __future__ import annotations

import numpy as np
from recording import observation

from stability_probe.alerts.gather import gather


def test_layers_of_one_width_become_rows():
    layers = [observation("a", 0, x=[1, 2]), observation("b", 1, x=[3, 4])]
    np.testing.assert_array_equal(gather(layers, ["x", "x"]), [[1, 2], [3, 4]])


def test_fewer_heads_and_missing_statistics_are_absent():
    layers = [observation("a", x=[1, 2, 3]), observation("b", x=[4]), observation("c", y=[5])]
    expected = [[1, 2, 3], [4, np.nan, np.nan], [np.nan] * 3]
    np.testing.assert_array_equal(gather(layers, ["x"] * 3), expected)


def test_each_layer_may_have_its_own_statistic():
    layers = [observation("a", x=[1], y=[2]), observation("b", x=[3], y=[4])]
    np.testing.assert_array_equal(gather(layers, ["x", "y"]), [[1], [4]])


def test_nothing_at_all_is_an_empty_or_absent_matrix():
    assert np.isnan(gather([observation("a", y=[1])], ["x"])).all()
    assert gather([], []).shape[0] == 0
