"""Which forwards count: nested, shared, direct, interrupted, recomputed, evaluated."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from side_by_side import both, calls, sequences
from tiny_models import HEADS, VOCABULARY, WIDTH, Attention, Model, loss_of, tokens
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import stability_probe as sp

LAYERS = ["blocks.0.attention", "blocks.1.attention"]
SPELLINGS = ("sdpa", "torch.softmax")


def make(spelling: str = "sdpa") -> Model:
    return Model(Attention(spelling, 0.1), Attention(spelling, 0.1))


def of_logits(logits: Tensor, batch: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch.flatten())


# ------------------------------------------------------------------ nested and shared


class Wrapping(nn.Module):
    """Attention inside attention, as BertAttention holds BertSelfAttention; some attend too."""

    def __init__(self, inner: nn.Module, *, attends: bool = False) -> None:
        super().__init__()
        self.inner, self.attends = inner, attends

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return F.scaled_dot_product_attention(x, x, x) if self.attends else x


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nested_attention_modules_count_a_call_once(depth: int, spelling: str) -> None:
    def build() -> nn.Module:
        inner: nn.Module = Attention(spelling, 0.1)
        for _ in range(depth):
            inner = Wrapping(inner)
        return Model(inner)

    probe = both(build)
    assert calls(probe) == {".".join(["blocks.0.attention", *["inner"] * depth]): 4}


@pytest.mark.parametrize("depth", [1, 3])
def test_each_of_nested_modules_has_its_own_calls(depth: int) -> None:
    def build() -> nn.Module:
        inner: nn.Module = Attention("torch.softmax", 0.1)
        for _ in range(depth):
            inner = Wrapping(inner, attends=True)
        return Model(inner)

    probe = both(build)
    names = [".".join(["blocks.0.attention", *["inner"] * i]) for i in range(depth, -1, -1)]
    assert calls(probe) == dict.fromkeys(names, 4)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("times", [2, 3])
def test_a_shared_module_tells_its_calls_apart(times: int, spelling: str) -> None:
    """One module at several depths (ALBERT, Universal Transformers): each depth is a layer."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.block = Attention(spelling, 0.1)
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, batch: Tensor) -> Tensor:
            x = self.embedding(batch)
            for _ in range(times):
                x = x + self.block(x)
            return self.head(x)

    probe = both(Recurrent)
    assert calls(probe) == {"block": 4 * times}
    assert [set(s.values()) for s in sequences(probe)] == [{3}] * 4, sequences(probe)
    assert all(len(s) == times for s in sequences(probe))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_one_module_under_two_names_is_one_layer_with_two_calls(spelling: str) -> None:
    attention: list[nn.Module] = []

    def build() -> nn.Module:
        attention[:] = [Attention(spelling, 0.1)]
        return Model(attention[0], attention[0])

    probe = both(build)
    assert sum(calls(probe).values()) == 8
    assert all(sorted(s.values()) == [3, 3] for s in sequences(probe)), sequences(probe)
    assert not probe.alerts


@pytest.mark.parametrize("chunks", [2, 3])
def test_a_query_that_is_cut_into_chunks(chunks: int) -> None:
    """Several calls in one forward; none is lost, and the largest logit is that of the whole."""

    class Chunked(Attention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            parts = q.chunk(chunks, -2)
            return torch.cat([F.scaled_dot_product_attention(p, k, v) for p in parts], -2)

    torch.manual_seed(0)
    model, batch = Model(Chunked()), tokens()
    with sp.watch(model, strict=True) as probe:
        loss_of(model, batch).backward()
        probe.step()
        largest = torch.stack(list(probe.latest("qk_abs_max_logit").values())).amax(0)
    qkv = model.blocks[0].attention.qkv(model.embedding(batch))
    q, k, _ = (z.view(*batch.shape, HEADS, -1).transpose(1, 2) for z in qkv.chunk(3, -1))
    expected = (q @ k.mT / (WIDTH // HEADS) ** 0.5).abs().amax((0, 2, 3))
    torch.testing.assert_close(largest, expected.detach())


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_forward_that_is_called_directly_is_seen_or_told(spelling: str, settled: bool) -> None:
    """`attention.forward(x)` passes every hook by; the caller's own frame may still see it."""

    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Attention(spelling)
            self.direct = not settled

        def forward(self, x: Tensor) -> Tensor:
            return self.inner.forward(x) if self.direct else self.inner(x)

    model = Model(Direct())
    with sp.watch(model, strict=True) as probe:
        for step in range(30):
            if step == 2:
                model.blocks[0].attention.direct = True
            loss_of(model, tokens()).backward()
            probe.step()
        told = [a for a in probe.alerts if a.rule == "blind"]
        recorded = len(sequences(probe)[-1]) == 1
        assert recorded, probe.coverage
        assert bool(told) == settled


# ------------------------------------------------------------------ exceptions


class Failing(nn.Module):
    """Raises where and what it is told to."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.error: type[BaseException] | None = None
        self.when = ""

    def trip(self, when: str) -> None:
        if self.error is not None and self.when == when:
            raise self.error

    def forward(self, x: Tensor) -> Tensor:
        self.trip("before")
        x = self.inner(x)
        self.trip("after")
        return _Trip.apply(x, self)


class _Trip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, owner: Failing) -> Tensor:
        ctx.owner = owner  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple:
        ctx.owner.trip("backward")  # type: ignore[attr-defined]
        return gradient, None


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize(
    ("error", "when", "how"),
    [
        *(
            (error, when, how)
            for error in (RuntimeError, KeyboardInterrupt)
            for when in ("before", "after", "backward")
            for how in ("plain", "reentrant", "not reentrant")
            if error is KeyboardInterrupt or (when, how) == ("after", "plain")
        ),
        *((e, "after", "plain") for e in (StopIteration, GeneratorExit, SystemExit, MemoryError)),
    ],
)
def test_whatever_ends_a_forward_or_a_backward(
    error: type[BaseException], when: str, how: str, settled: bool
) -> None:
    """The next step is recorded as if nothing had been, and no mode stays on in between."""
    torch.manual_seed(0)
    model = Model(Failing(Attention()), Failing(Attention("torch.softmax")))

    def forward(batch: Tensor) -> Tensor:
        x = model.embedding(batch)
        for block in model.blocks:
            reentrant = how == "reentrant"
            x = block(x) if how == "plain" else checkpoint(block, x, use_reentrant=reentrant)
        return of_logits(model.head(x), batch)

    with sp.watch(model, strict=True) as probe:
        for step in range(5):
            failing = model.blocks[1].attention
            if step == (2 if settled else 0):
                failing.error, failing.when = error, when
                with pytest.raises((error, RuntimeError)):
                    forward(tokens()).backward()
                failing.error = None
                assert torch.equal(torch.ones(2).softmax(0), torch.full((2,), 0.5))
            forward(tokens()).backward()
            assert not _get_current_function_mode_stack()
            probe.step()
        names = [f"{layer}.inner" for layer in LAYERS]
        assert [r.layer for r in probe.coverage] == names
        assert [list(s) for s in sequences(probe)][-2:] == [names, names]
        assert {s[n] for s in sequences(probe)[-2:] for n in names} == {3}
        assert not probe.alerts


def test_a_hook_of_the_user_that_raises() -> None:
    torch.manual_seed(0)
    model = make()

    def broken(*_: object) -> None:
        raise ValueError("a hook of the user's own")

    with sp.watch(model, strict=True) as probe:
        for register in ("register_forward_pre_hook", "register_forward_hook"):
            for _ in range(2):
                handle = getattr(model.blocks[1].attention, register)(broken)
                with pytest.raises(ValueError, match="user's own"):
                    model(tokens())
                handle.remove()
                loss_of(model, tokens()).backward()
                assert not _get_current_function_mode_stack()
                probe.step()
        assert list(sequences(probe)[-1]) == LAYERS
