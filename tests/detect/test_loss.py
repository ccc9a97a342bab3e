from __future__ import annotations

import math

import numpy as np
import pytest

from stability_probe.detect.loss import RATE, LossTrack


def track(losses, *, every=1, keep=120) -> LossTrack:
    result = LossTrack(keep=keep)
    for i, loss in enumerate(losses):
        result.update((i + 1) * every, loss)
    return result


def test_the_average_is_an_exponential_one():
    losses = np.random.default_rng(0).normal(2.0, 0.1, size=200)
    weights = RATE * (1 - RATE) ** np.arange(200)[::-1]
    weights[0] /= RATE  # the first loss starts the average
    assert track(losses).value == pytest.approx(float(weights @ losses), rel=1e-12)


def test_a_loss_given_every_tenth_step_is_averaged_over_the_same_time():
    sparse = track([4.0, 2.0], every=10)
    dense = track([4.0] + [2.0] * 10)
    assert sparse.value == pytest.approx(dense.value, rel=1e-12)


def test_excess_is_measured_from_the_best_average():
    result = track([2.0] * 100 + [1.0] * 300 + [1.5] * 100)
    assert result.excess == pytest.approx(0.5, abs=1e-3)
    assert track([2.0] * 30).excess is None  # the slow average has not settled


def test_z_is_the_excess_over_the_noise_of_the_average():
    noise = np.random.default_rng(1).normal(0.0, 0.1, size=2000)
    hurt = track([*(2.0 + noise), *(2.3 + noise[:100])])
    assert hurt.scale == pytest.approx(0.1 * math.sqrt(0.1 / 1.9), rel=0.25)
    assert hurt.z == hurt.excess / hurt.scale
    scaled = track([7.0 * x for x in [*(2.0 + noise), *(2.3 + noise[:100])]])
    assert scaled.z == pytest.approx(hurt.z)  # any unit


def test_z_of_a_flat_noisy_loss_stays_small():
    zs = []
    for seed in range(5):
        result = LossTrack(keep=120)
        for step, x in enumerate(np.random.default_rng(seed).normal(2.0, 0.1, size=1000), 1):
            result.update(step, x)
            if step > 200:
                zs.append(result.z)
    assert np.quantile(zs, 0.99) < 5.0
    assert np.median(zs) < 2.5


def test_one_noisy_batch_does_not_widen_the_noise():
    calm, hit = [2.0, 2.1] * 60, [2.0, 2.1] * 30 + [9.0, 2.1] + [2.0, 2.1] * 29
    assert track(hit).scale == pytest.approx(track(calm).scale, rel=0.01)


def test_one_loss_that_is_not_finite_is_bad_now_and_forgotten_after():
    clean, hurt = track([2.0] * 80), track([2.0] * 80)
    hurt.update(81, math.nan)
    assert hurt.value == hurt.excess == math.inf
    assert hurt.falling(81, within=40, least=2.0) is False
    for t in (clean, hurt):
        t.update(82, 2.0)
    assert hurt.value == clean.value == 2.0
    assert hurt.excess == 0.0


def test_a_run_that_starts_with_nan_is_judged_from_its_first_finite_loss():
    result = track([math.nan, math.inf])
    assert result.value == math.inf
    result.update(3, 2.5)
    assert (result.value, result.excess) == (2.5, None)


def test_falling_by_more_than_the_noise():
    assert track([2.0, 2.4] * 48 + [1.9, 2.3] * 2).falling(100, within=40, least=2.0) is False
    falling = track(np.linspace(4.0, 2.0, 100))
    assert falling.falling(100, within=40, least=2.0) is True
    assert falling.falling(100, within=40, least=1e4) is False


def test_falling_is_unknown_until_the_loss_reaches_back():
    assert track([2.0] * 40).falling(40, within=40, least=2.0) is None
    assert track([2.0] * 41).falling(41, within=40, least=2.0) is False
    assert track([]).falling(1, within=40, least=2.0) is None


def test_a_negative_loss_falls_too():
    assert track(np.linspace(-1.0, -3.0, 100)).falling(100, within=40, least=2.0) is True
    assert track(np.linspace(-3.0, -1.0, 100)).falling(100, within=40, least=2.0) is False
    assert track([-3.0] * 50 + [-2.95] * 50).falling(100, within=40, least=2.0) is False


def test_a_rare_loss_is_compared_with_the_one_before_and_held_between():
    rare = track([4.0, 3.0], every=500)
    assert rare.falling(1300, within=40, least=2.0) is True
    assert rare.past(1300, within=40) == 4.0


def test_a_missing_loss_changes_nothing():
    result = track([2.0, 1.0])
    before = (result.value, result.excess)
    result.update(3, None)
    assert (result.value, result.excess) == before


def test_rewind_restores_average_and_best():
    there = track(np.linspace(3.0, 2.0, 60))
    back = track([*np.linspace(3.0, 2.0, 60), *([9.0] * 10), *([0.1] * 10)])
    back.rewind(61)
    assert (back.value, back.excess) == (there.value, there.excess)


def test_memory_is_bounded():
    result = track([2.0] * 5000)
    assert len(result._points) <= 122
