"""What monitors built on hooks got wrong: numbers moved, memory kept, disks filled, runs killed."""

from __future__ import annotations

import gc
import math
import resource
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from attending import Attention as Given
from attending import random
from side_by_side import both, calls, sequences
from tiny_models import HEADS, VOCABULARY, WIDTH, Attention, Model, loss_of, tokens
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import stability_probe as sp
from stability_probe.records import Severity

LAYERS = ["blocks.0.attention", "blocks.1.attention"]


def make(spelling: str = "torch.softmax") -> Model:
    return Model(Attention("sdpa", 0.1), Attention(spelling, 0.1))


# ------------------------------------------------------------------ numbers that a hook can move


class Padded(nn.Module):
    """Multi-head attention in which some samples are all padding, or queries see nothing."""

    def __init__(self, *, need_weights: bool, how: str, mode: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.options, self.how, self.mode = {"need_weights": need_weights}, how, mode

    def forward(self, batch: Tensor) -> Tensor:
        x, (b, t) = self.embedding(batch), batch.shape
        padding, mask = torch.zeros(b, t, dtype=torch.bool), torch.zeros(t, t, dtype=torch.bool)
        if self.how == "a sample":
            padding[1] = True
        elif self.how == "a query":
            mask[3] = True
        else:
            mask[:] = True
        if self.mode == "float":
            mask = torch.zeros(t, t).masked_fill(mask, -math.inf)
            padding = torch.zeros(b, t).masked_fill(padding, -math.inf)
        y, _ = self.attention(x, x, x, key_padding_mask=padding, attn_mask=mask, **self.options)
        return self.head(x + y)


@pytest.mark.parametrize("mode", ["bool", "float"])
@pytest.mark.parametrize("how", ["a sample", "a query", "every query"])
@pytest.mark.parametrize("need_weights", [True, False])
def test_rows_that_see_nothing_stay_what_they_are(need_weights: bool, how: str, mode: str) -> None:
    """With weights NaN in the output and in every gradient, without them 0 (pytorch#41508)."""

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch)[0, :3], batch[0, :3])  # of rows that are sound

    probe = both(lambda: Padded(need_weights=need_weights, how=how, mode=mode), step=step)
    assert calls(probe) == {"attention": 4}
    first = next(iter(probe._kept)).observations[0].values
    expected = {"a sample": 12, "a query": 3, "every query": 36}[how]
    assert first["masked_rows"].tolist() == [expected] * HEADS
    assert not first["nonfinite"].any()


@pytest.mark.parametrize("attached", ["before the first step", "after a step"])
@pytest.mark.parametrize("need_weights", [True, False])
def test_an_evaluation_with_padding_beyond_its_band_keeps_its_nan(
    need_weights: bool, attached: str
) -> None:
    """A hook on the module that does nothing would clean it up (pytorch#190486)."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x, t = random(3, 12, WIDTH), 12
    band = torch.ones(t, t, dtype=torch.bool).triu(1) | torch.ones(t, t, dtype=torch.bool).tril(-3)
    padding = torch.zeros(3, t, dtype=torch.bool)
    padding[0, :6] = True

    def evaluate() -> Tensor:
        encoder.eval()
        with torch.no_grad():
            out = encoder(x, mask=band, src_key_padding_mask=padding)
        encoder.train()
        return out

    before = evaluate()
    with sp.watch(encoder, strict=True) as probe:
        if attached == "after a step":
            encoder(x).sum().backward()
            probe.step()
        during = evaluate()
    assert torch.equal(before.isnan(), during.isnan())
    assert torch.equal(before.nan_to_num(), during.nan_to_num())
    assert torch.equal(before.nan_to_num(), evaluate().nan_to_num())


@pytest.mark.parametrize("level", ["full", "default", "sentinel"])
def test_no_random_number_is_drawn(level: str) -> None:
    plan = {"full": sp.every(1, full_every=1), "default": sp.every(1), "sentinel": sp.every(1000)}
    model = make()
    with sp.watch(model, plan=plan[level], strict=True) as probe:
        for _ in range(3):
            loss = loss_of(model.eval(), tokens())
            before = torch.get_rng_state()
            loss = loss_of(model, torch.zeros(2, 5, dtype=torch.long))
            loss.backward()
            probe.step(loss=loss)
            assert torch.equal(before, torch.get_rng_state())


class Waits(TorchDispatchMode):
    """Counts operators that wait for a device when there is one."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = str(func)
        indexed = "aten.index.Tensor" in name and any(
            getattr(i, "dtype", None) is torch.bool for i in args[1]
        )
        if any(n in name for n in self.NAMES) or indexed:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("spelling", ["sdpa", "torch.softmax", "soft-cap", "temperature", "einsum"])
def test_nothing_in_a_watched_forward_waits_for_the_device(spelling: str, measured: bool) -> None:
    torch.manual_seed(0)
    model = Model(Attention(spelling), Attention(spelling))
    waits: list[list[str]] = []
    for watched in (False, True):
        plan = sp.every(1, full_every=1) if measured else sp.every(1000)
        probe = sp.watch(model, plan=plan, strict=True) if watched else None
        for _ in range(3):  # the first, of discovery, verifies and finds its way
            mode = Waits()
            with mode:
                loss_of(model, tokens()).backward()
            if probe is not None:
                probe.step()
        if probe is not None:
            probe.close()
        waits.append(mode.seen)
    assert waits[0] == waits[1]


# ------------------------------------------------------------------ memory


def live_tensors() -> int:
    """How many there are; their types are looked at and not the objects, some of which warn."""
    gc.collect()
    return sum(issubclass(type(o), Tensor) for o in gc.get_objects())


def grown(work: Callable[[], object], times: int) -> tuple[int, int]:
    """Bytes of Python memory and of live tensors that `times` calls leave behind."""
    for _ in range(250):
        work()  # caches fill, buffers reach their length
    gc.collect()
    tensors = live_tensors()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(times):
        work()
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return after - before, live_tensors() - tensors


@pytest.mark.slow
@pytest.mark.parametrize("where", ["in memory", "in a directory"])
def test_a_thousand_steps_keep_nothing(where: str, tmp_path: Path) -> None:
    """Without a detach a monitor kept 1 MB a forward (jacobgil/pytorch-grad-cam#88)."""
    torch.manual_seed(0)
    model = Model(Attention("sdpa"), Attention("torch.softmax"))
    logdir = None if where == "in memory" else tmp_path
    with sp.watch(model, logdir, plan=sp.Plan(dense=0, every=1, full_every=50)) as probe:
        if logdir is None:
            probe._kept = type(probe._kept)(maxlen=20)  # its own bound is reached later

        def work() -> None:
            loss = loss_of(model, tokens(2, 6))
            loss.backward()
            probe.step(loss=loss, grad_norm=loss)

        start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        leftover, tensors = grown(work, 1000)
        rss = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) * 1024
    assert tensors <= 10
    assert leftover < 1_500_000, leftover  # the rules' histories grow to their windows
    assert rss < 60_000_000


def test_steps_without_probe_step_do_not_pile_up() -> None:
    """A loop that forgets to call it, or an actor that only rolls out."""
    torch.manual_seed(0)
    model = make()
    with sp.watch(model, strict=True) as probe:
        loss_of(model, tokens()).backward()
        probe.step()

        with torch.no_grad():
            model(tokens())
        loss_of(model, tokens()).backward()
        before = live_tensors()
        for _ in range(30):
            with torch.no_grad():
                model(tokens())
            loss_of(model, tokens()).backward()
        assert live_tensors() - before < 30, "a rollout without a step keeps its pools"


# ------------------------------------------------------------------ disks


DISK_FULL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.path.insert(0, {tests!r})
import torch
from tiny_models import Attention, Model, loss_of, tokens
import stability_probe as sp
torch.manual_seed(0)
model = Model(Attention(), Attention("torch.softmax"))
probe = sp.watch(model, {logdir!r}) if {watched} else None
if {watched}:
    resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
for step in range({steps}):
    loss = loss_of(model, tokens())
    loss.backward()
    if probe is not None:
        probe.step(loss=loss)
    print(loss.item().hex())
if probe is not None:
    probe.close()
    faults = [a for a in probe.alerts if a.rule == "probe_fault"]
    assert 1 <= len(faults) <= 6, [a.message for a in probe.alerts]
    assert all("File too large" in a.message for a in faults), faults
    assert not probe._attachment._handles
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "limit",
    [
        0,
        pytest.param(3000, marks=pytest.mark.xfail(strict=True, reason="told at every step")),
        30000,
    ],
)
def test_a_full_disk_does_not_end_the_run(tmp_path: Path, limit: int) -> None:
    """Twenty-one hours were lost in a flush (kohya-ss/sd-scripts#1160)."""
    told = []
    for watched in (False, True):
        code = DISK_FULL.format(
            tests=str(Path(__file__).parents[1]), logdir=str(tmp_path / "run"), watched=watched,
            limit=limit, steps=60,
        )  # fmt: skip
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        told.append(done.stdout)
    assert told[0] == told[1]
    assert len(told[0].split()) == 60


# ------------------------------------------------------------------ shapes of models


def test_layers_without_attention_and_heads_that_differ() -> None:
    """Hybrid stacks, and layers of other shapes (maxtext#3277): nothing is stacked over layers."""

    class Wide(nn.Module):
        def __init__(self, heads: int) -> None:
            super().__init__()
            self.q, self.num_heads = nn.Linear(WIDTH, WIDTH), heads

        def forward(self, x: Tensor) -> Tensor:
            b, t, d = x.shape
            q = self.q(x).view(b, t, self.num_heads, -1).transpose(1, 2)
            return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(b, t, d)

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.cell(x)[0]

    probe = both(lambda: Model(Wide(2), Recurrent(), Wide(8), nn.Linear(WIDTH, WIDTH), Wide(1)))
    heads = {r.layer: r.heads for r in probe.coverage}
    assert heads == {f"blocks.{i}.attention": h for i, h in ((0, 2), (2, 8), (4, 1))}
    assert not probe.alerts
    assert probe.frame().groupby("layer")["head"].nunique().tolist() == [2, 8, 1]


def test_maxima_are_of_their_step_and_not_of_the_run() -> None:
    """A logged "maximum" that only ever rises hides that a run has calmed down (Primus#1164)."""
    sizes = [1.0, 50.0, 2.0, 1.0]
    model = Given(F.scaled_dot_product_attention)
    with sp.watch(model, strict=True, plan=sp.every(1)) as probe:
        got = []
        for size in sizes:
            x = torch.full((1, 1, 3, 4), size, requires_grad=True)
            model(x, torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4))
            probe.step()
            got.append(float(probe.latest("qk_abs_max_logit")["(root)"]))
    assert got == pytest.approx([2 * s for s in sizes])


def test_a_step_whose_forward_never_ran_has_no_numbers_of_the_last_one() -> None:
    model = make()
    with sp.watch(model, strict=True, plan=sp.every(1)) as probe:
        loss_of(model, tokens()).backward()
        probe.step()
        probe.step(skipped=True)
        loss_of(model, tokens()).backward()
        probe.step()
    assert [len(s) for s in sequences(probe)] == [2, 0, 2]


# ------------------------------------------------------------------ whose fault it is


@pytest.mark.parametrize("spelling", ["sdpa", "torch.softmax"])
def test_what_overflowed_below_attention_is_not_laid_to_attention(spelling: str) -> None:
    """T5 in float16: an MLP made the infinity that attention then shows (transformers#9295)."""

    class Overflowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model(Attention(spelling), Attention(spelling))

        def forward(self, batch: Tensor) -> Tensor:
            x = self.model.embedding(batch)
            x = self.model.blocks[0](x)
            x = torch.where(torch.arange(x.shape[1])[:, None] == 3, x * torch.inf, x)
            return self.model.head(self.model.blocks[1](x))

    model = Overflowing()
    with sp.watch(model, strict=True) as probe:
        loss_of(model, tokens())
        probe.step()
    (alert,) = [a for a in probe.alerts if a.rule == "nonfinite"]
    assert alert.layer == "model.blocks.1.attention"
    assert "from outside attention, between model.blocks.0" in alert.cause
    assert alert.severity is Severity.CRITICAL


@pytest.mark.parametrize("where", ["q", "k"])
def test_one_layer_far_larger_than_the_others_is_the_one_that_is_named(where: str) -> None:
    """A level belongs to a checkpoint's layer: nothing of another layer is told with it."""
    torch.manual_seed(0)
    model = Model(*(Attention("torch.softmax") for _ in range(3)))
    rows = {"q": slice(0, 8), "k": slice(WIDTH, WIDTH + 8)}
    with torch.no_grad():
        model.blocks[1].attention.qkv.weight[rows[where]] *= 3e4
    with sp.watch(model, strict=True) as probe:
        loss_of(model, tokens())
        probe.step()
    told = {(a.layer, a.heads) for a in probe.alerts}
    assert told == {("blocks.1.attention", (0,))}


def test_a_loop_of_the_user_s_that_counts_steps_itself() -> None:
    """Twelve forwards, three updates: three records, on the user's own numbers."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with sp.watch(model, strict=True) as probe:
        for update in (100, 200, 300):
            for _ in range(4):
                (loss_of(model, tokens()) / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
            probe.step(step=update)
    assert [r.step for r in probe._kept] == [100, 200, 300]
    assert sequences(probe) == [dict.fromkeys(LAYERS, 12)] * 3


@pytest.mark.parametrize("overflows", [False, True])
def test_a_scaler_that_searches_is_told_from_attention_that_breaks(overflows: bool) -> None:
    """An infinite gradient norm while the scale is searched is info, at most."""
    torch.manual_seed(0)
    model = Model(Attention("torch.softmax"), Attention())
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127 if overflows else 2.0**16)
    with sp.watch(model, strict=True) as probe:
        for _ in range(5):
            optimizer.zero_grad()
            loss = loss_of(model, tokens())
            scaler.scale(loss * 1e12 if overflows else loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            probe.step(loss=loss, grad_norm=norm, skipped=scaler.get_scale() < before)
    skipped = [r.scalars.skipped for r in probe._kept]
    assert skipped == [overflows] * 5
    assert {a.severity for a in probe.alerts} == ({Severity.INFO} if overflows else set())
    assert [len(s) for s in sequences(probe)] == [2] * 5
