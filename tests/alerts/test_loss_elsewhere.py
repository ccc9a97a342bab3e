from __future__ import annotations

import numpy as np
import pytest
from recording import runaway, stream, told, watch

from stability_probe.alerts.loss_elsewhere import STAYS, LossDivergenceElsewhere

RULES = (LossDivergenceElsewhere(),)
NOISE = np.random.default_rng(0).normal(0.0, 0.1, size=1000)
CALM = {"a": lambda s: {"qk_abs_max_logit": [12.0] * 4}}


def diverging(step):
    return 2.0 + NOISE[step] + 0.015 * max(step - 300, 0)


def test_a_loss_that_leaves_while_attention_is_calm_is_told_in_any_unit():
    alerts = watch(stream(range(1, 400), CALM, loss=diverging), RULES)
    assert told(alerts)[0][1:] == ("loss_divergence_elsewhere", "info")
    assert 305 < told(alerts)[0][0] < 345
    assert "attention is calm" in alerts[0].message
    assert alerts[0].layer is None
    kilo = watch(stream(range(1, 400), CALM, loss=lambda s: 1e3 * diverging(s)), RULES)
    assert told(kilo) == told(alerts)


def test_a_loss_that_leaps_is_a_warning():
    run = stream(range(1, 360), CALM, loss=lambda s: 2.0 + NOISE[s] + (s > 300))
    assert told(watch(run, RULES))[-1][1:] == ("loss_divergence_elsewhere", "warning")


def test_it_is_silent_while_logits_grow_or_are_high():
    growing = {"a": lambda s: {"qk_abs_max_logit": [runaway(s, start=250)] * 4}}
    assert told(watch(stream(range(1, 350), growing, loss=diverging), RULES)) == []
    high = {"a": lambda s: {"qk_abs_max_logit": [300.0] * 4}}
    assert told(watch(stream(range(1, 400), high, loss=diverging), RULES)) == []


@pytest.mark.parametrize("rise", [0.0, 0.1])
def test_noise_and_a_bad_batch_are_silent(rise):
    def loss(step):
        return 2.0 + NOISE[step] + (3 * rise if step == 200 else 0.0)

    assert watch(stream(range(1, 900), CALM, loss=loss), RULES) == []


def test_a_drift_of_the_fixed_batch_alone_is_not_enough():
    def scalars(step):
        return {"eval_loss": 2.0 + 1e-3 * max(step - 200, 0) if step % 5 == 0 else None}

    run = stream(range(1, 500), CALM, loss=lambda s: 2.0 + NOISE[s], scalars=scalars)
    assert watch(run, RULES) == []


def test_it_needs_samples_in_a_row():
    few = list(range(1, 305 + STAYS))
    assert told(watch(stream(few, CALM, loss=lambda s: 2.0 + (s >= 305)), RULES)) != []
    assert told(watch(stream(few[:-1], CALM, loss=lambda s: 2.0 + (s >= 305)), RULES)) == []
