from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from recording import runaway, stream, told, watch

from stability_probe.alerts.attention_divergence import AttentionDivergence
from stability_probe.records import Severity

RULES = (AttentionDivergence(),)


def growing(step):
    return {"qk_abs_max_logit": [runaway(step, rate=1.015)] * 2, "entropy_ratio": [0.6] * 2}


def rising(step):
    return 2.0 + max(step - 300, 0) * 0.01


def first_excess_by_hand(least_z=3.0):
    """Without noise the scale is its floor, a thousandth of the average."""
    average = best = 2.0
    found = [False]
    for step in range(1, 500):
        average += 0.1 * (rising(step) - average)
        found.append((average - best) / (1e-3 * average) >= least_z)
        if found[-1] and found[-2]:
            return step
    return None


def test_golden_alarm_when_the_loss_leaves_its_best_behind():
    alarm = first_excess_by_hand()
    assert alarm == 305
    (alert,) = watch(stream(range(1, 340), {"a": growing}, loss=rising), RULES)
    assert (alert.step, alert.severity, alert.layer) == (alarm, Severity.CRITICAL, "a")
    assert "above its best" in alert.message
    assert "entropy ratio 0.6 -> 0.6" in alert.message
    assert "checkpoint" in alert.remedies[0]


def test_growth_without_excess_is_not_critical():
    assert watch(stream(range(1, 400), {"a": growing}), RULES) == []


def test_excess_without_growth_is_not_attention():
    calm = {"a": lambda s: {"qk_abs_max_logit": 50.0}}
    assert watch(stream(range(1, 400), calm, loss=rising), RULES) == []


def test_the_z_is_a_constant():
    stairs = tuple(replace(stair, least_z=10.0) for stair in AttentionDivergence().stairs)
    wide = (AttentionDivergence(stairs=stairs),)
    run = stream(range(1, 340), {"a": growing}, loss=rising)
    assert told(watch(run, wide))[0][0] == first_excess_by_hand(10.0) > 305


def test_the_margin_is_the_noise_of_the_loss_whatever_its_unit():
    noise = np.random.default_rng(0).normal(0.0, 0.2, size=400)

    def step_of(unit):
        run = stream(range(1, 400), {"a": growing}, loss=lambda s: unit * (rising(s) + noise[s]))
        return told(watch(run, RULES))[0][0]

    assert step_of(1.0) == step_of(1e-3) == step_of(1e3) > 305


def test_nothing_is_critical_without_a_loss():
    assert watch(stream(range(1, 400), {"a": growing}, loss=lambda s: None), RULES) == []


def test_a_nan_loss_is_infinitely_bad_and_one_alone_is_forgotten():
    from_270 = stream(range(1, 300), {"a": growing}, loss=lambda s: np.nan if s >= 290 else 2.0)
    assert told(watch(from_270, RULES)) == [(291, "attention_divergence", "critical")]
    once = stream(range(1, 400), {"a": growing}, loss=lambda s: np.nan if s == 100 else 2.0)
    assert watch(once, RULES) == []
    later = stream(range(1, 340), {"a": growing}, loss=lambda s: np.nan if s == 100 else rising(s))
    assert told(watch(later, RULES)) == [(305, "attention_divergence", "critical")]


def test_a_new_phase_forgets_the_best_loss():
    def phase(step):
        return {"phase": "longer context" if step >= 240 else ""}

    def shifted(step):
        return 2.0 if step < 240 else 3.0

    assert watch(stream(range(1, 400), {"a": growing}, loss=shifted, scalars=phase), RULES) == []
    unmarked = stream(range(1, 400), {"a": growing}, loss=shifted)
    assert told(watch(unmarked, RULES))[0][1:] == ("attention_divergence", "critical")


@pytest.mark.parametrize("seldom", [5, 100])
def test_a_fixed_evaluation_batch_overrules_a_noisy_training_loss(seldom):
    noise = np.random.default_rng(0).normal(0, 1.0, size=400)

    def flat(step):
        return {"eval_loss": 2.0 if step % seldom == 0 else None}

    run = stream(range(1, 400), {"a": growing}, loss=lambda s: 2.0 + noise[s], scalars=flat)
    assert watch(run, RULES) == []

    def bad(step):
        return {"eval_loss": 2.0 + (step >= 300) if step % seldom == 0 else None}

    run = stream(range(1, 320), {"a": growing}, loss=lambda s: 2.0, scalars=bad)
    assert told(watch(run, RULES)) == [(301, "attention_divergence", "critical")]
