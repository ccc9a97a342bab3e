"""Other modes, hooks, wrappers and tensor kinds at work on the watched model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from side_by_side import both, calls, sequences
from tiny_models import HEADS, WIDTH, Attention, Encoder, Model, MultiHead, loss_of, tokens
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
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("spelling", SPELLINGS[:2])
def test_a_mode_of_the_user_s_around_every_step(spelling: str, around: str) -> None:
    probe = both(lambda: make(spelling, dropout=0.1), around=AROUND[around])
    assert calls(probe) == dict.fromkeys(LAYERS, 4)
    assert all(r.verified != "no" for r in probe.coverage), probe.coverage
    assert not probe.alerts


@pytest.mark.parametrize("where", ["around the attention", "inside the attention", "both"])
@pytest.mark.parametrize("spelling", SPELLINGS)
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


@pytest.mark.xfail(strict=True, reason="modes opened and closed by hooks do not nest")
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


SEEN_BY_MODES = pytest.mark.xfail(
    strict=True, reason="the probe's own operations run inside the user's modes"
)


@SEEN_BY_MODES
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


@SEEN_BY_MODES
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


@SEEN_BY_MODES
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


@pytest.mark.parametrize("spelling", SPELLINGS)
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
@pytest.mark.parametrize("spelling", SPELLINGS)
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


# ------------------------------------------------------------------ autocast: the right numbers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spelling", ["sdpa", "torch.softmax"])
def test_autocast_does_not_round_the_probe_s_own_work(spelling: str, dtype: torch.dtype) -> None:
    """`q.float() @ k.float().mT` under autocast is a half-precision product all the same."""
    torch.manual_seed(0)
    model, batch = make(spelling), tokens()
    with torch.no_grad():
        model.blocks[0].attention.qkv.weight[: 2 * WIDTH] *= 30
    kept: list[Tensor] = []
    handle = model.blocks[0].attention.qkv.register_forward_hook(
        lambda module, args, out: kept.append(out.detach())
    )
    with sp.watch(model, strict=True) as probe:
        with torch.autocast("cpu", dtype=dtype):
            loss_of(model, batch).backward()
        probe.step()
        got = probe.latest("qk_abs_max_logit")[LAYERS[0]]
        headroom = probe.latest("fp16_headroom_log2")[LAYERS[0]]
    handle.remove()
    (qkv,) = kept
    assert qkv.dtype == dtype
    q, k, _ = (z.double().view(*batch.shape, HEADS, -1).transpose(1, 2) for z in qkv.chunk(3, -1))
    causal = torch.ones(12, 12, dtype=torch.bool).tril()
    product = (q @ k.mT).abs().masked_fill(~causal, 0).amax((0, 2, 3))
    torch.testing.assert_close(got.double(), product / q.shape[-1] ** 0.5, rtol=1e-5, atol=0)
    torch.testing.assert_close(headroom.double(), torch.log2(65504 / product), rtol=0, atol=1e-4)


# ------------------------------------------------------------------ hooks of the user's


def test_hooks_of_the_user_s_see_and_change_what_they_did() -> None:
    seen: list[list[Tensor]] = []

    def build() -> nn.Module:
        model, log = make("torch.softmax", dropout=0.1), []
        seen.append(log)
        attention = model.blocks[0].attention
        attention.register_forward_pre_hook(lambda m, args: (args[0] * 2.0,))
        attention.register_forward_hook(lambda m, args, out: out * 0.5, prepend=True)
        attention.register_full_backward_hook(lambda m, gi, go: log.append(go[0].clone()))
        attention.register_full_backward_pre_hook(lambda m, go: (go[0] * 3.0,))
        attention.qkv.register_forward_hook(lambda m, args, out: log.append(out.detach()))
        attention.qkv.weight.register_hook(lambda g: g * 2.0)
        return model

    probe = both(build)
    assert len(seen[0]) == len(seen[1]) == 8
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    assert calls(probe) == dict.fromkeys(LAYERS, 4)


@pytest.mark.parametrize("how", ["weight_norm", "spectral_norm", "orthogonal", "pruned", "LoRA"])
def test_parametrised_projections(how: str) -> None:
    from torch.nn.utils import parametrizations, prune

    class LoRA(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 3 * WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.b(self.a(x))

    def build() -> nn.Module:
        model = make(dropout=0.1)
        for block in model.blocks:
            if how == "LoRA":
                block.attention.qkv = LoRA(block.attention.qkv)
            elif how == "pruned":
                prune.random_unstructured(block.attention.qkv, "weight", 0.5)
            else:
                getattr(parametrizations, how)(block.attention.qkv)
        return model

    probe = both(build)
    assert calls(probe) == dict.fromkeys(LAYERS, 4)
    assert all(r.verified == "output" or r.verified == "reissued" for r in probe.coverage)


def test_a_forward_that_takes_only_keywords() -> None:
    """No positional argument to look at (huggingface/transformers#29247)."""

    class Keyword(Attention):
        def forward(self, *, hidden_states: Tensor, position: Tensor | None = None) -> Tensor:
            return super().forward(hidden_states)

    class Calling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn = Keyword("torch.softmax", 0.1)

        def forward(self, x: Tensor) -> Tensor:
            return self.self_attn(hidden_states=x, position=None)

    probe = both(lambda: Model(Calling(), Calling()), plan=sp.every(1, full_every=1))
    assert calls(probe) == {f"{layer}.self_attn": 4 for layer in LAYERS}
    assert (probe.frame().query("step > 1").input_rms > 0).all()


@pytest.mark.parametrize(
    "how",
    [
        "positional",
        pytest.param("keyword", marks=pytest.mark.xfail(
            strict=True, reason="a global pre-hook is not given keyword arguments")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("spelling", SPELLINGS[:2])
def test_frozen_attention_in_eval_mode_whose_input_needs_gradients(spelling: str, how: str) -> None:
    """As in prompt tuning: nothing of the layer trains, and gradients go through it."""

    class Calling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Attention(spelling).eval().requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x=x) if how == "keyword" else self.inner(x)

    probe = both(lambda: Model(Calling(), Calling()), allow_eval=True)
    assert calls(probe) == {f"{layer}.inner": 4 for layer in LAYERS}


def test_an_output_projection_that_is_never_called_as_a_module() -> None:
    """nn.MultiheadAttention reads out_proj's weight; a hook there would see nothing."""
    probe = both(lambda: MultiHead(need_weights=False))
    assert calls(probe) == {"attention": 4}


@pytest.mark.parametrize("outputs", ["tuple", "dict", "None"])
def test_modules_that_return_something_else(outputs: str) -> None:
    class Returning(Attention):
        def forward(self, x: Tensor, out: list[Tensor] | None = None) -> Any:
            y = super().forward(x)
            if out is not None:
                out.append(y)
            return {"tuple": (y, None), "dict": {"y": y}, "None": None}[outputs]

    class Calling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Returning("torch.softmax", 0.1)

        def forward(self, x: Tensor) -> Tensor:
            kept: list[Tensor] = []
            self.inner(x, kept)
            return kept[0]

    probe = both(lambda: Model(Calling(), Calling()))
    assert calls(probe) == {f"{layer}.inner": 4 for layer in LAYERS}


# ------------------------------------------------------------------ kinds of tensor


def test_a_jagged_nested_tensor_is_seen_and_not_hurt() -> None:
    class Jagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            rows = [x[0], x[1, :7], x[2, :3]]
            nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
            q, k, v = (p(nested).unflatten(-1, [HEADS, -1]).transpose(1, 2) for p in self.parts)
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            return y.to_padded_tensor(0.0)

    def pad(y: Tensor) -> Tensor:
        return F.pad(y, (0, 0, 0, 12 - y.shape[1]))

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Jagged()

        def forward(self, x: Tensor) -> Tensor:
            return pad(self.inner(x))

    probe = both(lambda: Model(Padded(), Attention()))
    assert not probe.alerts
    assert calls(probe) == {"blocks.0.attention.inner": 4, "blocks.1.attention": 4}


def test_a_tensor_subclass_passes_through_unchanged() -> None:
    class Tagged(Tensor):
        pass

    class Tagging(Attention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (z.as_subclass(Tagged) for z in (q, k, v))
            out = super().attend(q, k, v)
            assert type(out) is Tagged
            return out.as_subclass(Tensor)

    for spelling in SPELLINGS:
        probe = both(lambda spelling=spelling: Model(Tagging(spelling), Tagging(spelling)))
        assert calls(probe) == dict.fromkeys(LAYERS, 4), spelling
        assert not probe.alerts


@pytest.mark.parametrize(("batch", "length"), [(0, 0), (0, 3), (2, 0), (1, 1), (1, 2)])
@pytest.mark.parametrize("spelling", ["sdpa", "torch.softmax", "einsum"])
def test_empty_and_tiny_batches(spelling: str, batch: int, length: int) -> None:
    """A rank whose shard ran out of data still runs the model."""

    class Small(Attention):
        def forward(self, x: Tensor) -> Tensor:
            b, t, _ = x.shape
            q, k, v = (
                z.view(b, t, HEADS, WIDTH // HEADS).transpose(1, 2)
                for z in self.qkv(x).chunk(3, -1)
            )
            return self.out(self.attend(q, k, v).transpose(1, 2).reshape(b, t, WIDTH))

    sizes = iter([(2, 5), (batch, length), (2, 5), (batch, length)] * 2)

    def step(model: nn.Module, _: Tensor) -> Tensor:
        return model(torch.zeros(*next(sizes), dtype=torch.long)).square().sum()

    probe = both(lambda: Model(Small(spelling), Small(spelling)), step=step)
    assert not probe.alerts
    assert calls(probe)[LAYERS[0]] >= 2
    assert [len(s) for s in sequences(probe)][::2] == [2, 2]


@pytest.mark.parametrize("spelling", ["sdpa", "torch.softmax"])
def test_shapes_that_change_at_every_step(spelling: str) -> None:
    count = iter(range(1, 1000))

    def step(model: nn.Module, _: Tensor) -> Tensor:
        i = next(count) % 5 + 1
        return loss_of(model, tokens(i, 3 * i))

    probe = both(lambda: make(spelling), step=step, steps=5)
    assert [s[LAYERS[0]] for s in sequences(probe)] != []
    assert not probe.alerts


def test_an_encoder_inside_a_larger_model_with_its_own_masks() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.model = Encoder(0.1), make(dropout=0.1)

        def forward(self, batch: Tensor) -> Tensor:
            return self.encoder(batch) + self.model(batch)

    probe = both(Two)
    assert len(calls(probe)) == 4
    assert set(calls(probe).values()) == {4}
