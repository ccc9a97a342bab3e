"""The catalogue is complete, consistent, and free of torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError
from typing import get_args

import pytest
import torch

from stability_probe.stats.catalogue import (
    BETWEEN_SET,
    CATALOGUE,
    DEFAULT_SET,
    EXACT_SET,
    Danger,
    Pooling,
    Scope,
    Statistic,
)
from stability_probe.stats.measure import measure


def test_it_lists_exactly_what_measure_gives():
    values = measure(torch.randn(2, 3, 4), torch.randn(2, 3, 4))
    assert tuple(values) == EXACT_SET
    assert set(CATALOGUE) == {*EXACT_SET, *BETWEEN_SET}


@pytest.mark.parametrize("statistic", CATALOGUE.values(), ids=CATALOGUE.keys())
def test_every_row_says_what_it_is(statistic: Statistic):
    assert CATALOGUE[statistic.name] is statistic
    assert statistic.meaning.endswith(".")
    assert statistic.not_measured == "" or statistic.not_measured.endswith(".")
    assert statistic.pooling in get_args(Pooling)
    assert statistic.danger in get_args(Danger)
    assert statistic.scope in get_args(Scope)


def test_the_default_set():
    assert tuple(s.name for s in CATALOGUE.values() if s.default) == DEFAULT_SET
    assert set(DEFAULT_SET) == {
        *("qk_abs_max_logit", "abs_max_logit", "logit_gap", "entropy", "entropy_ratio"),
        *("softmax_slope", "jacobian_trace", "q_norm_max", "k_norm_max", "fp16_headroom_log2"),
        *("fp16_scores", "nonfinite", "max_logit_low", "max_logit_high"),
    }


def test_nobody_can_change_it():
    with pytest.raises(TypeError):
        CATALOGUE["entropy"] = CATALOGUE["entropy_ratio"]
    with pytest.raises(FrozenInstanceError):
        CATALOGUE["entropy"].unit = "bits"


def test_it_imports_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from stability_probe.stats.catalogue import CATALOGUE\n"
        "assert len(CATALOGUE) > 40"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
