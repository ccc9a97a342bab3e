from __future__ import annotations

import numpy as np
import pytest
from recording import observation, record, told, watch

from stability_probe.alerts.fp16_overflow import Fp16Overflow
from stability_probe.records import Severity

RULES = (Fp16Overflow(),)


def layer(headroom, real, name="a", index=0, **more):
    heads = np.atleast_1d(np.asarray(headroom, dtype=float))
    return observation(
        name, index, fp16_headroom_log2=heads, fp16_scores=[real] * len(heads), **more
    )


def headroom_of(product):
    return -np.inf if np.isinf(product) else np.log2(65504 / product)


@pytest.mark.parametrize(
    ("product", "real", "severity"),
    [
        (65504 / 4 * 0.99, 1, None),
        (65504 / 4 * 1.01, 1, "warning"),
        (65504 * 0.99, 1, "warning"),
        (65504 * 1.01, 1, "critical"),
        (np.inf, 1, "critical"),
        (65504 * 0.99, 0, None),
        (65504 * 1.01, 0, "info"),
    ],
)
def test_limits_at_step_one(product, real, severity):
    alerts = watch([record(1, layer(headroom_of(product), real))], RULES)
    expected = [] if severity is None else [(1, "fp16_overflow", severity)]
    assert told(alerts) == expected


def test_potential_overflow_says_that_nothing_is_wrong():
    (alert,) = watch([record(1, layer([5.0, -1.0], 0))], RULES)
    assert alert.severity is Severity.INFO
    assert alert.heads == (1,)
    assert "potential only" in alert.message
    assert "2 times the largest float16" in alert.message


def test_real_scores_name_the_worst_layer_and_rise_with_it():
    records = [
        record(1, layer(1.5, 1, "a", 0), layer(1.0, 1, "b", 1)),
        record(2, layer(1.5, 1, "a", 0), layer(1.0, 1, "b", 1)),
        record(3, layer(-0.5, 1, "a", 0), layer(1.0, 1, "b", 1)),
    ]
    alerts = watch(records, RULES)
    assert [(a.step, a.layer, str(a.severity)) for a in alerts] == [
        (1, "b", "warning"),
        (3, "a", "critical"),
    ]
    assert "float32" in alerts[0].remedies[0]


def test_without_word_of_the_scores_it_is_only_potential():
    (alert,) = watch([record(1, observation("a", 0, fp16_headroom_log2=[-1.0]))], RULES)
    assert alert.severity is Severity.INFO


def test_absent_headroom_is_not_judged():
    assert (
        watch([record(1, layer([np.nan, np.nan], 1), observation("b", 1, entropy=1))], RULES) == []
    )


def test_the_cause_is_split():
    def at(step):
        grow = 1.05 ** max(step - 100, 0)
        return record(
            step,
            layer(
                headroom_of(900.0 * grow),
                1,
                qk_abs_max_logit=[10.0 * grow],
                entropy_ratio=[0.9 / grow],
                q_norm_max=[30.0 * grow],
                k_norm_max=[30.0],
            ),
        )

    (alert,) = watch([at(s) for s in range(1, 165)], RULES)
    assert alert.severity is Severity.WARNING
    assert "|q| 7.04x · |k| 1.00x" in alert.cause  # 1.05^40
    assert "entropy ratio" in alert.message
    assert "QK-norm" in " ".join(alert.remedies)
