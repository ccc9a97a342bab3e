"""The numbers behind the plots, against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from drawn_runs import alert, make_run, resolved
from hypothesis import given, settings
from hypothesis import strategies as st

from stability_probe.views.series import (
    Curve,
    entropy_ratio,
    episodes,
    evaluation_curve,
    largest,
    largest_logit,
    loss_curve,
    measured,
    nonfinite_steps,
    step_range,
)

NAN, INF = float("nan"), float("inf")


def curve(values: dict[int, float]) -> Curve:
    return Curve(np.array(list(values), np.int64), np.array(list(values.values()), np.float64))


def points(found: Curve | None) -> dict[int, float]:
    assert found is not None
    return dict(zip(found.steps.tolist(), found.values.tolist(), strict=True))


@pytest.mark.parametrize(
    ("values", "gaps"),
    [
        ({1: 1.0, 2: 2.0, 3: 3.0}, []),
        ({1: 1.0, 2: NAN, 3: 3.0, 4: 4.0, 5: 5.0}, [2]),  # given every step, so it was due
        ({1: 1.0, 2: 2.0, 3: NAN, 4: NAN}, [3, 4]),  # diverged
        ({1: NAN, 2: 2.0, 3: 3.0}, [1]),
        ({s: (0.5 if s % 5 == 0 else NAN) for s in range(1, 21)}, []),  # given every fifth
        ({s: (0.5 if s % 5 == 0 and s != 10 else NAN) for s in range(1, 41)}, [10, 11, 12, 13, 14]),
        ({1: 1.0, 2: INF, 3: 3.0}, [2]),
        ({1: NAN, 2: NAN}, []),  # never given
        ({1: NAN, 2: -INF}, [2]),
        ({7: 1.0}, []),
    ],
)
def test_a_gap_is_where_a_number_was_due(values: dict[int, float], gaps: list[int]) -> None:
    found = curve(values)
    assert found.gaps.tolist() == gaps
    broken = points(found.line)
    assert [s for s, v in broken.items() if np.isnan(v)] == gaps
    finite = {s: v for s, v in values.items() if np.isfinite(v)}
    assert {s: v for s, v in broken.items() if np.isfinite(v)} == finite
    assert found.end == (list(finite.values())[-1] if finite else -INF)


HEADS = st.lists(
    st.lists(st.one_of(st.just(NAN), st.floats(0, 1, width=32)), min_size=2, max_size=2),
    min_size=3,
    max_size=3,
)


@settings(deadline=None, max_examples=40)
@given(st.dictionaries(st.integers(1, 50), HEADS, min_size=1, max_size=6))
def test_layers_and_heads_pool_as_loops_do(steps: dict[int, list[list[float]]]) -> None:
    run = make_run({}, {"max_logit": steps, "entropy_ratio": steps})
    logits = largest_logit(run.frame())
    assert list(logits) == ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]
    for layer, name in enumerate(logits):
        for step, value in points(logits[name]).items():
            known = [v for v in steps[step][layer] if not np.isnan(v)]
            np.testing.assert_equal(value, max(known, default=NAN))
    ratios = entropy_ratio(run.frame())
    for step, layers in steps.items():
        known = sorted(v for heads in layers for v in heads if not np.isnan(v))
        middle = np.median(np.float32(known)) if known else NAN
        np.testing.assert_allclose(points(ratios["median head"])[step], middle, rtol=1e-6)
        np.testing.assert_equal(points(ratios["lowest head"])[step], min(known, default=NAN))
    overall = points(largest(logits.values()))
    for step, layers in steps.items():
        known = [v for heads in layers for v in heads if not np.isnan(v)]
        np.testing.assert_equal(overall[step], max(known, default=NAN))


def test_layers_stay_in_the_order_of_the_model() -> None:
    many = [[float(i)] for i in range(12)]
    logits = largest_logit(make_run({}, {"max_logit": {1: many}}).frame())
    assert list(logits) == [f"blocks.{i}.attn" for i in range(12)]  # 2 before 10


def test_the_largest_logit_is_the_first_statistic_that_a_head_has() -> None:
    run = make_run(
        {},
        {
            "qk_abs_max_logit": {1: [[5.0, NAN], [NAN, NAN]]},
            "abs_max_logit": {1: [[900.0, 7.0], [3.0, NAN]]},
            "max_logit": {1: [[901.0, 8.0], [-4.0, -2.0]]},
        },
    )
    logits = largest_logit(run.frame())
    assert points(logits["blocks.0.attn"]) == {1: 7.0}
    assert points(logits["blocks.1.attn"]) == {1: 3.0}


def test_what_was_not_recorded_gives_no_curve() -> None:
    run = make_run({1: None}, {"entropy": {1: [[0.5]]}})
    assert largest_logit(run.frame()) == {}
    assert entropy_ratio(run.frame()) == {}
    assert largest([]) is None
    assert nonfinite_steps(run.frame()).tolist() == []
    assert loss_curve(run) is None
    assert evaluation_curve(run) is None


def test_an_infinite_loss_was_recorded() -> None:
    run = make_run({1: INF, 2: None}, {})
    curve = loss_curve(run)
    assert curve is not None
    assert curve.gaps.tolist() == [1]


def test_an_evaluation_loss_has_no_gaps_but_where_it_is_infinite() -> None:
    run = make_run(dict.fromkeys(range(1, 200), 1.0), {}, eval_loss={1: 3.0, 2: 2.0, 150: INF})
    curve = evaluation_curve(run)
    assert points(curve) == {1: 3.0, 2: 2.0, 150: INF}
    assert curve is not None
    assert curve.gaps.tolist() == [150]


def test_nonfinite_steps_are_those_of_any_head() -> None:
    counts = {1: [[0.0, 0.0]], 5: [[0.0, 3.0]], 9: [[NAN, 1.0]], 12: [[NAN, NAN]]}
    run = make_run({}, {"nonfinite": counts})
    assert nonfinite_steps(run.frame()).tolist() == [5, 9]


def test_the_step_range_covers_scalars_and_statistics() -> None:
    run = make_run({3: 1.0, 40: 1.0}, {"max_logit": {2: [[1.0]], 50: [[1.0]]}})
    assert step_range([run], [run.frame()]) == (2, 50)
    nothing = make_run({}, {"max_logit": {}})
    assert step_range([nothing], [nothing.frame()]) == (0, 0)


def test_an_episode_ends_where_its_rule_resolves_in_its_layer() -> None:
    found = episodes(
        [
            alert(10, "growth", "warning", layer="a"),
            alert(12, "growth", "critical", layer="b"),
            alert(13, "other", "info", layer="a"),
            resolved(20, "growth", "critical", layer="a"),
            alert(25, "growth", "warning", layer="a", superseded=True),
            alert(30, "growth", "warning", layer="a"),
            resolved(44, "growth", "warning", layer="a"),
        ]
    )
    ends = [(e.alert.step, e.alert.rule, e.end) for e in found]
    assert ends == [
        (10, "growth", 20),
        (12, "growth", None),
        (13, "other", None),
        (30, "growth", 44),
    ]


def test_steps_with_bounds_only_are_no_gaps():
    run = make_run({}, {"entropy_ratio": {step: [[0.5, 0.6]] for step in range(1, 7)}})
    frame = run.frame().copy()
    frame["max_logit_low"] = 1.0
    statistics = [n for n in frame if n not in ("step", "layer", "head", "max_logit_low")]
    frame.loc[frame["step"] == 3, statistics] = NAN  # bounds alone
    frame.loc[frame["step"] == 5, [*statistics, "max_logit_low"]] = NAN  # measured, and absent
    assert sorted(measured(frame)["step"].unique()) == [1, 2, 4, 5, 6]
    assert measured(run.frame()).equals(run.frame())
