"""Nothing that the probe does while a model trains makes the host wait for the device.

Two proofs. On tensors without values (the meta device) whatever needs a value raises, so the
statistics and the end of a step run there as they would on an accelerator. And in real training
every operator, and every method that reads a value, is recorded together with who asked for it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import stability_probe as sp
from stability_probe import meter as meter_module
from stability_probe import modes
from stability_probe.meter import Meter
from stability_probe.records import AttentionCall, Level
from stability_probe.stats.accumulate import accumulate
from stability_probe.stats.bounds import bracket, reach
from stability_probe.stats.finish import finish
from stability_probe.stats.measure import measure

PACKAGE = str(Path(sp.__file__).parent)
WAITS = {
    *("_local_scalar_dense", "nonzero", "nonzero_static", "masked_select", "is_nonzero", "equal"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "item", "argwhere"),
    *("repeat_interleave", "bincount", "histc"),
}
READS = ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__")

# The host's side of a copy that was started earlier: it waits for an event, a step late. And the
# look at sums on a CPU, where there is no device to wait for; it looks at nothing elsewhere.
ALWAYS = {("numpy", "transfer.py"), ("numpy", "finite.py")}
# At a layer's first calls: whether what was read is what the model computed.
FIRST_STEP = {("__float__", "capture/verify.py"), ("_local_scalar_dense", "capture/verify.py")}
# The coverage report reads the same comparison, and is asked for outside the steps.


def waits(func: torch._ops.OpOverload, args: tuple) -> bool:
    """Whether an operator needs a value on the host to go on."""
    name = func.__name__.split(".")[0].rstrip("_")
    if name in WAITS and func.__name__ != "repeat_interleave.self_int":
        return True
    if name in ("index", "index_put", "_index_put_impl", "_unsafe_index"):
        kinds = {i.dtype for i in args[1] if isinstance(i, Tensor)}
        return bool(kinds & {torch.bool, torch.uint8})
    return False


def asker() -> str:
    """The innermost file of the package on the stack, from the package on; empty: the model."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            return frame.f_code.co_filename[len(PACKAGE) + 1 :]
        frame = frame.f_back
    return ""


class Recorder(TorchDispatchMode):
    """Counts operators, those that wait, and values that were read, by who asked."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.waited: Counter[tuple[str, str]] = Counter()
        self.moved: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators[func.__name__] += 1
        if waits(func, args):
            self.waited[func.__name__.split(".")[0], asker()] += 1
        out = func(*args, **(kwargs or {}))
        copies = "copy" in func.__name__
        tensors = [x for x in (*args, out) if isinstance(x, Tensor)]
        # a number on the host may be an operand: it goes to the device as an argument
        if len({x.device.type for x in tensors if copies or x.dim()}) > 1:
            self.moved.append(f"{func.__name__} in {asker()}")
        return out


@contextmanager
def recording() -> Iterator[Recorder]:
    """Records what runs inside, the probe's own operators too."""
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modes, "_without_modes", nullcontext)  # else none of ours would be seen

        def reading(name: str) -> Callable[..., object]:
            real = getattr(Tensor, name)

            def read(self: Tensor, *args: object, **settings: object) -> object:
                recorder.waited[name, asker()] += 1
                return real(self, *args, **settings)

            return read

        for name in READS:
            patch.setattr(Tensor, name, reading(name))
        with recorder:
            yield recorder


# ------------------------------------------------------------------ real training


class Attention(nn.Module):
    """Self-attention of 4 heads over 2 key heads, in one of four spellings."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.q, self.kv, self.out = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q = self.q(x).view(B, T, 4, 8).transpose(1, 2)
        k, v = (z.view(B, T, 2, 8).transpose(1, 2) for z in self.kv(x).chunk(2, -1))
        return x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(B, T, 32))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        T = q.shape[2]
        edge = torch.ones(T, T, dtype=torch.bool).tril()
        if self.kind == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        if self.kind == "bool mask":
            return F.scaled_dot_product_attention(q, k, v, edge, enable_gqa=True)
        bias = torch.zeros(T, T).masked_fill(~edge, -1e4)
        if self.kind == "additive mask":
            return F.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True)
        k, v = (z.repeat_interleave(2, 1) for z in (k, v))
        return torch.softmax(q @ k.mT / 8**0.5 + bias, -1) @ v


KINDS = ("sdpa", "bool mask", "additive mask", "softmax")


def encoder(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "MultiheadAttention":
        return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    return nn.Sequential(Attention(kind), Attention(kind))


LEVELS = ("full", "sentinel", "default", "sentinel", "sentinel", "full")  # of the steps
PLAN = sp.Plan(dense=1, every=3, full_every=6)


def train(kind: str, *, watched: bool) -> list[Recorder]:
    """One recorder a step; within a step everything is recorded: forward to `probe.step`."""
    model = encoder(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps = []
    with ExitStack() as exits:
        probe = None
        if watched:
            probe = exits.enter_context(
                sp.watch(model, plan=PLAN, strict=True, optimizer=optimizer)
            )
        for _ in LEVELS:
            x = torch.randn(2, 24, 32)
            with recording() as recorder:
                loss = model(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if probe is not None:
                    probe.step(loss=loss.detach(), grad_norm=norm)
            steps.append(recorder)
        if probe is not None:
            assert not probe.alerts
            assert all(site.heads for site in probe.coverage if site.seam)
            assert any(site.heads == 4 for site in probe.coverage)
    return steps


@pytest.mark.parametrize("kind", [*KINDS, "MultiheadAttention"])
def test_no_step_of_a_watched_training_waits(kind: str) -> None:
    bare = train(kind, watched=False)
    steps = train(kind, watched=True)
    assert not any(step.waited for step in bare), "the model itself waits: the test shows nothing"
    for step, (plain, watched) in enumerate(zip(bare, steps, strict=True), start=1):
        extra = watched.operators - plain.operators
        assert sum(extra.values()) > 5, "the probe's operators were not recorded"
        allowed = ALWAYS | (FIRST_STEP if step == 1 else set())
        assert set(watched.waited) <= allowed, f"step {step}"
        assert not watched.moved
    sizes = [sum(step.operators.values()) for step in steps]
    assert sizes[1] < sizes[2] < sizes[5], "sentinel, default and full steps were not all seen"


# ------------------------------------------------------------------ tensors without values


class Copied:
    """Stands for a copy on its way to the host: there is nothing to read yet."""

    ready = False

    def __init__(self, tensor: Tensor) -> None:
        self.shape = tensor.shape
        assert tensor.device.type == "meta"

    def numpy(self) -> np.ndarray:
        raise AssertionError("a copy was read before it came")


def meta_calls() -> dict[str, AttentionCall]:
    """Calls of every kind on the meta device, sizes so that they take several tiles."""
    with torch.device("meta"):
        q, k = torch.empty(2, 4, 700, 16), torch.empty(2, 2, 700, 16)
        base = {"q_BHQD": q, "k_BGKD": k, "v_BGKE": k, "output_BHQE": q}
        edge, bias = torch.ones(700, 700, dtype=torch.bool), torch.zeros(700, 700)
        scores = torch.empty(2, 4, 700, 700)
        lse = torch.empty(2, 4, 700)
        sink, rms, scale = torch.empty(1, 4, 1, 1), torch.empty(()), torch.empty(2, 4, 1, 1)
    made = {
        "plain": base,
        "causal": base | {"causal": True},
        "bool mask": base | {"masks": (edge,)},
        "additive mask": base | {"masks": (bias,), "causal": True},
        "soft-cap": base | {"softcap": 30.0},
        "sink": base | {"sink_BHQ1": sink, "input_rms": rms, "scale": scale},
        "score_mod": base | {"score_mod": lambda score, b, h, q, k: score + q - k},
        "mask_mod": base | {"mask_mod": lambda b, h, q, k: q >= k},
        "log-sum-exp": base | {"lse_BHQ": lse, "causal": True},
        "masked log-sum-exp": base | {"lse_BHQ": lse, "masks": (bias,)},
        "scores": base | {"scores_BHQK": scores},
        "scores alone": {"scores_BHQK": scores, "masks": (bias,)},
        "half": base | {"q_BHQD": q.half(), "k_BGKD": k.half(), "dtype": torch.float16},
    }
    return {name: AttentionCall(layer="a", **fields) for name, fields in made.items()}


CALLS = meta_calls()


@pytest.fixture(autouse=True)
def _autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast, which knows no meta device, takes it for a CPU."""

    class Autocast(torch.autocast):
        def __init__(self, device_type: str, *args: object, **settings: object) -> None:
            super().__init__("cpu" if device_type == "meta" else device_type, *args, **settings)

    monkeypatch.setattr(torch, "autocast", Autocast)


@pytest.mark.parametrize("name", CALLS)
def test_statistics_need_no_value_on_the_host(name: str) -> None:
    call = CALLS[name]
    with recording() as recorder:
        for full in (False, True):
            values = finish(accumulate(call, full=full), full=full)
            assert all(x.device.type == "meta" for x in values.values())
        ends = bracket(call)
        assert ends.low_H.device.type == ends.high_H.device.type == "meta"
        if call.q_BHQD is not None:
            assert reach(call).device.type == "meta"
    assert not recorder.waited
    assert not recorder.moved, "a copy from the host waits for it to be read"


def test_measure_needs_no_value_on_the_host() -> None:
    q, k = CALLS["plain"].q_BHQD, CALLS["plain"].k_BGKD
    with recording() as recorder:
        values = measure(q, k, k, causal=True, enable_gqa=True, rows=True)
    assert {x.device.type for x in values.values()} == {"meta"}
    assert not recorder.waited
    assert not recorder.moved


@pytest.mark.parametrize("level", Level)
def test_a_step_of_the_meter_needs_no_value_on_the_host(
    level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter_module, "HostCopy", Copied)
    meter = Meter()
    with recording() as recorder:
        for step in (1, 2):
            meter.level = level
            for call in CALLS.values():
                meter.call(call)
                tensor = call.scores_BHQK if call.q_BHQD is None else call.q_BHQD
                meter.gradient("a", 0, "grad_q", tensor)
                meter.values(call, tensor, tensor)
            flag = meter.nonfinite_flag()
            assert flag is not None
            assert flag.device.type == "meta"
            measurement = meter.drain(step, read_sentinel=step == 2)
            assert not measurement.ready or level is Level.SENTINEL
    assert not recorder.waited
    assert not recorder.moved


# ------------------------------------------------------------------ the guard itself


BAD = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "bool": lambda x: bool(x.sum() > 0),
    "nonzero": lambda x: x.nonzero(),
    "bool index": lambda x: x[x > 0],
    "bool index_put": lambda x: x.clone().index_put_((x > 0,), torch.zeros(())),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "where": lambda x: torch.where(x > 0),
}


@pytest.mark.parametrize("name", BAD)
def test_the_guard_sees_what_waits(name: str) -> None:
    with recording() as recorder:
        BAD[name](torch.randn(5))
    assert recorder.waited


@pytest.mark.parametrize("name", sorted(BAD.keys() - {"bool index_put"}))  # that one passes
def test_a_tensor_without_values_refuses_what_waits(name: str) -> None:
    with pytest.raises((RuntimeError, NotImplementedError, TypeError)):
        BAD[name](torch.empty(5, device="meta"))


@pytest.mark.parametrize("value", [1.0, [1.0, 2.0]])
def test_the_guard_sees_copies_from_the_host(value: object) -> None:
    with recording() as recorder:
        torch.tensor(value).to("meta")
        torch.empty((), device="meta").add(torch.tensor(2.0))  # an argument: nothing is copied
    assert len(recorder.moved) == 1


def test_the_guard_sees_the_probe_read_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    real = meter_module.call_is_finite

    def impatient(call: AttentionCall) -> bool:
        assert call.output_BHQE.sum().item() is not None
        return real(call)

    monkeypatch.setattr(meter_module, "call_is_finite", impatient)
    waited = [step.waited for step in train("sdpa", watched=True)]
    assert all(("item", "meter.py") in step for step in waited)
