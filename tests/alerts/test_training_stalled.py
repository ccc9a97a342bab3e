from __future__ import annotations

from recording import stream, told, watch

from stability_probe.alerts.training_stalled import TrainingStalled

RULES = (TrainingStalled(),)


def layers(ratio):
    return {"a": lambda s: {"qk_abs_max_logit": [9e3] * 4, "entropy_ratio": [ratio] * 4}}


def stalled(step):
    return 4.3 - 0.1 * min(step / 100, 1)


def test_one_hot_heads_and_a_loss_that_never_fell_warn_after_300_steps():
    alerts = watch(stream(range(1, 400), layers(0.001), loss=stalled), RULES)
    assert told(alerts) == [(302, "training_stalled", "warning")]
    assert "4.3 -> 4.2" in alerts[0].message


def test_uniform_heads_are_info():
    run = stream(range(1, 400), layers(0.999), loss=stalled)
    assert [x[2] for x in told(watch(run, RULES))] == ["info"]


def test_healthy_attention_or_a_loss_that_fell_is_silent():
    assert watch(stream(range(1, 600), layers(0.4), loss=stalled), RULES) == []
    run = stream(range(1, 600), layers(0.001), loss=lambda s: 4.3 * 0.998**s)
    assert watch(run, RULES) == []


def test_after_a_mark_or_from_a_checkpoint_a_flat_loss_is_no_news():
    marked = stream(
        range(1, 800),
        layers(0.001),
        loss=lambda s: 4.3 if s < 100 else 1.0,
        scalars=lambda s: {"phase": "b" if s >= 100 else ""},
    )
    assert watch(marked, RULES) == []
    assert watch(stream(range(5000, 5600), layers(0.001), loss=stalled), RULES) == []


def test_without_a_loss_nothing_is_judged():
    assert watch(stream(range(1, 600), layers(0.001), loss=lambda s: None), RULES) == []
