from __future__ import annotations

import numpy as np
import pytest
from recording import observation, over, record, runaway, stream, told, watch

from stability_probe.alerts.logit_growth import LogitGrowth
from stability_probe.alerts.staircase import Stair
from stability_probe.detect.growth import GrowthTest
from stability_probe.detect.span import Span
from stability_probe.monitor import Monitor
from stability_probe.records import Level, Severity, State

RULES = (LogitGrowth(),)


def growing(step):
    return {"qk_abs_max_logit": [runaway(step)] * 4, "entropy_ratio": [0.5] * 4}


def first_step_by_hand(every=1, start=200, rate=1.02):
    """The first measured step that meets the rule, with one head and no rule code."""
    steps = list(range(every, 600, every))
    smooth = {
        t: np.median([runaway(s, start=start, rate=rate) for s in steps if t - 10 < s <= t])
        for t in steps
    }
    found = {}
    for t in steps:
        past = [s for s in steps if s <= t - 40 and s <= t - 7 * every]
        found[t] = past and t > 40 and smooth[t] > 30 and smooth[t] >= 2 * smooth[past[-1]]
        if found[t] and found.get(t - every):
            return t
    return None


@pytest.mark.parametrize(("every", "alarm"), [(1, 261), (2, 262), (5, 265), (10, 270), (20, 280)])
def test_golden_alarm_steps_at_every_cadence(every, alarm):
    assert first_step_by_hand(every) == alarm
    run = stream(range(1, 300), {"a": growing}, measured=lambda s: s % every == 0)
    assert told(watch(run, RULES)) == [(alarm, "logit_growth", "warning")]


def test_golden_alarm_of_a_plan_that_thins_out():
    run = stream(range(1, 400), {"a": growing}, measured=lambda s: s <= 200 or s % 10 == 0)
    assert told(watch(run, RULES)) == [(270, "logit_growth", "warning")]


@pytest.mark.parametrize("every", [1, 5, 10])
def test_slow_growth_warns_once_the_loss_leaves_its_best(every):
    """1.16 times in 40 steps: only the long window sees it, at any cadence."""

    def slow(step):
        return {"qk_abs_max_logit": runaway(step, start=2000, rate=1.0037)}

    def rising(step):
        return 2.0 + 2e-4 * max(step - 2300, 0)

    def run(loss):
        return stream(range(1, 2700), {"a": slow}, loss=loss, measured=lambda s: s % every == 0)

    assert watch(run(lambda s: 2.0), RULES) == []
    (first, *_) = told(watch(run(rising), RULES))
    assert first[1:] == ("logit_growth", "warning")
    assert 2400 < first[0] <= 2520


def test_slow_growth_that_goes_far_warns_by_itself():
    slow = {"a": lambda s: {"qk_abs_max_logit": runaway(s, start=1000, rate=1.008)}}
    assert told(watch(stream(range(1, 1500), slow), RULES))[0][1:] == ("logit_growth", "warning")


@pytest.mark.parametrize("slower", [1, 4, 10])
def test_the_same_run_slowed_down_is_warned_of_at_the_same_place(slower):
    """Everything ten times slower: the loss and the logits per step, not the measuring."""

    def grow(step):
        return {"qk_abs_max_logit": [runaway(step / slower, start=300)] * 4}

    def rising(step):
        return 2.0 + 0.01 * max(step / slower - 340, 0)

    run = stream(range(slower, 500 * slower, slower), {"a": grow}, loss=rising)
    assert 350 <= told(watch(run, RULES))[0][0] / slower <= 390


def test_a_falling_loss_keeps_it_quiet():
    def falling(step):
        return 5.0 * 0.995**step

    assert watch(stream(range(1, 400), {"a": growing}, loss=falling), RULES) == []


def test_a_level_that_was_always_high_is_no_growth():
    high = {"a": lambda s: {"qk_abs_max_logit": 500.0}}
    assert watch(stream(range(1, 400), high), RULES) == []


def test_the_worst_layer_and_its_growing_heads_are_named():
    def two_of_four(step):
        big = runaway(step, base=20.0)
        return {"qk_abs_max_logit": [big, 12.0, big, 40.0], "entropy_ratio": [0.1, 0.8, 0.3, 0.9]}

    run = stream(
        range(1, 300), {"calm": lambda s: {"qk_abs_max_logit": [5.0] * 4}, "b": two_of_four}
    )
    (alert,) = watch(run, RULES)
    assert (alert.layer, alert.layer_index, alert.heads) == ("b", 1, (0, 2))
    assert alert.statistic == "qk_abs_max_logit"
    assert alert.window == (alert.step - 40, alert.step)
    assert alert.value > alert.limit == 30.0 or alert.value >= alert.limit > 30.0
    assert "entropy ratio 0.2 -> 0.2" in alert.message
    assert "heads 0, 2" in alert.message


def test_of_two_growing_layers_the_larger_is_named():
    layers = {
        "small": lambda s: {"qk_abs_max_logit": runaway(s)},
        "large": lambda s: {"qk_abs_max_logit": 1.2 * runaway(s)},
        "same": lambda s: {"qk_abs_max_logit": 1.2 * runaway(s)},
    }

    def falling_until_280(step):
        return 5.0 * 0.99 ** min(step, 240)

    (alert,) = watch(stream(range(1, 340), layers, loss=falling_until_280), RULES)
    assert alert.layer == "large"  # of equals the first in layer order


def test_one_head_of_four_far_up_is_named_and_is_info():
    lone = {"a": lambda s: {"qk_abs_max_logit": [5.0, 5.0, runaway(s, rate=1.04), 5.0]}}
    (alert,) = watch(stream(range(1, 400), lone), RULES)
    assert (alert.severity, alert.heads) == (Severity.INFO, (2,))
    assert "often hurts nothing" in alert.message


@pytest.mark.parametrize(("runaways", "severity"), [(7, "warning"), (6, "info")])
def test_a_tenth_of_the_heads_warns_once_the_loss_is_above_its_best(runaways, severity):
    """Kimi K2 saw an eighth of its heads run away; a median over heads is blind to it."""

    def few(step):
        return {"qk_abs_max_logit": [runaway(step, rate=1.04)] * runaways + [5.0] * (64 - runaways)}

    run = stream(range(1, 300), {"a": few}, loss=lambda s: 2.0 + 0.002 * max(s - 200, 0))
    assert severity in {severity for _, _, severity in told(watch(run, RULES))}
    assert {s for _, _, s in told(watch(run, RULES))} <= {"info", severity}


def test_two_thousand_noisy_heads_give_no_false_alarm():
    rng = np.random.default_rng(0)
    wobble = rng.normal(size=(64, 32))

    def noisy(layer):
        def at(step):
            slow = np.sin(step / 60 + 7 * wobble[layer])  # heads drift by a factor of 1.8 both ways
            return {"qk_abs_max_logit": 40 * np.exp(0.3 * slow + 0.1 * rng.normal(size=32))}

        return at

    layers = {f"layers.{i}": noisy(i) for i in range(64)}
    run = stream(range(1, 1200, 10), layers, loss=lambda s: 2.0 + 0.03 * rng.normal())
    assert watch(run, RULES) == []


@pytest.mark.parametrize("name", ["qk_abs_max_logit", "abs_max_logit", "max_logit"])
def test_the_first_logit_statistic_present_is_read_and_named(name):
    absent = {n: np.nan for n in ("qk_abs_max_logit", "abs_max_logit") if n != name}
    absent = dict(
        list(absent.items())[: ["qk_abs_max_logit", "abs_max_logit", "max_logit"].index(name)]
    )
    run = stream(range(1, 300), {"a": lambda s: {**absent, name: runaway(s)}})
    (alert,) = watch(run, RULES)
    assert (alert.step, alert.statistic) == (261, name)


def test_the_logit_before_a_soft_cap_is_preferred():
    capped = {"a": lambda s: {"abs_max_logit": 25.0, "qk_abs_max_logit": runaway(s)}}
    (alert,) = watch(stream(range(1, 300), capped), RULES)
    assert alert.statistic == "qk_abs_max_logit"


def test_resolves_after_fifty_quiet_steps_and_arms_again():
    def wave(step):
        up = runaway(step, start=200) if step < 280 else 10.0
        return {"qk_abs_max_logit": up if step < 500 else runaway(step, start=500)}

    alerts = watch(stream(range(1, 600), {"a": wave}), RULES)
    assert [(a.rule, a.state, a.layer) for a in alerts] == [
        ("logit_growth", State.FIRING, "a"),
        ("logit_growth", State.RESOLVED, "a"),
        ("logit_growth", State.FIRING, "a"),
    ]
    fired, resolved, again = (a.step for a in alerts)
    assert fired == 261
    assert resolved == 283 + 50  # 283 is the last step whose ten-step median is still high
    assert again == 561


def test_a_finding_within_fifty_quiet_steps_is_the_same_episode():
    def dip(step):
        return {"qk_abs_max_logit": 10.0 if 270 <= step < 300 else runaway(step)}

    alerts = watch(stream(range(1, 340), {"a": dip}), RULES)
    assert (told(alerts), over(alerts)) == ([(261, "logit_growth", "warning")], [])


def test_missing_samples_neither_silence_nor_resolve():
    def holes(step):
        hole = step % 3 == 0 or 262 <= step < 400
        return {"qk_abs_max_logit": np.nan if hole else runaway(step, rate=1.02, start=150)}

    alerts = watch(stream(range(1, 420), {"a": holes}), RULES)
    assert [rule for _, rule, _ in told(alerts)] == ["logit_growth"]
    assert told(alerts)[0][0] < 262
    assert over(alerts) == []


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_sample_does_not_change_the_alarm(bad):
    for hole in (219, 220, 259):
        run = stream(
            range(1, 300),
            {"a": lambda s, hole=hole: {"qk_abs_max_logit": bad if s == hole else runaway(s)}},
        )
        (alert,) = watch(run, RULES)
        assert abs(alert.step - 261) <= 1


def test_a_layer_that_vanishes_holds_its_episode_and_others_still_count():
    def gone(step):
        return {"qk_abs_max_logit": runaway(step)} if step < 270 else None

    steady = {"gone": gone, "b": lambda s: {"qk_abs_max_logit": 5.0}}
    alerts = watch(stream(range(1, 500), steady), RULES)
    assert told(alerts) == [(261, "logit_growth", "warning")]
    assert over(alerts) == []


def test_a_layer_gone_for_good_does_not_hold_the_rule_for_ever():
    def gone(step):
        return {"qk_abs_max_logit": runaway(step)} if step < 270 else None

    def later(step):
        return {"qk_abs_max_logit": runaway(step, start=1000)}

    alerts = watch(stream(range(1, 1100), {"gone": gone, "b": later}), RULES)
    assert [(a.layer, str(a.state)) for a in alerts] == [
        ("gone", "firing"),
        ("gone", "resolved"),
        ("b", "firing"),
    ]
    assert "no longer measured" in alerts[1].message


def test_layers_that_appear_later_are_judged_by_their_own_past():
    def late(step):
        return {"qk_abs_max_logit": runaway(step, start=300)} if step >= 250 else None

    layers = {"a": lambda s: {"qk_abs_max_logit": [3.0, 4.0]}, "late": late}
    (alert,) = watch(stream(range(1, 400), layers), RULES)
    assert (alert.layer, alert.step) == ("late", 361)


def test_layers_with_different_numbers_of_heads():
    layers = {
        "wide": lambda s: {"qk_abs_max_logit": [3.0] * 8},
        "narrow": lambda s: {"qk_abs_max_logit": [runaway(s)] * 2},
        "single": lambda s: {"qk_abs_max_logit": 4.0},
    }
    (alert,) = watch(stream(range(1, 300), layers), RULES)
    assert (alert.layer, alert.heads, alert.step) == ("narrow", (0, 1), 261)


def test_a_new_phase_starts_the_baseline_again():
    def phase(step):
        return {"phase": "" if step < 240 else "mix B"}

    alerts = watch(stream(range(1, 400), {"a": growing}, scalars=phase), RULES)
    assert told(alerts) == [(281, "logit_growth", "warning")]  # armed 40 steps after the mark


def test_a_jump_at_a_new_phase_is_no_growth():
    layers = {"a": lambda s: {"qk_abs_max_logit": 20.0 if s < 200 else 60.0}}
    marked = stream(range(1, 400), layers, scalars=lambda s: {"phase": "b" if s >= 200 else ""})
    assert watch(marked, RULES) == []
    assert told(watch(stream(range(1, 400), layers), RULES)) == [(205, "logit_growth", "warning")]


@pytest.mark.parametrize("axis", ["sequences", "rows", "ranks"])
def test_more_rows_sequences_or_ranks_in_a_sample_are_no_growth(axis):
    def pooled(step):
        many = step % 50 == 0 or step >= 300
        return {"qk_abs_max_logit": 60.0 if many else 24.0, axis: 32 if many else 1}

    assert watch(stream(range(1, 500), {"a": pooled}), RULES) == []


def test_bounds_and_a_rotating_head_are_no_samples():
    """Records between measured ones change nothing, whatever they hold."""
    layers = {"a": lambda s: {"qk_abs_max_logit": runaway(s)} if s % 5 == 0 else None}
    plain = stream(range(1, 400), layers)
    wild = {"max_logit_low": 1e4, "max_logit_high": 1e9, "rotating_max_logit": 1e4}
    mixed = [
        r if r.observations else record(r.step, observation("a", **wild), level=Level.BRACKET,
                                        loss=r.scalars.loss)
        for r in plain
    ]  # fmt: skip
    assert told(watch(plain, RULES)) == told(watch(mixed, RULES)) != []


def test_growth_is_still_seen_after_the_pooling_changed():
    def pooled(step):
        big = step >= 100
        return {
            "qk_abs_max_logit": runaway(step) * (1.5 if big else 1),
            "sequences": 32 if big else 4,
        }

    assert told(watch(stream(range(1, 300), {"a": pooled}), RULES))[0][0] < 260


def test_another_statistic_takes_over_without_looking_like_growth():
    def swapped(step):
        return {"qk_abs_max_logit": 20.0} if step < 200 else {"max_logit": 60.0}

    assert watch(stream(range(1, 400), {"a": swapped}), RULES) == []


def test_a_run_that_goes_back_is_judged_by_the_steps_it_keeps():
    def failed(step):
        return {"qk_abs_max_logit": 25.0 if step < 200 else 3.0}

    forth = stream(range(1, 255), {"a": failed})
    again = stream(range(200, 300), {"a": lambda s: {"qk_abs_max_logit": 31.0}})
    assert watch(forth + again, RULES) == []  # 31 after 25: the 3 in between never was
    grown = stream(range(200, 300), {"a": lambda s: {"qk_abs_max_logit": 60.0}})
    assert told(watch(forth + grown, RULES)) == [(206, "logit_growth", "warning")]


def test_one_nan_loss_does_not_blind_the_rule():
    run = stream(range(1, 300), {"a": growing}, loss=lambda s: np.nan if s == 100 else 2.0)
    assert told(watch(run, RULES)) == [(261, "logit_growth", "warning")]


def test_a_nan_loss_counts_as_not_falling():
    def loss(step):
        return np.nan if step >= 270 else 5.0 * 0.99**step

    assert told(watch(stream(range(1, 300), {"a": growing}, loss=loss), RULES))[0][0] == 271


def test_the_evaluation_loss_is_used_once_it_reaches_back():
    def scalars(step):
        return {"eval_loss": 5.0 * 0.99**step if step % 5 == 0 else None}

    flat = stream(range(1, 400), {"a": growing}, scalars=scalars)
    assert watch(flat, RULES) == []  # the training loss is flat, the evaluation loss still falls


def test_without_a_loss_only_stronger_growth_warns():
    run = stream(range(1, 400), {"a": growing}, loss=lambda s: None)
    (alert,) = watch(run, RULES)
    assert alert.step == 276  # the median passes 40, and twice its value 60 steps before
    assert alert.severity is Severity.WARNING
    assert "no loss is given" in alert.message
    mild = stream(
        range(1, 400),
        {"a": lambda s: {"qk_abs_max_logit": runaway(s, rate=1.011)}},
        loss=lambda s: None,
    )
    assert watch(mild, RULES) == []  # 1.93 times in 60 steps


def test_armed_says_whether_the_window_is_full():
    monitor = Monitor(RULES)
    states = []
    for r in stream(range(1, 60), {"a": growing}):
        monitor.observe(r)
        states.append(monitor.armed["logit_growth"])
    assert states.index(True) == 40  # at step 41
    assert all(states[40:])


def test_a_layer_without_any_logit_is_never_armed():
    monitor = Monitor(RULES)
    for r in stream(
        range(1, 100), {"a": lambda s: {"qk_abs_max_logit": [np.nan], "entropy": [np.nan]}}
    ):
        assert monitor.observe(r) == []
    assert monitor.armed == {"logit_growth": False}


def test_constants_can_be_changed_and_the_history_keeps_enough():
    patient = GrowthTest(level=30, factor=1.5, window=Span(steps=400))
    slow = LogitGrowth(name="slow", stairs=(Stair(test=patient),))
    run = stream(
        range(1, 2500), {"a": lambda s: {"qk_abs_max_logit": runaway(s, start=800, rate=1.002)}}
    )
    assert told(watch(run, (*RULES, slow)))[0][1] == "slow"


def test_an_unmeasured_step_says_nothing_about_attention():
    run = stream(range(1, 300), {"a": growing}) + [record(s, loss=2.0) for s in range(300, 1000)]
    alerts = watch(run, RULES)
    assert over(alerts) == []
