from __future__ import annotations

import re

import numpy as np
import pytest
from recording import stream, told, watch

from stability_probe.alerts.fp16_forecast import Fp16Forecast

RULES = (Fp16Forecast(),)
RATE = 1.01


def growing(noise=0.0, *, real=1.0, rate=RATE, seed=0):
    rng = np.random.default_rng(seed)

    def at(step):
        product = 10.0 * rate**step * np.exp(noise * rng.normal(size=2))
        return {
            "qk_abs_max_logit": product / 8,
            "fp16_headroom_log2": np.log2(65504 / product),
            "fp16_scores": [real] * 2,
        }

    return {"a": at}


END = np.log(65504 / 10) / np.log(RATE)  # the step of the overflow, 883


@pytest.mark.parametrize("every", [1, 10])
def test_steady_growth_is_forecast_to_the_step(every):
    run = stream(range(1, 500), growing(), measured=lambda s: s % every == 0)
    (alert,) = watch(run, RULES)
    assert END - 500 <= alert.step <= END - 500 + 2 * every
    about, low, high = map(
        int, re.search(r"about (\d+) steps \((\d+) to (\d+)\)", alert.message).groups()
    )
    assert alert.step + about == pytest.approx(END, abs=2)
    assert low <= about <= high


def test_the_interval_of_noisy_growth_holds_the_truth_mostly():
    held = []
    for seed in range(20):
        alert = watch(stream(range(1, 700), growing(0.05, seed=seed)), RULES)[0]
        low, high = map(int, re.search(r"\((\d+) to (\d+)\)", alert.message).groups())
        held.append(low <= END - alert.step <= high)
    assert np.mean(held) >= 0.7


def test_noise_without_growth_and_growth_without_float16_scores_are_silent():
    assert watch(stream(range(1, 600), growing(0.2, rate=1.0)), RULES) == []
    assert watch(stream(range(1, 800), growing(real=0.0)), RULES) == []


def test_a_head_that_is_over_already_is_left_to_the_other_rule():
    assert told(watch(stream(range(900, 1000), growing()), RULES)) == []
