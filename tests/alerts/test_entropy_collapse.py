from __future__ import annotations

import math

import numpy as np
from recording import runaway, stream, told, watch

from stability_probe.alerts.entropy_collapse import EntropyCollapse
from stability_probe.alerts.logit_growth import LogitGrowth

RULES = (EntropyCollapse(),)


def entropy(step, *, start=200):
    return 0.8 * 0.98 ** max(step - start, 0)


def collapsing(step):
    return {"qk_abs_max_logit": [runaway(step)] * 3, "entropy_ratio": [entropy(step)] * 3}


def info_by_hand():
    def smooth(of, t):
        return np.median([of(s) for s in range(t - 9, t + 1)])

    def found(t):
        return (
            smooth(runaway, t) > 20
            and smooth(runaway, t) >= 1.5 * smooth(runaway, t - 40)
            and smooth(entropy, t) <= 0.6 * smooth(entropy, t - 40)
        )

    return next(t for t in range(60, 400) if found(t) and found(t - 1))


def test_golden_info_then_warning_as_logits_pass_the_level():
    assert info_by_hand() == 241
    alerts = watch(stream(range(1, 300), {"a": collapsing}), RULES)
    assert told(alerts) == [
        (241, "entropy_collapse", "info"),
        (261, "entropy_collapse", "warning"),
    ]
    assert alerts[0].statistic == "entropy_ratio"
    assert math.isclose(alerts[0].limit, 0.6 * 0.8, rel_tol=1e-5)
    assert "fell from 0.8 to" in alerts[0].message


def test_entropy_that_falls_without_growing_logits_is_silent():
    quiet = {"a": lambda s: {"qk_abs_max_logit": 25.0, "entropy_ratio": entropy(s)}}
    assert watch(stream(range(1, 400), quiet), RULES) == []


def test_growing_logits_without_falling_entropy_are_silent():
    shift = {"a": lambda s: {"qk_abs_max_logit": runaway(s), "entropy_ratio": 0.8}}
    assert watch(stream(range(1, 400), shift), RULES) == []


def test_early_learning_below_the_level_is_silent():
    early = {
        "a": lambda s: {
            "qk_abs_max_logit": min(runaway(s, start=60, base=1.0, rate=1.03), 19.0),
            "entropy_ratio": entropy(s, start=60),
        }
    }
    assert watch(stream(range(1, 300), early), RULES) == []


def test_a_falling_loss_keeps_it_silent():
    run = stream(range(1, 300), {"a": collapsing}, loss=lambda s: 5.0 * 0.99**s)
    assert watch(run, RULES) == []


def test_layers_that_see_one_key_have_no_entropy_and_are_not_judged():
    one_key = {
        "one": lambda s: {"qk_abs_max_logit": runaway(s), "entropy_ratio": np.nan},
        "b": lambda s: {"qk_abs_max_logit": 5.0, "entropy_ratio": 0.9},
    }
    rules = (EntropyCollapse(), LogitGrowth())
    alerts = watch(stream(range(1, 300), one_key), rules)
    assert told(alerts) == [(261, "logit_growth", "warning")]
    assert "entropy ratio not known" in alerts[0].message


def test_missing_entropies_hold_the_episode():
    def holes(step):
        return {
            "qk_abs_max_logit": runaway(step),
            "entropy_ratio": np.nan if step > 262 else entropy(step),
        }

    alerts = watch(stream(range(1, 400), {"a": holes}), RULES)
    assert [str(a.state) for a in alerts] == ["firing", "firing"]


def test_it_works_measured_every_ten_steps():
    run = stream(range(1, 300), {"a": collapsing}, measured=lambda s: s % 10 == 0)
    assert told(watch(run, RULES)) == [
        (250, "entropy_collapse", "info"),
        (270, "entropy_collapse", "warning"),
    ]


def test_without_a_loss_it_is_still_told():
    run = stream(range(1, 300), {"a": collapsing}, loss=lambda s: None)
    assert told(watch(run, RULES)) == [
        (241, "entropy_collapse", "info"),
        (276, "entropy_collapse", "warning"),
    ]


def test_half_of_the_heads_are_enough_and_fewer_are_not():
    def some(n):
        def at(step):
            logits = [runaway(step)] * n + [5.0] * (8 - n)
            return {
                "qk_abs_max_logit": logits,
                "entropy_ratio": [entropy(step)] * n + [0.9] * (8 - n),
            }

        return at

    assert watch(stream(range(1, 300), {"a": some(3)}), RULES) == []
    assert watch(stream(range(1, 300), {"a": some(4)}), RULES)[0].heads == (0, 1, 2, 3)
