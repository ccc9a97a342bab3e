"""Replacing functions by wrappers, and putting them back."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import sys
import types

import pytest
import stand_ins
import torch
import torch.nn.functional as F
from seeing import Attentive, Taker, seen_by
from stand_ins import package
from torch import Tensor, nn

import stability_probe as sp
from stability_probe.capture import attach
from stability_probe.capture.entries import entries_are_replaced

X = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(3))
HOME = "flash_attn.flash_attn_interface"


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A user's module that did `from flash_attn import flash_attn_func` long ago."""
    for name in ("flash_attn", HOME, "users_module"):
        monkeypatch.setitem(sys.modules, name, None)
    interface = package(HOME, *stand_ins.TWO)
    package("flash_attn").flash_attn_func = interface.flash_attn_func
    users = package("users_module")
    users.flash_attn_func = interface.flash_attn_func
    users.attend = lambda q, k, v: users.flash_attn_func(q, k, v, causal=True)
    return users


def holders(user: types.ModuleType) -> list[object]:
    modules = (sys.modules[HOME], sys.modules["flash_attn"], user)
    return [module.flash_attn_func for module in modules]


def test_an_early_import_is_seen_and_every_name_is_put_back(user: types.ModuleType) -> None:
    original = user.flash_attn_func
    model = Attentive(user.attend)
    attachment = attach(model, Taker(), strict=True)
    assert entries_are_replaced()
    assert len({id(f) for f in holders(user)}) == 1
    assert user.flash_attn_func is not original
    model(X)
    assert [s.seam for s in attachment.sites.values()] == ["flash_attn"]
    attachment.close()
    attachment.close()
    assert all(f is original for f in holders(user))
    assert not entries_are_replaced()


def test_a_name_bound_while_watching_is_put_back_too(user: types.ModuleType) -> None:
    original = user.flash_attn_func
    attachment = attach(Attentive(user.attend), Taker(), strict=True)
    user.another_name = sys.modules["flash_attn"].flash_attn_func
    attachment.close()
    assert user.another_name is original


def test_a_name_that_the_user_changed_meanwhile_is_left_alone(user: types.ModuleType) -> None:
    attachment = attach(Attentive(user.attend), Taker(), strict=True)
    user.flash_attn_func = mine = lambda q, k, v, **_: v
    attachment.close()
    assert user.flash_attn_func is mine


def test_a_library_imported_after_the_start_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn", HOME):
        monkeypatch.setitem(sys.modules, name, None)
    model = Attentive(lambda q, k, v: late["flash_attn_func"](q, k, v))
    late: dict[str, object] = {}
    taker = Taker()
    attachment = attach(model, taker, strict=True)
    try:
        interface = package(HOME, *stand_ins.TWO)
        monkeypatch.setattr(
            model.attention, "attend", lambda q, k, v: interface.flash_attn_func(q, k, v)
        )
        model(X)
        assert len(taker.calls) == 1
    finally:
        attachment.close()
    assert not hasattr(interface.flash_attn_func, "__wrapped__")


@pytest.mark.parametrize("first", [0, 1])
def test_two_probes_on_two_models_close_in_any_order(user: types.ModuleType, first: int) -> None:
    original = user.flash_attn_func
    models = [Attentive(user.attend) for _ in range(2)]
    takers = [Taker(), Taker()]
    open_ones = [attach(m, t, strict=True) for m, t in zip(models, takers, strict=True)]
    for model in models:
        model(X)
    assert [len(t.calls) for t in takers] == [1, 1]
    open_ones.pop(first).close()
    for model in models:
        model(X)
    assert [len(t.calls) for t in takers] == ([1, 2] if first == 0 else [2, 1])
    open_ones.pop().close()
    assert all(f is original for f in holders(user))


def test_signature_name_and_documentation_stay(user: types.ModuleType) -> None:
    original = user.flash_attn_func
    before = inspect.signature(original)
    attachment = attach(Attentive(user.attend), Taker(), strict=True)
    try:
        wrapper = user.flash_attn_func
        assert inspect.signature(wrapper) == before
        assert (wrapper.__name__, wrapper.__module__) == (original.__name__, original.__module__)
        assert inspect.isfunction(wrapper)
    finally:
        attachment.close()


class Holding(nn.Module):
    """A module that keeps the function as an attribute."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.attention = Attentive(stand_ins.weigh).attention
        self.attention.attend = function

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x)


def test_a_function_kept_by_a_module_is_seen_and_the_model_can_be_pickled(
    user: types.ModuleType,
) -> None:
    original = user.flash_attn_func
    model = Holding(original)
    taker = Taker()
    attachment = attach(model, taker, strict=True)
    try:
        model(X)
        assert len(taker.calls) == 1
        again = pickle.loads(pickle.dumps(model))
        buffer = io.BytesIO()
        torch.save(model, buffer)
        copied = copy.deepcopy(model)
        copied(X)
        assert len(taker.calls) == 1
    finally:
        attachment.close()
    assert model.attention.attend is original
    assert torch.equal(copied(X), model(X))
    assert again.attention.attend.__name__ == "flash_attn_func"


def traceable(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    """A kernel that a compiler can read; the mode could read it too, and must not."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return out.transpose(1, 2)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # PyTorch's own
def test_a_compiled_form_is_seen(user: types.ModuleType) -> None:
    """`attend = torch.compile(attend)` at the top of a module is how FlexAttention is used."""
    user.flash_attn_func = sys.modules[HOME].flash_attn_func = traceable
    compiled = user.compiled = torch.compile(traceable, backend="eager")
    model = Attentive(lambda q, k, v: user.compiled(q, k, v))
    calls, report, _ = seen_by(model, X, forwards=2)
    assert (len(calls), report.seam, report.verified) == (2, "flash_attn", "output")
    assert user.compiled is compiled


def test_the_outermost_of_nested_entry_points_is_recorded(user: types.ModuleType) -> None:
    interface = sys.modules[HOME]

    def packed(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
        return interface.flash_attn_func(q, *kv.unbind(2), causal=causal)

    interface.flash_attn_kvpacked_func = packed
    model = Attentive(
        lambda q, k, v: interface.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), causal=True)
    )
    calls, report, _ = seen_by(model, X, forwards=2)
    assert (len(calls), report.verified) == (2, "output")


def test_a_module_inside_a_watched_kernel_is_not_recorded(user: types.ModuleType) -> None:
    """TransformerEngine's attention calls modules of its own."""

    class Kernel(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return traceable(q, k, v)

    model = Attentive(user.attend)
    model.attention.inner = Kernel()

    def attention(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
        return model.attention.inner(q, k, v)

    user.flash_attn_func = sys.modules[HOME].flash_attn_func = attention
    model.attention.attend = lambda q, k, v: user.flash_attn_func(q, k, v)
    calls, report, _ = seen_by(model, X, forwards=2)
    assert (len(calls), report.layer, report.verified) == (2, "attention", "output")


def test_what_a_watched_kernel_calls_is_not_recorded_once_more(user: types.ModuleType) -> None:
    user.flash_attn_func = sys.modules[HOME].flash_attn_func = traceable
    calls, report, _ = seen_by(Attentive(user.attend), X, forwards=2)
    assert (len(calls), report.seam, report.verified) == (2, "flash_attn", "output")


@pytest.mark.filterwarnings("ignore:Using .torch.compile.module.. when there are global hooks")
def test_nothing_is_added_to_a_compiled_model(user: types.ModuleType) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append([n.target for n in graph.graph.nodes if n.op == "call_function"])
        return graph.forward

    def seen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q + k + v

    def count(watched: bool) -> list[object]:
        graphs.clear()
        torch._dynamo.reset()
        user.flash_attn_func = sys.modules[HOME].flash_attn_func = seen
        model = Attentive(lambda q, k, v: user.flash_attn_func(q, k, v), groups=4)
        attachment = attach(model, Taker(), strict=True) if watched else None
        try:
            torch.compile(model.attention, backend=backend, fullgraph=True)(X)
        finally:
            if attachment is not None:
                attachment.close()
        return list(graphs)

    assert count(watched=True) == count(watched=False)


def test_the_call_is_unchanged_and_so_are_losses_and_gradients(user: types.ModuleType) -> None:
    def train(*, watched: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Attentive(user.attend)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        probe = sp.watch(model, strict=True) if watched else None
        losses = []
        for _ in range(5):
            loss = model(X + 0.1 * torch.randn_like(X)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            if probe is not None:
                probe.step(loss=loss)
        if probe is not None:
            assert [(r.seam, r.calls) for r in probe.coverage] == [("flash_attn", 5)]
            assert not probe.alerts
            probe.close()
        return [*losses, *(p.detach() for p in model.parameters()), torch.get_rng_state()]

    bare, seen = train(watched=False), train(watched=True)
    assert all(torch.equal(a, b) for a, b in zip(bare, seen, strict=True))


def test_evaluation_and_generation_are_not_recorded(user: types.ModuleType) -> None:
    model = Attentive(user.attend)
    taker = Taker()
    attachment = attach(model, taker, strict=True)
    try:
        model.eval()
        with torch.no_grad():
            model(X)
        assert not taker.calls
        user.attend(*model.attention.heads(X))  # outside any forward
        assert not taker.calls
    finally:
        attachment.close()


def test_the_user_s_own_error_is_the_user_s(user: types.ModuleType) -> None:
    def broken(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return user.flash_attn_func(q, k[:, :, :, :3], v)

    model = Attentive(broken)
    taker = Taker()
    attachment = attach(model, taker, strict=True)
    try:
        with pytest.raises(ValueError, match=r"."):
            model(X)
        model.attention.attend = user.attend
        model(X)
        assert len(taker.calls) == 1
    finally:
        attachment.close()


def test_a_fault_while_reading_is_kept_from_the_user(
    user: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stability_probe.capture.adapters import flash_attn

    def broken(_: object) -> None:
        raise ZeroDivisionError("broken")

    monkeypatch.setattr(flash_attn, "settings_of", broken)
    model = Attentive(user.attend)
    want = model(X)
    attachment = attach(model, Taker())
    try:
        assert torch.equal(model(X), want)
        assert "broken" in attachment.faults[0][1]
    finally:
        attachment.close()


def test_a_partial_in_a_registry_s_place_is_not_needed(user: types.ModuleType) -> None:
    """A partial kept under a name is seen as well."""
    user.half = functools.partial(user.flash_attn_func, causal=True)
    half = user.half
    calls, report, _ = seen_by(Attentive(lambda q, k, v: user.half(q, k, v)), X)
    assert (len(calls), calls[0].causal, report.verified) == (1, True, "output")
    assert user.half is half
