"""Gloo processes: the pooled record is that of one process with the whole batch."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rank_models
import rank_tools
import rank_work
import torch
from tiny_models import loss_of

import stability_probe as sp
from stability_probe.ranks.schedule import LAG
from stability_probe.stats.catalogue import CATALOGUE


def alone(world: int, weights: dict[int, dict[str, torch.Tensor]]) -> dict[int, dict[str, Any]]:
    """One process with the same weights; the shares of the global batch are micro-batches."""
    model, keeper = rank_models.small_model(), rank_tools.Keeper()
    with sp.watch(model, sinks=[keeper], plan=sp.every(1, full_every=3), strict=True) as probe:
        for step in sorted(weights):
            model.load_state_dict(weights[step])
            losses = [loss_of(model, share) for share in rank_tools.batches(step, world)]
            probe.step(loss=torch.stack(losses).mean(), step=step)
    return {r["step"]: r for r in keeper.plain()}


def check_pooled(found: list[dict[str, Any]], world: int) -> None:
    one = found[0]
    assert all(not r["alerts"] for r in found), [r["alerts"] for r in found]
    expected = alone(world, one["weights"])
    pooled = [r for r in one["records"] if r["step"] >= one["first"]]
    assert len(pooled) == 6
    assert {r["level"] for r in pooled} == {"default", "full"}
    for record in pooled:
        same = expected[record["step"]]
        assert record["level"] == same["level"]
        assert record["loss"] == pytest.approx(same["loss"], rel=1e-6)
        assert record["grad_norm"] == world - 1
        assert list(record["layers"]) == list(same["layers"])
        for name, (index, sequences, ranks, values) in record["layers"].items():
            assert (index, sequences, ranks) == (same["layers"][name][0], 2 * world, world)
            check_values(values, same["layers"][name][3])


def check_values(values: dict[str, Any], expected: dict[str, Any]) -> None:
    """Maxima, minima and counts bit by bit; means up to the order of their sums."""
    assert set(values) == set(expected)
    for name, of_head in expected.items():
        if CATALOGUE[name].pooling == "mean":
            np.testing.assert_allclose(values[name], of_head, rtol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(values[name], of_head, err_msg=name)


def check_alike(found: list[dict[str, Any]]) -> None:
    """Every rank came to the same pooled records, bit by bit."""
    one = found[0]
    for other in found[1:]:
        theirs = {r["step"]: r for r in other["records"]}
        for record in one["records"]:
            if record["step"] < max(one["first"], other["first"]):
                continue
            same = theirs[record["step"]]
            assert same["level"] == record["level"]
            if record["level"] in ("default", "full"):
                np.testing.assert_equal(same, record)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return rank_tools.run(rank_work.two, 2, tmp_path_factory.mktemp("ranks") / "two")


def test_two_ranks_pool_into_the_record_of_the_global_batch(two: list[Any]) -> None:
    found = [told["ddp"] for told in two]
    check_pooled(found, 2)
    check_alike(found)


def test_ranks_that_lose_each_other_are_told_and_do_not_hang(two: list[Any]) -> None:
    told = two[0]["lost"]
    assert "16 steps behind" in told["stops"][0]
    assert len(told["stops"]) == 1
    assert told["stopped records"]  # the steps that waited are there, as this rank's own
    assert all("different steps" in rank["lost"]["differ"][0] for rank in two)
    for alone in ("steps alone", "watches alone"):
        assert told[alone] == ["1 of 2 ranks watch and step; records are this rank's only."]


def test_a_rank_that_dies_is_told_and_does_not_hang_the_other(two: list[Any]) -> None:
    told = two[0]["vanish"]
    assert "vanish" not in two[1]
    assert "a rank is gone" in told["blind"][0]
    assert told["all"]


@pytest.mark.slow
def test_training_is_bit_identical_under_every_wrapper(tmp_path: Path) -> None:
    for told in rank_tools.run(rank_work.faithful, 2, tmp_path / "faithful"):
        for how, (bare, watched) in told.items():
            for key in ("losses", "weights"):
                pairs = zip(bare[key], watched[key], strict=True)
                assert all(torch.equal(a, b) for a, b in pairs), (how, key)
            assert torch.equal(bare["random"], watched["random"]), how
            assert bare["groups"] == watched["groups"], how
            if how[1] == "rank 0":
                continue
            assert not watched["alerts"], how
            assert watched["records"][-1]["layers"], how
            last = watched["records"][-1]["layers"].values()
            expected = (2, 1) if how[0] == "tensor parallel" else (4, 2)
            assert {seen[1:3] for seen in last} == {expected}, how


@pytest.mark.slow
def test_ranks_that_are_unlike(tmp_path: Path) -> None:
    told = rank_tools.run(rank_work.unlike, 2, tmp_path / "unlike")
    for rank, one in enumerate(told):
        check_unlike(rank, one)
        check_marked(one["marked_on_one"])
    np.testing.assert_equal(told[0]["stages"], told[1]["stages"])
    assert told[0]["marked_on_one"] == told[1]["marked_on_one"]


def check_unlike(rank: int, one: dict[str, Any]) -> None:
    assert {name: seen[:3] for name, seen in one["stages"]["layers"].items()} == {
        "blocks.0": (0, 2, 1),
        "blocks.1": (1, 2, 1),
    }
    for layers in one["idle"]["layers"]:
        assert {seen[1:3] for seen in layers.values()} == {(2, 1)}
    assert one["stages"]["blind"] == one["idle"]["blind"] == one["marked_on_one"]["blind"] == []
    bad = one["bad_on_one"]
    assert ("q", bad["step"]) in {(tensor, step) for _, tensor, step in bad["bad"]}
    assert ("nonfinite", "blocks.1.attention") in bad["critical"]  # also on rank 0
    ((rule, layer, message),) = one["rows_cut"]
    assert (rule, layer) == ("blind", "blocks.0.attention")
    assert "sharded over ranks along axis 2" in message
    own = {"ranks": (rank,), "steps": 4, "seen": {(2, 1)}, "alerts": ()}
    assert one["each_for_itself"] == own


def check_marked(one: dict[str, Any]) -> None:
    """The dense steps come when every rank can know of the mark, and on all ranks."""
    assert all(ranks == {2} for _, ranks in one["pooled"])
    gaps = [b - a for a, b in itertools.pairwise(step for step, _ in one["pooled"])]
    before = gaps.index(1)  # the mark travels with the first pooled step after it
    assert LAG // 2 <= before <= LAG // 2 + 2
    assert gaps[:before] == [2] * before
    assert gaps[before : before + 2] == [1, 1]
    assert gaps[-3:] == [2, 2, 2]


@pytest.mark.slow
def test_four_ranks_pool_also_over_heads(tmp_path: Path) -> None:
    told = rank_tools.run(rank_work.four, 4, tmp_path / "four")
    found = [rank["ddp"] for rank in told]
    check_pooled(found, 4)
    check_alike(found)
    assert [r["logdir"] is None for r in found] == [False, True, True, True]
    run = sp.load(found[0]["logdir"])
    assert run.ranks == (0,)
    last = list(run.records())[-1]
    assert {(o.sequences, o.ranks) for o in last.observations} == {(8, 4)}
    assert not run.warnings
    for how in ("local", "distributed"):
        check_heads([rank[how] for rank in told], fused=how == "local")
        check_alike([rank[how] for rank in told])


@pytest.mark.slow
def test_danger_on_one_rank_is_measured_fully_by_all(tmp_path: Path) -> None:
    told = rank_tools.run(rank_work.danger, 4, tmp_path / "danger")
    check_alike(told)
    for rank, one in enumerate(told):
        assert one["blind"] == []
        pooled = {r["step"]: r for r in one["records"] if r["step"] >= one["hot"] - 20}
        full = [step for step, r in pooled.items() if r["level"] == "full"]
        first = full[0]
        assert one["hot"] + LAG < first <= one["hot"] + LAG + rank_work.EVERY + 1
        assert full == list(range(first, full[-1] + 1))  # longer while danger lasts
        assert rank_work.ESCALATION <= len(full) < len(pooled) // 2
        for step in full:
            assert {seen[2] for seen in pooled[step]["layers"].values()} == {4}, (rank, step)
        between = [r for r in pooled.values() if r["level"] == "bracket"]
        assert {seen[2] for r in between for seen in r["layers"].values()} == {1}


def check_heads(found: list[dict[str, Any]], *, fused: bool) -> None:
    """Two ranks' heads of two ranks' batches are those of the whole model on the whole batch."""
    one, keeper = found[0], rank_tools.Keeper()
    assert not one["alerts"]
    model = rank_models.sharded_model(fused=fused)
    with sp.watch(model, sinks=[keeper], plan=sp.every(1, full_every=1), strict=True) as probe:
        for number in range(one["records"][-1]["step"]):
            loss_of(model, torch.cat(rank_tools.batches(number, 2)))
            probe.step()
    expected = {r["step"]: r["layers"] for r in keeper.plain()}
    pooled = [r for r in one["records"] if r["step"] >= one["first"]]
    assert len(pooled) == 3
    for record in pooled:
        for name, (index, sequences, ranks, values) in record["layers"].items():
            same = expected[record["step"]][name]
            assert (index, sequences, ranks) == (same[0], 4, 2)
            for statistic, of_head in same[3].items():
                np.testing.assert_allclose(
                    values[statistic], of_head, rtol=1e-4, atol=1e-5, err_msg=statistic
                )
