"""Pooling over ranks, without processes: the packed arrays, the layout, the schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from stability_probe.handover import HeadBlock, hand_over
from stability_probe.plan import Plan, Thinning
from stability_probe.ranks.layout import Hello, Layout, LayoutError, LocalLayer, unite
from stability_probe.ranks.packing import Contribution, Merged, pack, unpack
from stability_probe.ranks.reduced import Reduced
from stability_probe.ranks.schedule import LAG, Schedule
from stability_probe.records import AttentionCall, FirstBad, Level, Observation, StepScalars
from stability_probe.stats.accumulate import accumulate
from stability_probe.stats.accumulators import MAXIMA, MINIMA, PEAK, SUMS, merge
from stability_probe.stats.finish import finish

PLAN = Plan()


def hello(*layers: LocalLayer, plan: Plan = PLAN, phase_start: int = 1) -> Hello:
    return Hello.of(layers, plan, phase_start)


def layer(name: str, heads: int = 2, offset: int | None = 0, of: int | None = None) -> LocalLayer:
    return LocalLayer(name, heads, offset, of or heads)


def reduced(layout: Layout, contributions: Sequence[Contribution]) -> Merged:
    """What two all-reduces make of them, with NumPy."""
    packed = [pack(layout, c) for c in contributions]
    ints = np.maximum.reduce([p[0] for p in packed])
    return unpack(layout, ints, np.add.reduce([p[1] for p in packed]))


def call(batch: int, heads: int, seed: int, spread: float = 3.0) -> AttentionCall:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (spread * torch.randn(batch, heads, 6, 8, generator=generator) for _ in range(3))
    return AttentionCall(layer="a", q_BHQD=q, k_BGKD=k, v_BGKE=v, causal=True, scale=0.3)


def part(attention: AttentionCall, block: HeadBlock, *, full: bool = True):  # type: ignore[no-untyped-def]
    over = hand_over([block], [accumulate(attention, full=full)])
    return over.blocks, over.extrema.numpy(), over.sums.numpy()


def contribution(attention: AttentionCall, block: HeadBlock, *, full: bool = True) -> Contribution:
    return Contribution(1, 1, full=full, parts=[part(attention, block, full=full)])


def own() -> StepScalars:
    return StepScalars(step=1, phase="p", learning_rate=0.1)


@pytest.mark.parametrize("full", [True, False])
def test_ranks_merge_as_micro_batches_do(full: bool) -> None:
    calls = [call(2, 4, seed) for seed in range(3)]
    layout = unite([hello(layer("a", 4))] * 3)
    block = HeadBlock("a", 4, 0, 4, sequences=2)
    record = Reduced.of(
        layout, reduced(layout, [contribution(c, block, full=full) for c in calls])
    ).record(own())
    one, two, three = (accumulate(c, full=full) for c in calls)
    expected = finish(merge(merge(one, two), three), full=full)
    (seen,) = record.observations
    assert record.level is (Level.FULL if full else Level.DEFAULT)
    assert (seen.ranks, seen.sequences) == (3, 6)
    assert set(seen.values) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(seen.values[name], values, rtol=1e-6, err_msg=name)
    for name in ("qk_abs_max_logit", "q_norm_max", "fp16_headroom_log2"):
        np.testing.assert_array_equal(seen.values[name], expected[name], err_msg=name)
    if full:
        for name in (*PEAK, "min_logit", "lse_min", "entropy_hist", "rows"):
            np.testing.assert_array_equal(seen.values[name], expected[name], err_msg=name)


def test_heads_on_different_ranks_lie_side_by_side() -> None:
    """Two ranks hold two heads each of one layer; two more hold the same of another batch."""
    whole = [call(2, 4, seed) for seed in range(2)]
    layout = unite([hello(layer("a", 2, offset, of=4)) for offset in (0, 2, 0, 2)])

    def heads(attention: AttentionCall, offset: int) -> Contribution:
        cut = {
            name: getattr(attention, name)[:, offset : offset + 2]
            for name in ("q_BHQD", "k_BGKD", "v_BGKE")
        }
        share = AttentionCall(layer="a", causal=True, scale=0.3, **cut)
        return contribution(share, HeadBlock("a", 2, offset, 4, sequences=2))

    merged = reduced(layout, [heads(c, offset) for c in whole for offset in (0, 2)])
    (seen,) = Reduced.of(layout, merged).record(own()).observations
    one, two = (accumulate(c, full=True) for c in whole)
    for name, values in finish(merge(one, two), full=True).items():
        np.testing.assert_allclose(seen.values[name], values, rtol=1e-6, err_msg=name)
    assert (seen.ranks, seen.sequences) == (2, 4)  # not four: each sequence is on two ranks


def test_a_replica_is_not_counted_twice() -> None:
    layout = unite([hello(layer("a"))] * 2)
    attention = call(2, 2, 0)
    merged = reduced(
        layout,
        [
            contribution(attention, HeadBlock("a", 2, 0, 2, 2)),
            contribution(attention, HeadBlock("a", 2, 0, 2, 2, replica=True)),
        ],
    )
    (seen,) = Reduced.of(layout, merged).record(own()).observations
    assert (seen.ranks, seen.sequences, seen.values["rows"][0]) == (1, 2, 12)


def test_a_rank_without_a_measurement_changes_nothing_but_presence() -> None:
    layout = unite([hello(layer("a"), layer("b"))] * 2)
    measured = contribution(call(2, 2, 0), HeadBlock("a", 2, 0, 2, 2))
    alone, beside = (reduced(layout, [measured, *more]) for more in ([], [Contribution(1, 1)]))
    np.testing.assert_array_equal(alone.extrema, beside.extrema)
    np.testing.assert_array_equal(alone.sums, beside.sums)
    observations = Reduced.of(layout, beside).record(own()).observations
    assert [o.layer for o in observations] == ["a"]  # nobody measured b
    nobody = reduced(layout, [Contribution(1, 1), Contribution(1, 1)])
    record = Reduced.of(layout, nobody).record(own())
    assert not record.measured
    assert record.level is Level.SENTINEL


def test_heads_that_no_rank_measured_are_absent() -> None:
    layout = unite([hello(layer("a", 2, 0, of=4)), hello(layer("a", 2, 2, of=4))])
    half = contribution(call(2, 2, 0), HeadBlock("a", 2, 2, 4, 2))
    (seen,) = (
        Reduced.of(layout, reduced(layout, [half, Contribution(1, 1)])).record(own()).observations
    )
    for name, values in seen.values.items():
        assert np.isnan(values[:2]).all(), name
    assert (seen.values["nonfinite"][2:] == 0).all()


def test_the_level_is_the_lowest_of_those_who_measured() -> None:
    layout = unite([hello(layer("a"))] * 2)
    block = HeadBlock("a", 2, 0, 2, 2)
    full, default = (contribution(call(2, 2, i), block, full=i == 0) for i in range(2))
    for given_ones, level in (
        ([full, default], Level.DEFAULT),
        ([full, Contribution(1, 1)], Level.FULL),
        ([full, full], Level.FULL),
    ):
        assert Reduced.of(layout, reduced(layout, given_ones)).record(own()).level is level


def test_numbers_pool_as_documented() -> None:
    layout = unite([hello()] * 3)
    merged = reduced(
        layout,
        [
            Contribution(4, 1, numbers={"loss": 2.0, "grad_norm": -1.5}),
            Contribution(4, 3, numbers={"loss": 5.0, "grad_norm": -0.25, "eval_loss": 7.0}),
            Contribution(4, 2),
        ],
    )
    assert merged.numbers == {"loss": 3.5, "grad_norm": -0.25, "eval_loss": 7.0}
    assert (merged.steps, merged.phase_start) == ((4, 4), 3)
    bad = [Contribution(4, 1, numbers={"loss": x, "grad_norm": x}) for x in (1.0, math.nan)]
    merged = reduced(layout, bad)
    assert math.isnan(merged.numbers["loss"])
    assert math.isnan(merged.numbers["grad_norm"])
    assert reduced(layout, [Contribution(4, 1), Contribution(5, 1)]).steps == (4, 5)


def test_the_first_bad_step_is_the_earliest_and_the_least_explained() -> None:
    layout = unite([hello(layer("a"), layer("b"))] * 2)
    merged = reduced(
        layout,
        [
            Contribution(9, 1, first_bad=[FirstBad("b", 7, "q", 8), FirstBad("a", 0, "v", 3)]),
            Contribution(
                9,
                1,
                first_bad=[
                    FirstBad("b", 7, "q", 5),
                    FirstBad("b", 7, "output", 5, explained=True),
                    FirstBad("unknown", 9, "q", 1),
                ],
            ),
        ],
    )
    assert set(merged.first_bad) == {
        FirstBad("a", 0, "v", 3),
        FirstBad("b", 1, "q", 5),
        FirstBad("b", 1, "output", 5, explained=True),
    }
    output = [
        Contribution(9, 1, first_bad=[FirstBad("a", 0, "output", 5, explained=e)])
        for e in (True, False)
    ]
    assert reduced(layout, output).first_bad == (FirstBad("a", 0, "output", 5),)


FLOATS = st.floats(width=32) | st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan])


@given(arrays(np.float32, (2, len(MAXIMA) + len(MINIMA) + len(PEAK), 2), elements=FLOATS))
def test_any_floats_merge_as_tensors_do(given_RH: np.ndarray) -> None:
    layout = unite([hello(layer("a"))])
    blocks, sums = (HeadBlock("a", 2, 0, 2),), np.zeros((len(SUMS), 2))
    merged = reduced(
        layout, [Contribution(1, 1, parts=[(blocks, of_rank, sums)]) for of_rank in given_RH]
    )
    one, two = torch.from_numpy(given_RH)
    m, n = len(MAXIMA), len(MAXIMA) + len(MINIMA)

    def same(got: np.ndarray, expected: Tensor) -> None:
        np.testing.assert_array_equal(got, expected.numpy())

    same(merged.extrema[:m], torch.maximum(one[:m], two[:m]))
    same(merged.extrema[m:n], torch.minimum(one[m:n], two[m:n]))
    for head in range(2):
        strength = [
            float("-inf") if math.isnan(x[n, head]) else abs(x[n, head]) for x in (one, two)
        ]
        if strength[0] != strength[1]:
            larger = (one, two)[int(strength[1] > strength[0])]
            same(merged.extrema[n:, head], larger[n:, head])


def test_layers_of_other_ranks_add_up_by_name() -> None:
    stages = [[f"layers.{i}" for i in range(8, 11)], [f"layers.{i}" for i in (6, 7, 11)]]
    layout = unite([hello(*map(layer, names)) for names in stages])
    assert [one.name for one in layout.layers] == [f"layers.{i}" for i in range(6, 12)]
    assert [one.start for one in layout.layers] == [0, 2, 4, 6, 8, 10]
    named = [["encoder.1", "decoder.0"], ["decoder.1"]]  # no numbering serves the first rank
    layout = unite([hello(*map(layer, names)) for names in named])
    assert [one.name for one in layout.layers] == ["encoder.1", "decoder.0", "decoder.1"]


def test_what_cannot_be_pooled_is_left_out_or_refused() -> None:
    layout = unite(
        [
            hello(layer("a", 2, None, of=8), layer("b"), layer("c", 4)),
            hello(layer("a", 2, None, of=8), layer("b"), layer("c", 2)),
        ]
    )
    assert [one.name for one in layout.layers] == ["b"]
    why = dict(layout.left_out)
    assert "declares 8 heads" in why["a"]
    assert "[2, 4] heads" in why["c"]
    with pytest.raises(LayoutError, match="different plans"):
        unite([hello(), hello(plan=Plan(every=7))])
    with pytest.raises(LayoutError, match="different versions"):
        unite([hello(), Hello((), hello().plan, 1, content="other")])


def test_a_hello_survives_its_encoding_and_nonsense_does_not_pass() -> None:
    said = hello(layer("a", 2, None, of=8), phase_start=5)
    assert Hello.decode(said.encode()) == said
    for nonsense in (b"", b"x", said.encode()[:-3]):
        with pytest.raises(LayoutError):
            Hello.decode(nonsense)


def pooled_steps(schedule: Schedule, steps: range, result: Callable[[int], Reduced]) -> list[int]:
    """The steps that are pooled, where each result is heard at the end of its step."""
    due = []
    for step in steps:
        if schedule.due(step):
            due.append(step)
            schedule.hear(schedule.tick + 1, result(step))
        schedule.advance(step)
    return due


def test_a_mark_takes_effect_when_every_rank_has_heard_of_it() -> None:
    schedule = Schedule(Plan(dense=2, every=10), first=15, phase_start=1)
    assert schedule.level(14) is None
    layout = unite([hello(layer("a"))])

    def result(step: int) -> Reduced:
        return Reduced.of(layout, reduced(layout, [Contribution(step, 42 if step > 42 else 1)]))

    due = pooled_steps(schedule, range(15, 121), result)
    at = 50 + LAG  # 50 is the first pooled step after the mark
    assert due == [20, 30, 40, 50, 60, at + 1, at + 2, *range(70, 121, 10)]


def test_danger_on_any_rank_makes_all_measure_fully_a_fixed_lag_later() -> None:
    layout = unite([hello(layer("a"))] * 2)
    block = HeadBlock("a", 2, 0, 2, 2)

    def result(step: int) -> Reduced:
        calm, hot = call(2, 2, 0), call(2, 2, 1, spread=30.0 if step >= 40 else 3.0)
        both = [replace(contribution(c, block, full=False), step=step) for c in (calm, hot)]
        return Reduced.of(layout, reduced(layout, both))

    schedule = Schedule(Plan(dense=0, every=10), first=1, phase_start=1)
    full = []
    for step in range(1, 121):
        level = schedule.level(step)
        full += [step] if level is Level.FULL else []
        if schedule.due(step):
            schedule.hear(schedule.tick + 1, result(step))
        schedule.advance(step)
    first = 40 + LAG + 1
    assert full[:11] == [1, *range(first, first + 10)]


def test_rank_0_decides_how_far_the_plan_is_thinned() -> None:
    layout = unite([hello(layer("a"))] * 2)

    def result(step: int) -> Reduced:
        asked = [Contribution(step, 1, thinning=Thinning(4).code), Contribution(step, 1)]
        return Reduced.of(layout, reduced(layout, asked))

    schedule = Schedule(Plan(dense=0, every=5), first=1, phase_start=1)
    due = pooled_steps(schedule, range(1, 62), result)
    assert due == [1, 5, 10, 15, 20, 40, 60]


def test_a_layer_that_is_not_pooled_stays_this_ranks_own() -> None:
    layout = unite([hello(layer("a"))] * 2)
    seen, strange = contribution(call(2, 2, 0), HeadBlock("a", 2, 0, 2, 2)), call(2, 2, 1)
    late = contribution(strange, HeadBlock("late", 2, 0, 2, 2))
    grown = contribution(call(2, 3, 2), HeadBlock("a", 3, 0, 3, 2))
    merged = reduced(layout, [seen, late, grown])
    np.testing.assert_array_equal(merged.sums, reduced(layout, [seen]).sums)
    here = Observation("late", 1, {"entropy": np.ones(2, np.float32)}, 2)
    bad = FirstBad("late", 1, "q", 4)
    record = Reduced.of(layout, merged).record(own(), [here], [bad, FirstBad("a", 0, "q", 4)])
    assert [(o.layer, o.layer_index, o.ranks) for o in record.observations] == [
        ("a", 0, 1),
        ("late", 2, 1),
    ]
    assert record.scalars.first_bad == (FirstBad("late", 2, "q", 4),)
