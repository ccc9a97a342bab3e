"""Checkpoints of every kind, rollouts and evaluations beside them: what counts, and once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from side_by_side import both, sequences
from tiny_models import Attention, Model, loss_of, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import stability_probe as sp

LAYERS = ["blocks.0.attention", "blocks.1.attention"]

SPELLINGS = ("sdpa", "torch.softmax")


def make(spelling: str = "sdpa") -> Model:
    return Model(Attention(spelling, 0.1), Attention(spelling, 0.1))


def of_logits(logits: Tensor, batch: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch.flatten())


# ------------------------------------------------------------------ recomputation


def checkpointed(how: str) -> Callable[[nn.Module, Tensor], Tensor]:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        x = model.embedding(batch)
        if how == "sequential":
            x = checkpoint_sequential(model.blocks, 2, x, use_reentrant=False)
        elif how == "one inside another":
            outer = model.blocks[0]

            def both_blocks(x: Tensor) -> Tensor:
                return checkpoint(model.blocks[1], outer(x), use_reentrant=False)

            x = checkpoint(both_blocks, x, use_reentrant=False)
        elif how == "only one block":
            x = checkpoint(model.blocks[1], model.blocks[0](x), use_reentrant=True)
        elif how == "without early stop":
            from torch.utils.checkpoint import set_checkpoint_early_stop

            with set_checkpoint_early_stop(False):
                for block in model.blocks:
                    x = checkpoint(block, x, use_reentrant=False)
        elif how == "a part of the module":
            for block in model.blocks:
                x = x + checkpoint(block.attention, x, use_reentrant=False)
                x = x + block.mlp(x)
        elif how == "reentrant around reentrant":

            def both_again(x: Tensor) -> Tensor:
                for block in model.blocks:
                    x = checkpoint(block, x, use_reentrant=True)
                return x

            x = checkpoint(both_again, x, use_reentrant=True)
        else:
            for block in model.blocks:
                x = checkpoint(block, x, use_reentrant=how == "reentrant")
        return of_logits(model.head(x), batch)

    return step


KINDS = (
    "reentrant",
    "not reentrant",
    "sequential",
    "one inside another",
    "only one block",
    "without early stop",
    "a part of the module",
    "reentrant around reentrant",
)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of its outer pass
@pytest.mark.parametrize(
    ("how", "spelling"), [(how, SPELLINGS[i % 2]) for i, how in enumerate(KINDS)]
)
def test_checkpoints_of_every_kind_count_once(how: str, spelling: str) -> None:
    probe = both(lambda: make(spelling), step=checkpointed(how))
    assert sequences(probe) == [dict.fromkeys(LAYERS, 3)] * 4
    assert not probe.alerts


def test_selective_checkpointing_counts_once() -> None:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        save = op == torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        x = model.embedding(batch)
        for block in model.blocks:
            x = checkpoint(
                block,
                x,
                use_reentrant=False,
                context_fn=lambda: create_selective_checkpoint_contexts(policy),
            )
        return of_logits(model.head(x), batch)

    probe = both(make, step=step)
    assert sequences(probe) == [dict.fromkeys(LAYERS, 3)] * 4


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of its outer pass
@pytest.mark.parametrize("how", KINDS)
def test_checkpoints_give_the_statistics_of_the_plain_run(how: str) -> None:
    values = []
    for step in (loss_of, checkpointed(how)):
        torch.manual_seed(0)
        model, batch = Model(Attention(), Attention("torch.softmax")), tokens()
        with sp.watch(model, strict=True) as probe:
            for _ in range(2):
                step(model, batch).backward()
                probe.step()
            values.append(probe.latest("entropy"))
    if how != "a part of the module":
        assert all(torch.equal(values[0][n], values[1][n]) for n in LAYERS)
    assert list(values[1]) == LAYERS


@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
def test_two_backwards_over_one_graph_recompute_twice_and_count_once(how: str) -> None:
    def twice(loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        (2 * loss).backward(retain_graph=how == "reentrant")

    probe = both(make, step=checkpointed(how), backward=twice)
    assert sequences(probe) == [dict.fromkeys(LAYERS, 3)] * 4


@pytest.mark.parametrize(
    ("how", "order"),
    [
        ("reentrant", "rollout in between"),
        ("reentrant", "rollout first"),
        ("not reentrant", "rollout first"),
        ("not reentrant", "rollout in between"),
    ],
)  # fmt: skip
def test_rollouts_beside_checkpoints(how: str, order: str) -> None:
    """`generate()` in train mode looks like a reentrant checkpoint's first forward; it is none."""

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        if order == "rollout first":
            with torch.no_grad():
                model(tokens(5))
        loss = checkpointed(how)(model, batch)
        if order == "rollout in between":
            with torch.no_grad():
                model(tokens(5))
        return loss

    probe = both(make, step=step)
    assert sequences(probe) == [dict.fromkeys(LAYERS, 3)] * 4


def test_micro_batches_under_reentrant_checkpoints() -> None:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        losses = [checkpointed("reentrant")(model, part) for part in batch.split(1)]
        for loss in losses[:-1]:
            loss.backward()
        return losses[-1]

    probe = both(make, step=step)
    assert sequences(probe) == [dict.fromkeys(LAYERS, 3)] * 4


# ------------------------------------------------------------------ evaluation


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_an_evaluation_in_the_middle_of_a_step(mode: str, spelling: str) -> None:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        first = loss_of(model, batch[:1])
        model.eval()
        context = torch.inference_mode if mode == "inference_mode" else torch.no_grad
        with context():
            model(tokens(6))
        model.train()
        return first + loss_of(model, batch[1:])

    probe = both(lambda: make(spelling), step=step)
    assert sequences(probe) == [dict.fromkeys(LAYERS, 3)] * 4
    assert not probe.alerts


def test_a_first_step_under_inference_mode_poisons_nothing() -> None:
    """A buffer made under inference mode would raise at the first training step."""
    model = make()
    with sp.watch(model, strict=True) as probe:
        with torch.inference_mode():
            model(tokens())
            probe.step()
        for _ in range(2):
            loss_of(model, tokens()).backward()
            probe.step()
        assert sequences(probe)[1:] == [dict.fromkeys(LAYERS, 3)] * 2
        with torch.inference_mode():
            probe.step()
        loss_of(model, tokens()).backward()
        probe.step()
        assert sequences(probe)[-1] == dict.fromkeys(LAYERS, 3)
        assert not probe.alerts


@pytest.mark.parametrize("part", ["blocks.0", "blocks.1.attention"])
def test_a_frozen_part_in_eval_mode_is_recorded_while_gradients_pass_through_it(part: str) -> None:
    def build() -> nn.Module:
        model = make()
        model.get_submodule(part).eval().requires_grad_(False)
        return model

    probe = both(build)
    assert sequences(probe) == [dict.fromkeys(LAYERS, 3)] * 4
