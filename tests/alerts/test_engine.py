from __future__ import annotations

from dataclasses import dataclass

from recording import observation, record

from stability_probe.alerts.rule import Finding, announce
from stability_probe.detect.span import SHORT
from stability_probe.monitor import Monitor
from stability_probe.records import Severity


@dataclass(frozen=True)
class Scripted:
    """A rule whose verdicts are written down: per step, layer to severity or None."""

    script: dict
    each_layer: bool = False
    name: str = "scripted"
    lookback = SHORT

    def evaluate(self, history, step):
        return {
            layer: None if severity is None else Finding(severity=Severity(severity), layer=layer)
            for layer, severity in self.script.get(step, {}).items()
        }

    def explain(self, history, finding):
        return announce(self.name, finding, history, message="x", remedies=("y",), cause="z")


def play(script, *, until, measured=True, **options):
    monitor = Monitor([Scripted(script, **options)])
    seen = (observation("a", 0, x=1.0),) if measured else ()
    alerts = [a for s in range(1, until) for a in monitor.observe(record(s, *seen))]
    return [(a.step, str(a.state), str(a.severity), a.layer) for a in alerts]


def calm(layer, steps):
    return {step: {layer: None} for step in steps}


def test_an_episode_is_one_alert_and_one_resolution():
    script = {5: {"a": "warning"}, 6: {"a": "warning"}, **calm("a", range(7, 100))}
    assert play(script, until=100) == [
        (5, "firing", "warning", "a"),
        (56, "resolved", "warning", "a"),
    ]


def test_a_rise_in_severity_is_told_and_a_fall_is_not():
    script = {5: {"a": "info"}, 6: {"a": "critical"}, 7: {"a": "warning"}, 8: {"a": "critical"}}
    assert play({**script, **calm("a", range(9, 70))}, until=70) == [
        (5, "firing", "info", "a"),
        (6, "firing", "critical", "a"),
        (58, "resolved", "critical", "a"),
    ]


def test_each_named_layer_is_resolved():
    script = {5: {"a": "info"}, 6: {"b": "critical"}}
    quiet = {step: {"a": None, "b": None} for step in range(7, 70)}
    assert [alert[1:] for alert in play({**script, **quiet}, until=70)] == [
        ("firing", "info", "a"),
        ("firing", "critical", "b"),
        ("resolved", "critical", "a"),
        ("resolved", "critical", "b"),
    ]


def test_a_further_layer_is_news_only_to_rules_about_single_layers():
    script = {5: {"a": "warning", "b": None}, 6: {"b": "warning", "a": None}}
    assert len(play(script, until=10)) == 1
    assert [x[3] for x in play(script, until=10, each_layer=True)] == ["a", "b"]


def test_a_layer_that_joins_one_still_bad_is_no_news():
    script = {5: {"a": "warning"}, 6: {"a": "warning", "b": "warning"}, 7: {"b": "warning"}}
    assert len(play(script, until=10, each_layer=True)) == 1


def test_quiet_is_not_counted_while_a_layer_is_not_judged():
    script = {5: {"a": "warning"}, **calm("b", range(6, 100)), **calm("a", range(100, 200))}
    assert play(script, until=200)[-1] == (149, "resolved", "warning", "a")


def test_steps_without_any_measurement_count_once_the_next_one_is_quiet():
    monitor = Monitor([Scripted({10: {"a": "warning"}, **calm("a", range(20, 200, 10))})])
    alerts = []
    for step in range(1, 100):
        seen = (observation("a", 0, x=1.0),) if step % 10 == 0 else ()
        alerts += monitor.observe(record(step, *seen))
    assert [a.step for a in alerts] == [10, 60]


def test_a_resolved_alert_says_how_long_it_was_and_gives_no_advice():
    monitor = Monitor([Scripted({5: {"a": "warning"}, **calm("a", range(6, 100))})])
    seen = observation("a", 0, x=1.0)
    alerts = [a for s in range(1, 60) for a in monitor.observe(record(s, seen))]
    resolved = alerts[-1]
    assert resolved.window == (5, 55)
    assert resolved.message == "scripted in a is over: quiet for 50 steps."
    assert (resolved.remedies, resolved.cause, resolved.value) == ((), "", None)


def test_going_back_in_steps_does_not_count_as_quiet():
    script = {100: {"a": "warning"}, **calm("a", range(1, 100))}
    monitor = Monitor([Scripted(script)])
    seen = observation("a", 0, x=1.0)
    steps = [100, *range(60, 100)]
    alerts = [a for s in steps for a in monitor.observe(record(s, seen))]
    assert [str(a.state) for a in alerts] == ["firing"]


@dataclass(frozen=True)
class Patient(Scripted):
    """A rule whose findings ask to hold, and to rest after an episode."""

    holds: int = 1
    rests: int = 0

    def evaluate(self, history, step):
        values = self.script.get(step, {})
        return {
            layer: None
            if value is None
            else Finding(
                severity=Severity.WARNING,
                layer=layer,
                statistic="x",
                value=value,
                limit=1.0,
                holds=self.holds,
                rests=self.rests,
            )
            for layer, value in values.items()
        }


def observe(rule, until):
    monitor = Monitor([rule])
    seen = observation("a", 0, x=1.0)
    return [a for s in range(1, until) for a in monitor.observe(record(s, seen))]


def test_a_finding_is_pending_until_it_has_held():
    flicker = {5: {"a": 2.0}, 6: {"a": None}, 7: {"a": 2.0}, 8: {"a": None}}
    assert observe(Patient(flicker, holds=2), 20) == []
    held = {**flicker, 10: {"a": 2.0}, 11: {"a": 2.0}}
    assert [a.step for a in observe(Patient(held, holds=2), 20)] == [11]


def test_steps_without_a_judgement_neither_hold_nor_break_what_is_pending():
    (alert,) = observe(Patient({5: {"a": 2.0}, 9: {"a": 2.0}}, holds=2), 20)
    assert alert.step == 9


def test_an_episode_tells_its_start_its_peak_and_its_end():
    script = {5: {"a": 2.0}, 6: {"a": 7.0}, 7: {"a": 3.0}, **calm("a", range(8, 100))}
    fired, resolved = observe(Patient(script), 100)
    assert (fired.step, resolved.window, resolved.value) == (5, (5, 57), 7.0)
    assert resolved.message == "scripted in a is over: quiet for 50 steps; x peaked at 7."


def test_the_peak_of_a_number_that_falls_is_its_lowest():
    script = {5: {"a": 0.5}, 6: {"a": 0.1}, 7: {"a": 0.3}, **calm("a", range(8, 100))}
    assert observe(Patient(script), 100)[-1].value == 0.1


def test_after_an_episode_the_same_is_news_again_once_it_has_rested():
    script = {5: {"a": 2.0}, **calm("a", range(6, 200)), 60: {"a": 2.0}, 61: {"a": None}}
    quick = [a.step for a in observe(Patient(script), 100)]
    assert quick == [5, 55, 60]
    assert [a.step for a in observe(Patient(script, rests=50), 100)] == [5, 55]
    late = {**script, 110: {"a": 2.0}}
    assert [a.step for a in observe(Patient(late, rests=50), 120)] == [5, 55, 110]
