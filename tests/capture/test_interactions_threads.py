"""Forwards in many threads: none is lost, none is counted twice, and no mode crosses over."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from side_by_side import assert_same, calls, sequences
from tiny_models import Attention, Encoder, Model, MultiHead, loss_of, tokens
from torch import Tensor, nn
from torch.nn.parallel.replicate import _replicatable_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import stability_probe as sp

LAYERS = ["blocks.0.attention", "blocks.1.attention"]
THREADS, FORWARDS = 4, 10


def make() -> Model:
    return Model(Attention(), Attention("torch.softmax"))


def in_threads(work: Callable[[int], object], threads: int = THREADS) -> list[object]:
    """Runs `work` in several threads that start together; an exception in one is raised."""
    barrier = threading.Barrier(threads)

    def started(i: int) -> object:
        barrier.wait()
        result = work(i)
        assert not _get_current_function_mode_stack()
        return result

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(started, range(threads)))


@pytest.mark.parametrize("settled", [False, True])
def test_no_forward_of_a_thread_is_lost(settled: bool) -> None:
    torch.manual_seed(0)
    model = make()
    with sp.watch(model, strict=True) as probe:
        if settled:
            loss_of(model, tokens()).backward()
            probe.step()
        before = dict.fromkeys(LAYERS, 1 if settled else 0)
        batches = [tokens() for _ in range(THREADS)]
        in_threads(lambda i: [model(batches[i]) for _ in range(FORWARDS)])
        assert not _get_current_function_mode_stack()
        probe.step()
        expected = {n: c + THREADS * FORWARDS for n, c in before.items()}
        assert calls(probe) == expected
        assert sequences(probe)[-1] == dict.fromkeys(LAYERS, 3 * THREADS * FORWARDS)


def test_threads_give_the_gradients_they_would_give_alone() -> None:
    """Hogwild and asynchronous actors: one model, several threads, forward and backward."""

    def gradients(watched: bool, model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
        probe = sp.watch(model, strict=True) if watched else None

        def work(i: int) -> list[Tensor]:
            loss = loss_of(model, batches[i])
            return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

        found = [t for part in in_threads(work) for t in part]  # type: ignore[union-attr]
        if probe is not None:
            probe.step()
            probe.close()
        return found

    torch.manual_seed(0)
    model, batches = make(), [tokens() for _ in range(THREADS)]
    assert_same(gradients(False, model, batches), gradients(True, model, batches))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_in_threads(reentrant: bool) -> None:
    """Backward may recompute in a thread of the autograd engine."""
    torch.manual_seed(0)
    model = make()

    def work(_: int) -> None:
        x = model.embedding(tokens())
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        model.head(x).sum().backward()

    with sp.watch(model, strict=True) as probe:
        for _ in range(3):
            in_threads(work)
            probe.step()
        assert sequences(probe) == [dict.fromkeys(LAYERS, 3 * THREADS)] * 3


def replica(module: nn.Module) -> nn.Module:
    """What torch.nn.parallel.replicate makes for each device, on the one device there is."""
    copy = module._replicate_for_data_parallel()
    for name, child in module.named_children():
        setattr(copy, name, replica(child))
    for name, parameter in module.named_parameters(recurse=False):
        setattr(copy, name, parameter * 1.0)
    return copy


def test_replicas_that_share_the_model_s_hooks() -> None:
    """What DataParallel makes of a model: shallow copies with the hooks still on them."""
    torch.manual_seed(0)
    model = make()
    assert _replicatable_module(model)

    with sp.watch(model, strict=True) as probe:
        for step in range(3):
            replicas = [replica(model) for _ in range(THREADS)]
            batches = [tokens() for _ in range(THREADS)]
            in_threads(lambda i, r=replicas, b=batches: loss_of(r[i], b[i]).backward())
            loss_of(model, tokens()).backward()
            probe.step()
            if step:
                assert sequences(probe)[-1] == dict.fromkeys(LAYERS, 3 * (THREADS + 1))
        assert not probe.alerts
        assert not [a for a in probe.coverage if a.verified == "no"]


def test_a_model_that_runs_only_as_replicas() -> None:
    """DataParallel on several devices never calls the module that was watched."""
    torch.manual_seed(0)
    model = make()
    with sp.watch(model, strict=True) as probe:
        for _ in range(4):
            for batch in (tokens(), tokens()):
                loss_of(replica(model), batch).backward()
            probe.step()
        assert sequences(probe)[1:] == [dict.fromkeys(LAYERS, 6)] * 3
        assert not probe.alerts


@pytest.mark.parametrize("make_one", [make, lambda: MultiHead(need_weights=True), Encoder])
def test_two_probes_in_two_threads_know_nothing_of_each_other(
    make_one: Callable[[], nn.Module],
) -> None:
    torch.manual_seed(0)
    models = [make_one() for _ in range(2)]

    def work(i: int) -> tuple[list[dict[str, int]], dict[str, int]]:
        with sp.watch(models[i], strict=True) as probe:
            for _ in range(5):
                loss_of(models[i], tokens(i + 2)).backward()
                probe.step()
            return sequences(probe), calls(probe)

    for i, result in enumerate(in_threads(work, 2)):
        seen, count = result  # type: ignore[misc]
        assert {n for s in seen for n in s.values()} == {i + 2}
        assert set(count.values()) == {5}


def test_an_evaluation_in_another_thread_is_not_recorded() -> None:
    torch.manual_seed(0)
    model = make()
    with sp.watch(model, strict=True) as probe:
        stop = threading.Event()

        def evaluate() -> None:
            while not stop.is_set():
                with torch.no_grad():
                    model(tokens(7))

        thread = threading.Thread(target=evaluate)
        thread.start()
        try:
            for _ in range(6):
                loss_of(model, tokens()).backward()
                probe.step()
        finally:
            stop.set()
            thread.join()
        assert sequences(probe) == [dict.fromkeys(LAYERS, 3)] * 6


@pytest.mark.xfail(strict=True, reason="close() takes the mode off its own thread alone")
def test_a_forward_that_is_running_while_the_probe_closes() -> None:
    torch.manual_seed(0)
    model = make()
    entered, leave = threading.Event(), threading.Event()

    class Waiting(Attention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            entered.set()
            assert leave.wait(30)
            return super().attend(q, k, v)

    model.blocks[1].attention = Waiting()
    probe = sp.watch(model, strict=True)
    left: list[object] = []

    def forward() -> None:
        model(tokens())
        left.extend(_get_current_function_mode_stack())

    thread = threading.Thread(target=forward)
    thread.start()
    assert entered.wait(30)
    probe.close()
    leave.set()
    thread.join()
    assert not left


def test_steps_taken_from_another_thread() -> None:
    torch.manual_seed(0)
    model = make()
    with sp.watch(model, strict=True) as probe, ThreadPoolExecutor(1) as pool:
        for _ in range(4):
            pool.submit(lambda: loss_of(model, tokens()).backward()).result()
            probe.step()
        assert sequences(probe) == [dict.fromkeys(LAYERS, 3)] * 4
