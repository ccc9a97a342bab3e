from __future__ import annotations

import pytest
from recording import runaway, stream, watch

from stability_probe.alerts import actions
from stability_probe.alerts.cause import Driver, driver, entropy_change, growth_cause, named_heads
from stability_probe.alerts.evidence import Evidence
from stability_probe.alerts.logit_growth import LogitGrowth

RULES = (LogitGrowth(),)


def evidence(factors, **more):
    fields = {"heads": (0,), "logit": (1.0, 2.0), "entropy_ratio": None, "input_growth": None}
    return Evidence(**{**fields, **more}, factors=factors)


def alert_for(**values):
    """The alert of a run whose logit is the product of the given factors of its growth."""

    def at(step):
        logit = runaway(step)
        return {
            "qk_abs_max_logit": [logit] * 2,
            **{name: [of(logit / 10.0)] * 2 for name, of in values.items()},
        }

    (alert,) = watch(stream(range(1, 300), {"a": at}), RULES)
    return alert


def constant(grown):
    return 3.0


def whole(grown):
    return 3.0 * grown


def root(grown):
    return 3.0 * grown**0.5


def test_the_norms_are_split_and_qk_norm_is_advised():
    alert = alert_for(q_norm_max=root, k_norm_max=root)
    assert alert.cause.startswith("Queries and keys grew longer")
    assert "|q| 1.49x · |k| 1.49x · the rest 1.00x" in alert.cause  # 1.02^40 = 2.21 = 1.49^2
    assert alert.remedies[0] == actions.QK_NORM
    assert actions.SOFT_CAP in alert.remedies


def test_norms_that_do_not_explain_it_are_said_not_to():
    alert = alert_for(q_norm_max=constant, k_norm_max=constant)
    assert "do not explain it" in alert.cause
    assert alert.remedies[0] == actions.LOWER_RATE


PEAK = {
    "scale": constant,
    "peak_q_norm": constant,
    "peak_k_norm": constant,
    "peak_cosine": constant,
}


@pytest.mark.parametrize(
    ("grows", "words", "remedy"),
    [
        ("scale", "scale on q.k grew", actions.CLAMP_SCALE),
        ("peak_cosine", "turned the same way", actions.LOWER_RATE),
        ("peak_q_norm", "grew longer", actions.QK_NORM),
    ],
)
def test_the_peak_tells_scale_norms_and_alignment_apart(grows, words, remedy):
    alert = alert_for(**{**PEAK, grows: whole})
    assert words in alert.cause
    assert "scale" in alert.cause
    assert "cosine" in alert.cause
    assert alert.remedies[0] == remedy


def test_the_peak_is_preferred_to_the_largest_norms():
    alert = alert_for(**{**PEAK, "scale": whole}, q_norm_max=whole, k_norm_max=constant)
    assert "scale on q.k grew" in alert.cause


def test_a_growing_input_is_a_part_of_the_cause():
    alert = alert_for(q_norm_max=whole, k_norm_max=constant, input_rms=root)
    assert "the layer's input grew 1.49x" in alert.cause
    assert alert.remedies[-1] == actions.LOOK_AT_INPUT
    assert actions.LOOK_AT_INPUT not in alert_for(q_norm_max=whole, k_norm_max=constant).remedies


def test_without_norms_the_cause_is_said_to_be_unknown():
    alert = alert_for()
    assert "cannot be split" in alert.cause
    assert actions.RECORD_NORMS in alert.remedies


def test_only_heads_that_grew_are_looked_at():
    def at(step):
        big = runaway(step, base=20.0)
        return {
            "qk_abs_max_logit": [big, 40.0, big],
            "q_norm_max": [big, 1.0, big],
            "k_norm_max": [1.0, 1.0, 1.0],
            "entropy_ratio": [0.1, 0.9, 0.3],
        }

    (alert,) = watch(stream(range(1, 300), {"a": at}), RULES)
    assert alert.heads == (0, 2)
    assert "|q| 2.06x · |k| 1.00x · the rest 1.00x" in alert.cause  # head 1 did not grow
    assert "entropy ratio 0.2 -> 0.2" in alert.message  # its 0.9 is not in the median


def test_the_message_is_one_sentence_with_every_part():
    alert = alert_for(q_norm_max=root, k_norm_max=root, entropy_ratio=lambda g: 0.9 / g)
    assert alert.message == (
        "Attention logits of a grew from 13.9 to 30.6 in 40 steps (heads 0, 1; entropy ratio "
        "0.65 -> 0.29) while the loss has stopped falling (averaged 2 -> 2)."
    )


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ({"|q|": 2.0, "|k|": 1.5, "the rest": 2.5}, Driver.NORMS),
        ({"|q|": 1.1, "|k|": 1.0, "the rest": 2.5}, Driver.REST),
        ({"scale": 3.0, "|q|": 1.5, "|k|": 1.5, "cosine": 1.0}, Driver.SCALE),
        ({"scale": 1.0, "|q|": 0.5, "|k|": 1.0, "cosine": 4.0}, Driver.ALIGNMENT),
        ({"|q|": 0.9, "|k|": 0.9, "the rest": 0.9}, Driver.UNKNOWN),
        ({}, Driver.UNKNOWN),
    ],
)
def test_driver_is_the_largest_share(factors, expected):
    assert driver(evidence(factors)) is expected
    assert growth_cause(evidence(factors))
    assert actions.growth_remedies(evidence(factors))


def test_words_for_heads_and_entropy():
    assert named_heads((3,)) == "head 3"
    assert named_heads((0, 2)) == "heads 0, 2"
    assert named_heads(tuple(range(20))) == "heads 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"
    assert named_heads(()) == "heads not known"
    assert entropy_change(evidence({}, entropy_ratio=(0.625, 0.3))) == "entropy ratio 0.62 -> 0.3"
    assert entropy_change(evidence({})) == "entropy ratio not known"
