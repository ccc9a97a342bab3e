from __future__ import annotations

from recording import over, stream, told, watch

from stability_probe.alerts.loss_missing import LossMissing

RULES = (LossMissing(),)
LAYERS = {"a": lambda s: {"qk_abs_max_logit": 5.0}}


def test_one_info_alert_after_the_burn_in():
    alerts = watch(stream(range(1, 500), LAYERS, loss=lambda s: None), RULES)
    assert told(alerts) == [(31, "loss_missing", "info")]
    assert "loss" in alerts[0].remedies[0]


def test_a_loss_that_comes_later_ends_it():
    run = stream(range(1, 300), LAYERS, loss=lambda s: None if s < 100 else 2.0)
    alerts = watch(run, RULES)
    assert (told(alerts), over(alerts)) == ([(31, "loss_missing", "info")], [(149, "loss_missing")])


def test_a_loss_or_an_evaluation_loss_is_enough():
    assert watch(stream(range(1, 100), LAYERS), RULES) == []
    evaluated = stream(
        range(1, 100),
        LAYERS,
        loss=lambda s: None,
        scalars=lambda s: {"eval_loss": 2.0 if s == 20 else None},
    )
    assert watch(evaluated, RULES) == []


def test_a_resumed_run_waits_from_its_own_first_step():
    run = stream(range(5000, 5100), LAYERS, loss=lambda s: None)
    assert told(watch(run, RULES)) == [(5030, "loss_missing", "info")]
