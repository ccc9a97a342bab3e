"""Which series a model gets, and how values fold."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stability_probe.records import LayerInfo
from stability_probe.sinks.tags import LAYER_STATISTICS, MAX_TAGS, OVERVIEW, layer_tags
from stability_probe.sinks.window import Fold, Window
from stability_probe.stats.catalogue import CATALOGUE


def model(layers: int) -> list[LayerInfo]:
    return [LayerInfo(name=f"b.{i}", index=i, heads=4) for i in range(layers)]


def kept(layers: int) -> tuple[list[str], list[int]]:
    tags = layer_tags(model(layers))
    return sorted({name for name, _ in tags}), sorted({index for _, index in tags})


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2000))
def test_the_tags_fit_and_are_a_full_grid(layers: int) -> None:
    tags = layer_tags(model(layers))
    statistics, indices = kept(layers)
    assert len(tags) == len(statistics) * len(indices)
    assert len({tag.name for tag in tags.values()}) == len(tags)
    assert len(tags) + len(OVERVIEW) + 3 <= MAX_TAGS
    if layers:
        assert {"qk_abs_max_logit", "entropy_ratio"} <= set(statistics)
        assert {0, layers - 1} <= set(indices)
        gaps = {b - a for a, b in pairwise(indices)}
        assert not gaps or max(gaps) - min(gaps) <= 1


def test_a_small_model_shows_every_default_statistic_that_can_be_dangerous() -> None:
    dangerous = sorted(
        s.name for s in CATALOGUE.values() if s.default and s.danger and not s.between
    )
    assert kept(16) == (dangerous, list(range(16)))


def test_statistics_go_before_layers() -> None:
    assert kept(48) == (sorted(LAYER_STATISTICS[:3]), list(range(48)))
    assert kept(92) == (sorted(LAYER_STATISTICS[:2]), list(range(92)))
    statistics, indices = kept(96)
    assert statistics == sorted(LAYER_STATISTICS[:2])
    assert len(indices) == 92


def test_what_a_tag_says_of_a_statistic_is_the_catalogue_s() -> None:
    of_statistics = {
        "max_logit": "qk_abs_max_logit",
        "logit_gap_max": "logit_gap",
        "entropy_ratio_min": "entropy_ratio",
        "entropy_ratio_median": "entropy_ratio",
        "softmax_slope_min": "softmax_slope",
        "fp16_headroom_log2_min": "fp16_headroom_log2",
    }
    for tag, name in of_statistics.items():
        assert OVERVIEW[tag].startswith(name)
        assert CATALOGUE[name].meaning in OVERVIEW[tag]
    for (name, _), tag in layer_tags(model(3)).items():
        entry = CATALOGUE[name]
        assert tag.description.endswith(entry.meaning)
        assert f"{name} ({entry.unit})" in tag.description or not entry.unit


def test_the_overview_fits_one_page_of_cards() -> None:
    assert len(OVERVIEW) <= 12


@pytest.mark.parametrize(
    ("fold", "expected"), [("max", 5.0), ("min", -1.0), ("sum", 6.0), ("mean", 2.0)]
)
def test_a_window_folds_what_is_there(fold: Fold, expected: float) -> None:
    window = Window()
    for value in (5.0, None, math.nan, -1.0, math.inf, -math.inf, 2.0):
        window.add("tag", value, fold=fold)
    assert window
    assert window.drain() == {"tag": expected}
    assert not window
    assert window.drain() == {}
