from __future__ import annotations

import math

import pytest
from recording import observation, record, runaway, stream, told, watch

from stability_probe.alerts.nonfinite import NonFinite
from stability_probe.alerts.nonfinite_loss import NonFiniteLoss
from stability_probe.records import FirstBad, Severity

RULES = (NonFinite(), NonFiniteLoss())
CALM = observation("a", 0, qk_abs_max_logit=[12.0], nonfinite=[0])
BAD = observation("a", 0, qk_abs_max_logit=[12.0], nonfinite=[4])


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_critical_and_attention_is_cleared(loss):
    (alert,) = watch([record(1, CALM, loss=2.0), record(2, loss=loss)], RULES)
    assert (alert.step, alert.rule, alert.severity) == (2, "nonfinite_loss", Severity.CRITICAL)
    assert (alert.statistic, alert.value) == ("loss", None)
    assert "attention is calm" in alert.message
    assert "12" in alert.message
    assert "not the cause" in alert.cause


def test_says_so_when_attention_is_not_calm():
    run = stream(range(1, 290), {"a": lambda s: {"qk_abs_max_logit": runaway(s)}})
    (alert,) = watch([*run, record(290, loss=math.nan)], RULES)
    assert "attention is not calm: logits of a grew from" in alert.message
    assert alert.cause == ""


def test_says_so_when_attention_was_never_measured():
    (alert,) = watch([record(1, loss=math.nan)], RULES)
    assert "has not been measured" in alert.message


def test_attention_that_is_not_finite_speaks_for_both():
    alerts = watch([record(1, BAD, loss=math.nan), record(2, loss=math.nan)], RULES)
    assert told(alerts) == [(1, "nonfinite", "critical")]


def test_the_sentinel_speaks_for_both_too():
    records = [
        record(1, CALM, loss=2.0),
        record(5, loss=math.nan, first_bad=(FirstBad("a", 0, "q", 4),)),
        record(6, loss=math.nan),
    ]
    assert told(watch(records, RULES)) == [(5, "nonfinite", "critical")]


@pytest.mark.parametrize("again", [{"step": 3}, {"step": 7, "phase": "after the crash"}])
def test_an_old_event_does_not_excuse_a_bad_loss_after_going_back(again):
    bad = record(5, loss=math.nan, first_bad=(FirstBad("a", 0, "q", 4),))
    step = again.pop("step")
    alerts = watch([record(1, CALM, loss=2.0), bad, record(step, loss=math.nan, **again)], RULES)
    assert told(alerts) == [(5, "nonfinite", "critical"), (step, "nonfinite_loss", "critical")]


def test_masked_rows_do_not_excuse_a_bad_loss():
    bad = (FirstBad("a", 0, "output", 4, explained=True),)
    alerts = watch([record(1, CALM), record(5, loss=math.nan, first_bad=bad)], RULES)
    assert told(alerts) == [(5, "nonfinite", "warning"), (5, "nonfinite_loss", "critical")]


def test_a_skipped_update_is_the_scaler_at_work():
    (alert,) = watch([record(3, CALM, loss=2.0, grad_norm=math.inf, skipped=True)], RULES)
    assert (alert.severity, alert.statistic) == (Severity.INFO, "grad_norm")
    assert "GradScaler" in alert.message


def test_a_gradient_that_was_not_skipped_is_a_warning():
    (alert,) = watch([record(3, CALM, loss=2.0, grad_norm=math.nan)], RULES)
    assert alert.severity is Severity.WARNING
    assert "not reported as skipped" in alert.message


def test_a_scaler_search_that_ends_in_a_nan_loss_rises():
    records = [
        record(3, CALM, loss=2.0, grad_norm=math.inf, skipped=True),
        record(4, CALM, loss=2.0, grad_norm=math.inf, skipped=True),
        record(5, CALM, loss=math.nan, grad_norm=math.nan, skipped=True),
    ]
    assert told(watch(records, RULES)) == [
        (3, "nonfinite_loss", "info"),
        (5, "nonfinite_loss", "critical"),
    ]


def test_an_evaluation_loss_counts():
    (alert,) = watch([record(3, CALM, loss=2.0, eval_loss=math.nan)], RULES)
    assert (alert.statistic, alert.severity) == ("eval_loss", Severity.CRITICAL)
    assert "evaluation loss" in alert.message


def test_one_nan_loss_then_normal_resolves_and_arms_again():
    def loss(step):
        return math.nan if step in (10, 100) else 2.0

    run = stream(range(1, 120), {"a": lambda s: {"nonfinite": 0.0}}, loss=loss)
    alerts = watch(run, RULES)
    assert [(a.step, str(a.state)) for a in alerts] == [
        (10, "firing"),
        (60, "resolved"),
        (100, "firing"),
    ]


def test_steps_without_any_loss_are_not_judged():
    assert watch([record(s, CALM) for s in range(1, 50)], RULES) == []
