"""Other modes, hooks, wrappers and tensor kinds at work on the watched model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from side_by_side import both, calls
from tiny_models import Attention, Model, loss_of, tokens
from torch import Tensor, nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import stability_probe as sp

LAYERS = ["blocks.0.attention", "blocks.1.attention"]
SPELLINGS = ("sdpa", "torch.softmax", "einsum", "baddbmm")


def make(spelling: str = "sdpa", **options: float) -> Model:
    return Model(Attention(spelling, **options), Attention(spelling, **options))


class Passing(TorchFunctionMode):
    """A user's own mode that changes nothing; counts what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class Listing(TorchDispatchMode):
    """A user's own dispatch mode: a profiler, a debugger, a memory tracker."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


# ------------------------------------------------------------------ modes around a step

AROUND: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "a torch-function mode": Passing,
    "a dispatch mode": Listing,
    "a default device": lambda: torch.device("cpu"),
    "a flop counter": lambda: FlopCounterMode(display=False),
    "anomaly detection": lambda: torch.autograd.detect_anomaly(check_nan=True),
    "saved tensors on the CPU": lambda: torch.autograd.graph.save_on_cpu(),
    "an autograd profiler": lambda: torch.autograd.profiler.profile(),
    "the math kernel": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "autocast bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast off inside autocast": lambda: torch.autocast("cpu", enabled=False),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize(
    ("around", "spelling"), [(name, SPELLINGS[i % 2]) for i, name in enumerate(AROUND)]
)
def test_a_mode_of_the_user_s_around_every_step(around: str, spelling: str) -> None:
    probe = both(lambda: make(spelling, dropout=0.1), around=AROUND[around])
    assert calls(probe) == dict.fromkeys(LAYERS, 4)
    assert all(r.verified != "no" for r in probe.coverage), probe.coverage
    assert not probe.alerts


@pytest.mark.parametrize("where", ["around the attention", "inside the attention", "both"])
@pytest.mark.parametrize("spelling", SPELLINGS[:2])
def test_a_mode_that_is_switched_on_inside_the_model(spelling: str, where: str) -> None:
    """Modes are a stack: one that opened inside a module is closed inside it, by its owner."""

    class Moded(Attention):
        def forward(self, x: Tensor) -> Tensor:
            with Passing() if where != "inside the attention" else nullcontext():
                return super().forward(x)

        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with Passing() if where != "around the attention" else nullcontext():
                return super().attend(q, k, v)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model(Moded(spelling, 0.1), Moded(spelling, 0.1))

        def forward(self, batch: Tensor) -> Tensor:
            with Passing():
                return self.model(batch)

    probe = both(Outer)
    assert calls(probe) == {f"model.{layer}": 4 for layer in LAYERS}
    assert not probe.alerts


def test_a_mode_that_hooks_of_the_user_open_and_close() -> None:
    """A scope pushed in a pre-hook and popped in a post-hook, as the probe itself does it."""

    def build() -> nn.Module:
        model = make(dropout=0.1)
        for block in model.blocks:
            stack: list[Passing] = []

            def enter(*_: object, stack: list[Passing] = stack) -> None:
                stack.append(Passing())
                stack[-1].__enter__()

            def leave(*_: object, stack: list[Passing] = stack) -> None:
                stack.pop().__exit__(None, None, None)

            block.attention.register_forward_pre_hook(enter)
            block.attention.register_forward_hook(leave, always_call=True)
        return model

    try:
        probe = both(build)
        assert not _get_current_function_mode_stack()
    finally:
        while _get_current_function_mode_stack():
            _pop_mode()
    assert calls(probe) == dict.fromkeys(LAYERS, 4)


def test_a_user_s_function_mode_does_not_see_the_probe() -> None:
    """What a mode counts is the model's own work."""
    seen = []
    for watched in (False, True):
        torch.manual_seed(0)
        model, mode = make(), Passing()
        probe = sp.watch(model, strict=True) if watched else None
        for _ in range(3):
            with mode:
                loss = loss_of(model, tokens())
            loss.backward()
            if probe is not None:
                probe.step()
        if probe is not None:
            probe.close()
        seen.append(mode.seen)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("spelling", SPELLINGS[:2])
def test_a_user_s_dispatch_mode_does_not_see_the_probe(spelling: str) -> None:
    seen = []
    for watched in (False, True):
        torch.manual_seed(0)
        model, mode = make(spelling), Listing()
        probe = sp.watch(model, strict=True) if watched else None
        for _ in range(3):
            with mode:
                loss_of(model, tokens()).backward()
            if probe is not None:
                probe.step()
        if probe is not None:
            probe.close()
        seen.append(mode.seen)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("spelling", SPELLINGS[:2])
def test_flops_are_those_of_the_model(spelling: str) -> None:
    """Model FLOPs utilisation is computed from this count."""
    totals = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = make(spelling)
        probe = sp.watch(model, strict=True) if watched else None
        counter = FlopCounterMode(display=False)
        for _ in range(2):
            with counter:
                loss_of(model, tokens()).backward()
            if probe is not None:
                probe.step()
        if probe is not None:
            probe.close()
        totals.append(counter.get_total_flops())
    assert totals[0] == totals[1] > 0


# ------------------------------------------------------------------ default device and dtype


@pytest.mark.parametrize("spelling", SPELLINGS[:2])
def test_a_default_device_set_for_the_whole_process(spelling: str) -> None:
    torch.set_default_device("cpu")
    try:
        probe = both(lambda: make(spelling, dropout=0.1))
    finally:
        torch.set_default_device(None)
    assert calls(probe) == dict.fromkeys(LAYERS, 4)
    assert not probe.alerts


def test_a_default_device_without_data_while_the_probe_works() -> None:
    """A model half built on "meta" inside the loop: the probe's own numbers stay on the CPU."""
    model = make()
    with sp.watch(model, strict=True) as probe:
        for _ in range(3):
            loss_of(model, tokens()).backward()
            torch.set_default_device("meta")
            try:
                nn.Linear(3, 3)
                probe.step()
            finally:
                torch.set_default_device(None)
        assert not probe.alerts
        assert probe.frame().entropy.notna().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spelling", SPELLINGS[:2])
def test_a_default_dtype_that_is_not_float32(spelling: str, dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        steps = 1 if dtype == torch.float16 else 4  # AdamW in float16 alone does not live longer
        probe = both(lambda: make(spelling), steps=steps)
        table = probe.frame()
    finally:
        torch.set_default_dtype(before)
    assert calls(probe) == dict.fromkeys(LAYERS, steps)
    assert table.entropy.between(1.0, 2.0).all()
    assert not probe.alerts


def test_global_flags_are_as_they_were() -> None:
    def flags() -> list[object]:
        return [
            torch.get_float32_matmul_precision(),
            torch.backends.mkldnn.matmul.fp32_precision,
            torch.are_deterministic_algorithms_enabled(),
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.is_autocast_enabled("cpu"),
        ]

    inside: list[list[object]] = []

    class Asking(Attention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = super().attend(q, k, v)
            inside.append(flags())
            return out

    before = flags()
    both(lambda: Model(Asking("torch.softmax"), Asking()))
    assert flags() == before
    assert all(f == inside[0] for f in inside)


def test_deterministic_algorithms_are_no_obstacle() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        probe = both(lambda: make("torch.softmax", dropout=0.1))
    finally:
        torch.use_deterministic_algorithms(False)
    assert calls(probe) == dict.fromkeys(LAYERS, 4)
