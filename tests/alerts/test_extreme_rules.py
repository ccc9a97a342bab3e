from __future__ import annotations

import numpy as np
from recording import over, stream, told, watch

from stability_probe.alerts.extreme_rules import (
    AttentionUniform,
    SaturatedSinceStart,
    SoftmaxSaturation,
)

ALL = (SoftmaxSaturation(), AttentionUniform(), SaturatedSinceStart())


def ratios(of, *, heads=4, bad=4, others=0.5):
    def at(step):
        values = [of(step)] * bad + [others] * (heads - bad)
        return {"qk_abs_max_logit": [10.0] * heads, "entropy_ratio": values}

    return {"a": at}


def falls(step):
    return 0.6 * 0.9 ** max(step - 200, 0)


def rises(step):
    return 0.5 if step < 200 else 0.999


def test_half_of_the_heads_becoming_one_hot_is_info_and_a_warning_once_it_hurts():
    alerts = watch(stream(range(1, 260), ratios(falls, bad=2)), ALL)
    assert [x[1:] for x in told(alerts)] == [("softmax_saturation", "info")]
    assert alerts[0].heads == (0, 1)
    hurt = stream(range(1, 300), ratios(falls), loss=lambda s: 2.0 + 0.01 * max(s - 210, 0))
    assert ("softmax_saturation", "warning") in [x[1:] for x in told(watch(hurt, ALL))]


def test_fewer_heads_are_silent():
    assert watch(stream(range(1, 300), ratios(falls, heads=8, bad=3)), ALL) == []


def test_heads_that_become_uniform_are_told():
    alerts = watch(stream(range(1, 260), ratios(rises)), ALL)
    assert [x[1:] for x in told(alerts)] == [("attention_uniform", "info")]
    assert "0.999" in alerts[0].message


def test_heads_that_always_were_at_an_end_are_no_drift():
    assert watch(stream(range(1, 600), ratios(lambda s: 0.999)), ALL) == []
    alerts = watch(stream(range(1, 600), ratios(lambda s: 0.001)), ALL)
    assert told(alerts) == [(8, "saturated_since_start", "info")]
    assert over(alerts) == []
    assert "design" in alerts[0].message


def test_saturation_that_begins_later_was_not_there_since_the_start():
    rules = (SaturatedSinceStart(),)
    assert watch(stream(range(1, 300), ratios(lambda s: 0.5 if s < 5 else 0.001)), rules) == []
    rare = stream(range(1, 300), ratios(lambda s: 0.001), measured=lambda s: s % 20 == 0)
    assert watch(rare, rules) == []  # eight samples take too long to be a start


def test_an_entropy_about_the_limit_does_not_flicker():
    def about(step):
        return 0.6 if step < 200 else 0.02 + 0.01 * np.sin(step)

    alerts = watch(stream(range(1, 400), ratios(about)), (SoftmaxSaturation(),))
    assert len(told(alerts)) == 1


def test_missing_entropies_are_not_judged():
    assert watch(stream(range(1, 300), ratios(lambda s: np.nan, others=np.nan)), ALL) == []
