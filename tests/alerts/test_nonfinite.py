from __future__ import annotations

import numpy as np
import pytest
from recording import observation, over, record, stream, told, watch

from stability_probe.alerts.nonfinite import NonFinite
from stability_probe.records import FirstBad, Severity, State

RULES = (NonFinite(),)


def layer(name, index, bad=(0, 0), **parts):
    return observation(name, index, nonfinite=list(bad), entropy_ratio=[0.5, 0.5], **parts)


def test_fires_at_step_one():
    (alert,) = watch([record(1, layer("a", 0, (0, 3), nonfinite_q=[0, 3]))], RULES)
    assert (alert.step, alert.severity, alert.rule) == (1, Severity.CRITICAL, "nonfinite")
    assert (alert.layer, alert.layer_index, alert.heads) == ("a", 0, (1,))
    assert (alert.statistic, alert.value, alert.limit) == ("nonfinite", 3.0, 0.0)
    assert "3 values that are not finite in its q (head 1;" in alert.message
    assert "entropy ratio 0.5 -> 0.5" in alert.message
    assert "its projections or norms" in alert.cause


@pytest.mark.parametrize(
    ("tensor", "cause"),
    [
        ("k", "projections"),
        ("v", "another of its inputs"),
        ("scores", "overflow"),
        ("output", "the kernel"),
    ],
)
def test_the_first_bad_tensor_is_named_and_decides_the_cause(tensor, cause):
    (alert,) = watch([record(5, layer("a", 0, (1, 1), **{f"nonfinite_{tensor}": [1, 1]}))], RULES)
    assert f"in its {tensor} " in alert.message
    assert cause in alert.cause


def test_the_detailed_counts_alone_are_enough():
    seen = observation("a", 0, nonfinite_scores=[0, 0, 7], nonfinite_q=[0, 0, 0])
    (alert,) = watch([record(5, seen)], RULES)
    assert (alert.value, alert.heads) == (7.0, (2,))
    assert "scores" in alert.message


def test_only_the_first_layer_is_blamed_and_the_later_ones_are_named():
    records = [
        record(1, layer("a", 0), layer("b", 1), layer("c", 2), layer("d", 3)),
        record(
            2, layer("a", 0), layer("d", 3, (9, 9)), layer("b", 1, (1, 0)), layer("c", 2, (5, 5))
        ),
    ]
    (alert,) = watch(records, RULES)
    assert alert.layer == "b"
    assert "later layers follow: c, d" in alert.message


def test_a_model_that_is_poisoned_by_it_is_the_same_event():
    records = [
        record(1, layer("a", 0), layer("b", 1, (1, 0))),
        record(2, layer("a", 0, (8, 8)), layer("b", 1, (8, 8))),
        record(3, layer("a", 0, (8, 8)), layer("b", 1, (8, 8))),
    ]
    assert [a.layer for a in watch(records, RULES)] == ["b"]


def test_another_layer_after_the_first_is_clean_again_is_news():
    records = [
        record(1, layer("a", 0, (1, 0)), layer("b", 1)),
        record(2, layer("a", 0), layer("b", 1)),
        record(3, layer("a", 0), layer("b", 1, (1, 0))),
    ]
    assert [(a.step, a.layer) for a in watch(records, RULES)] == [(1, "a"), (3, "b")]


def test_resolves_per_layer_and_arms_again():
    def bad(step):
        return {"nonfinite": 1.0 if step in (5, 6, 120) else 0.0}

    alerts = watch(stream(range(1, 200), {"a": bad}), RULES)
    assert [(a.step, a.state, a.layer) for a in alerts] == [
        (5, State.FIRING, "a"),
        (56, State.RESOLVED, "a"),
        (120, State.FIRING, "a"),
        (170, State.RESOLVED, "a"),
    ]


def test_unmeasured_and_absent_counts_hold_the_episode():
    records = [record(1, layer("a", 0, (1, 1)))]
    records += [record(s) for s in range(2, 200)]
    records += [record(s, layer("a", 0, (np.nan, np.nan))) for s in range(200, 400)]
    records += [record(s, observation("a", 0, entropy=1.0)) for s in range(400, 500)]
    assert [str(a.state) for a in watch(records, RULES)] == ["firing"]


def test_measured_every_hundred_steps_one_clean_sample_does_not_resolve():
    records = [record(s, layer("a", 0, (s == 100, 0))) for s in range(100, 500, 100)]
    assert over(watch(records[:3], RULES)) == []
    assert over(watch(records, RULES)) == [(400, "nonfinite")]


class TestSentinel:
    def test_says_the_first_bad_step_between_measured_ones(self):
        told_late = FirstBad("layers.3", 3, "k", 207)
        records = [record(200, layer("layers.3", 3)), record(210, first_bad=(told_late,))]
        (alert,) = watch(records, RULES)
        assert (alert.step, alert.layer, alert.layer_index) == (210, "layers.3", 3)
        assert alert.window == (207, 210)
        assert alert.severity is Severity.CRITICAL
        assert "not finite in its k" in alert.message
        assert "first at step 207" in alert.message

    def test_the_earliest_step_is_blamed_before_layer_order(self):
        bad = (FirstBad("a", 0, "q", 209), FirstBad("b", 1, "scores", 207))
        (alert,) = watch([record(210, first_bad=bad)], RULES)
        assert alert.layer == "b"
        assert "later layers follow: a" in alert.message

    def test_what_masked_rows_explain_is_a_warning(self):
        bad = (FirstBad("a", 0, "output", 3, explained=True),)
        (alert,) = watch([record(4, layer("a", 0), first_bad=bad)], RULES)
        assert alert.severity is Severity.WARNING
        assert "no visible key" in alert.cause

    def test_counts_in_visible_rows_overrule_the_explanation(self):
        bad = (FirstBad("a", 0, "output", 3, explained=True),)
        seen = layer("a", 0, (1, 0), nonfinite_output=[1, 0])
        (alert,) = watch([record(4, seen, first_bad=bad)], RULES)
        assert alert.severity is Severity.CRITICAL
        assert "first at step 3" in alert.message

    def test_a_rise_from_explained_to_not_is_news(self):
        records = [
            record(4, layer("a", 0), first_bad=(FirstBad("a", 0, "output", 3, explained=True),)),
            record(5, layer("a", 0), first_bad=(FirstBad("a", 0, "q", 5),)),
        ]
        assert told(watch(records, RULES)) == [
            (4, "nonfinite", "warning"),
            (5, "nonfinite", "critical"),
        ]

    def test_the_same_entry_told_again_is_no_new_evidence(self):
        bad = (FirstBad("a", 0, "q", 3),)
        records = [record(s, layer("a", 0), first_bad=bad) for s in range(4, 100)]
        alerts = watch(records, RULES)
        assert (told(alerts), over(alerts)) == ([(4, "nonfinite", "critical")], [(54, "nonfinite")])

    def test_a_phase_change_does_not_delay_it(self):
        records = [record(9, layer("a", 0)), record(10, layer("a", 0, (1, 0)), phase="new")]
        assert told(watch(records, RULES)) == [(10, "nonfinite", "critical")]
