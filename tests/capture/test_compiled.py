"""Compiled models: seen, not changed, not compiled again."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_models import HEADS, Attention, Encoder, Model, MultiHead, hidden, loss_of, tokens
from torch import Tensor, fx, nn
from torch._dynamo.callback import callback_handler
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch.utils.checkpoint import checkpoint

import stability_probe as sp
from stability_probe.plan import every

pytestmark = [
    # PyTorch's own, while its compiler looks at tensors that have a graph
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*TensorFloat32:UserWarning"),
]
needs_cpp = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler"
)
STEPS = 3


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@dataclass
class Run:
    traces: list[Tensor] = field(default_factory=list)  # losses, weights, random state
    graphs: int = 0
    fused: int = 0  # attention patterns that inductor has replaced by its kernel
    probe: sp.Probe | None = None


def train(
    make: Callable[[], nn.Module],
    compiled: Callable[[nn.Module], Any] | None,
    *,
    watched: bool = True,
    after: bool = False,
    steps: int = STEPS,
) -> Run:
    """A short run that measures every other step, and an evaluation in the middle of it."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compute = compiled(model) if compiled and after else model
    run = Run()
    if watched:
        run.probe = sp.watch(model, strict=True, plan=every(2))
    if compiled and not after:
        compute = compiled(model)
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(compute, tokens())
        loss.backward()
        optimizer.step()
        if run.probe is not None:
            run.probe.step(loss=loss)
        run.traces.append(loss.detach())
        if step == 1:
            model.eval()
            with torch.no_grad():
                run.traces.append(compute(tokens()))
            model.train()
    run.traces += [p.detach().clone() for p in model.parameters()] + [torch.get_rng_state()]
    run.graphs, run.fused = (
        counters["stats"]["unique_graphs"],
        counters["inductor"]["fuse_attention"],
    )
    if run.probe is not None:
        run.probe.close()
    return run


def whole(backend: str) -> Callable[[nn.Module], Any]:
    return lambda model: torch.compile(model, backend=backend, fullgraph=True)


def by_method(backend: str) -> Callable[[nn.Module], Any]:
    def compiled(model: nn.Module) -> nn.Module:
        model.compile(backend=backend, fullgraph=True)
        return model

    return compiled


def regional(backend: str) -> Callable[[nn.Module], Any]:
    def compiled(model: Model) -> nn.Module:
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)
        return model

    return compiled


def assert_nothing_changed(bare: Run, watched: Run) -> None:
    assert len(bare.traces) == len(watched.traces)
    assert all(torch.equal(a, b) for a, b in zip(bare.traces, watched.traces, strict=True))
    assert bare.graphs == watched.graphs > 0
    assert bare.fused == watched.fused


def assert_same_numbers(compiled: Run, eager: Run) -> None:
    """The statistics of a compiled run are those of the eager one, to rounding."""
    assert compiled.probe is not None
    assert eager.probe is not None
    one, two = compiled.probe.frame(), eager.probe.frame()
    assert len(one) > 0
    for name in ("step", "layer", "head"):
        assert list(one[name]) == list(two[name])
    # a bracket is as wide as what it is taken from: scores in eager mode, q and k in a graph
    other = ("input_rms", "max_logit_low", "max_logit_high")
    numbers = [c for c in two if two[c].dtype.kind == "f" and c not in other]
    for name in numbers:
        if name.startswith("nonfinite_"):  # in eager mode a softmax is seen before its values
            one.loc[two[name].isna(), name] = np.nan
        np.testing.assert_allclose(one[name], two[name], rtol=2e-5, atol=2e-5, err_msg=name)
    calls = {r.layer: r.calls for r in compiled.probe.coverage}
    assert calls == {r.layer: r.calls for r in eager.probe.coverage}


class Grouped(Attention):
    """Grouped-query attention."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k[:, : HEADS // 2], v[:, : HEADS // 2]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Masked(Attention):
    """SDPA with a bool or a float mask."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = ~hidden(q.shape[-2])
        if self.spelling == "float":
            mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self.dropout)


class Checkpointed(Model):
    """Every block is checkpointed."""

    reentrant = False

    def forward(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class Reentrant(Checkpointed):
    reentrant = True


def shared() -> Model:
    attention = Attention("sdpa", 0.1)
    return Model(attention, attention)


def one(spelling: str, dropout: float = 0.0) -> Callable[[], nn.Module]:
    return lambda: Model(Attention(spelling, dropout))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "sdpa": one("sdpa"),
    "sdpa with dropout": one("sdpa", 0.1),
    "grouped": lambda: Model(Grouped()),
    "bool mask": lambda: Model(Masked("bool")),
    "float mask": lambda: Model(Masked("float", 0.1)),
    "softmax": one("torch.softmax"),
    "softmax with dropout": one("torch.softmax", 0.1),
    "softmax, where": one("where", 0.1),
    "softmax, einsum": one("einsum"),
    "softmax, cap": one("soft-cap"),
    "softmax, bias": one("bias"),
    "softmax, set item": one("setitem"),
    "multi-head": lambda: MultiHead(need_weights=False),
    "multi-head with weights": lambda: MultiHead(need_weights=True),
    "encoder": Encoder,
    "shared": shared,
    "checkpointed": lambda: Checkpointed(Attention("sdpa", 0.1), Attention("where")),
}
QUICK = ["sdpa with dropout"]
SLOW = [name for name in MODELS if name not in QUICK]
INDUCTOR = [
    "sdpa with dropout", "grouped", "float mask", "softmax", "softmax, where",
    "softmax, set item", "multi-head", "multi-head with weights", "encoder", "checkpointed",
]  # fmt: skip


def check(name: str, backend: str, how: Callable[[str], Callable[[nn.Module], Any]]) -> None:
    bare = train(MODELS[name], how(backend), watched=False)
    watched = train(MODELS[name], how(backend))
    assert_nothing_changed(bare, watched)
    assert watched.probe is not None
    assert not watched.probe.alerts
    if backend == "aot_eager":  # the same kernels as in eager mode: the same run
        assert_same_numbers(watched, train(MODELS[name], None))
    layers = {r.layer for r in watched.probe.coverage if r.calls}
    seen = {o.layer.split("#")[0] for r in watched.probe._kept for o in r.observations}
    assert layers == seen != set()


@pytest.mark.parametrize("name", QUICK)
def test_a_compiled_run_is_the_unwatched_one_with_the_numbers_of_an_eager_one(name: str) -> None:
    check(name, "aot_eager", whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_every_kind_of_attention_in_aot_eager(name: str) -> None:
    check(name, "aot_eager", by_method)


@pytest.mark.slow
@needs_cpp
@pytest.mark.parametrize("name", INDUCTOR)
def test_every_kind_of_attention_in_inductor(name: str) -> None:
    check(name, "inductor", whole)


@pytest.mark.parametrize(
    ("spelling", "backend"),
    [
        ("sdpa", "aot_eager"),
        ("torch.softmax", "aot_eager"),
        ("sdpa", "eager"),
        pytest.param("torch.softmax", "inductor", marks=needs_cpp),
    ],
)
def test_the_numbers_are_those_of_the_scores(spelling: str, backend: str) -> None:
    torch.manual_seed(0)
    model = Model(Attention(spelling))
    batch = tokens()
    attention = model.blocks[0].attention
    with torch.no_grad():
        qkv = attention.qkv(model.embedding(batch)).double()
    q, k, _ = (z.view(*z.shape[:2], HEADS, -1).transpose(1, 2) for z in qkv.chunk(3, -1))
    expected = sp.measure(q, k, causal=True)
    with sp.watch(model, strict=True) as probe:
        loss_of(torch.compile(model, backend=backend, fullgraph=True), batch).backward()
        probe.step()
        (site,) = probe.coverage
        assert (site.sees, site.verified) == ("qk", "output")
        for name in ("qk_abs_max_logit", "entropy", "softmax_slope", "jacobian_trace", "lse_max"):
            got = probe.latest(name)["blocks.0.attention"]
            torch.testing.assert_close(got.double(), expected[name].double(), rtol=1e-5, atol=1e-5)


def test_blocks_compiled_alone_share_a_graph_and_are_told_apart() -> None:
    def make() -> nn.Module:
        return Model(Attention("sdpa", 0.1), Attention("sdpa", 0.1), Attention("sdpa", 0.1))

    bare = train(make, regional("aot_eager"), watched=False)
    eager = train(make, None)
    watched = train(make, regional("aot_eager"), after=True)
    assert_nothing_changed(bare, watched)
    assert_same_numbers(watched, eager)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # in the evaluation
@pytest.mark.parametrize("make", [Checkpointed, Reentrant])
def test_checkpointed_blocks_that_are_compiled_count_once(make: type[Checkpointed]) -> None:
    def model() -> nn.Module:
        return make(Attention("sdpa", 0.1), Attention("sdpa", 0.1))

    bare = train(model, regional("aot_eager"), watched=False)
    watched = train(model, regional("aot_eager"))
    assert_nothing_changed(bare, watched)
    assert_same_numbers(watched, train(model, None))


def test_a_model_that_ran_compiled_before_is_an_alert_that_says_what_to_do() -> None:
    model = Model(Attention())
    compiled = torch.compile(model, backend="aot_eager")
    loss_of(compiled, tokens()).backward()
    with sp.watch(model, strict=True) as probe:
        for _ in range(3):
            loss_of(compiled, tokens()).backward()
            probe.step()
        (alert,) = probe.alerts
        assert alert.rule == "blind"
        assert "torch._dynamo.reset()" in alert.remedies[0]
        assert "compiled before watch()" in probe.coverage[0].reason
        torch._dynamo.reset()
        loss_of(compiled, tokens()).backward()
        probe.step()
        assert probe.coverage[0].verified == "output"
        assert len(probe.alerts) == 1


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_it_can_be_switched_off() -> None:
    before = (OutputGraph.call_user_compiler, inductor.pre_grad_custom_pass)
    model = Model(Attention())
    with sp.watch(model, strict=True, compiled=False) as probe:
        assert (OutputGraph.call_user_compiler, inductor.pre_grad_custom_pass) == before
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(3):
            loss_of(compiled, tokens()).backward()
            probe.step()
        assert probe.coverage[0].calls == 0
        (alert,) = probe.alerts
        assert "compiled=True" in alert.remedies[0]


def test_after_close_the_graph_goes_on_and_tells_nothing() -> None:
    import warnings

    before = (OutputGraph.call_user_compiler, inductor.pre_grad_custom_pass)
    filters = list(warnings.filters)
    model = Model(Attention())
    compiled = torch.compile(model, backend="aot_eager")
    batch = tokens()
    with sp.watch(model, strict=True) as probe:
        inside = loss_of(compiled, batch)
        inside.backward()
        probe.step()
        attachment = probe._attachment
    assert (OutputGraph.call_user_compiler, inductor.pre_grad_custom_pass) == before
    assert not callback_handler.start_callbacks + callback_handler.end_callbacks
    assert warnings.filters == filters
    graphs, calls = counters["stats"]["unique_graphs"], attachment.sites["blocks.0.attention"].calls
    assert torch.equal(loss_of(compiled, batch), inside)
    assert counters["stats"]["unique_graphs"] == graphs
    assert attachment.sites["blocks.0.attention"].calls == calls
    with sp.watch(model, strict=True) as second:  # the graph still holds the operator
        loss_of(compiled, batch).backward()
        second.step()
        assert second.coverage[0].verified == "output"
    assert calls == attachment.sites["blocks.0.attention"].calls


def test_two_models_of_one_class_are_told_apart() -> None:
    first, second = Model(Attention()), Model(Attention())
    with sp.watch(first, strict=True) as one, sp.watch(second, strict=True) as two:
        compiled = [torch.compile(m, backend="aot_eager") for m in (first, second)]
        loss_of(compiled[0], tokens()).backward()
        one.step()
        two.step()
        assert [p.coverage[0].calls for p in (one, two)] == [1, 0]
        loss_of(compiled[1], tokens()).backward()
        assert [p.coverage[0].calls for p in (one, two)] == [1, 1]


def test_the_compiled_module_itself_may_be_watched() -> None:
    compiled = torch.compile(Model(Attention(), Attention()), backend="aot_eager")
    with sp.watch(compiled, strict=True) as probe:
        for _ in range(2):
            loss_of(compiled, tokens()).backward()
            probe.step()
        assert [(r.layer, r.calls) for r in probe.coverage] == [
            ("blocks.0.attention", 2),
            ("blocks.1.attention", 2),
        ]
        assert counters["stats"]["unique_graphs"] == 1


def test_a_fault_in_the_probe_is_an_alert_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    model = Model(Attention())
    compiled = torch.compile(model, backend="aot_eager")
    with sp.watch(model) as probe:
        loss_of(compiled, tokens()).backward()
        probe.step()
        monkeypatch.setattr("stability_probe.meter.accumulate", broken)
        loss_of(compiled, tokens()).backward()
        probe.step()
        (fault,) = [a for a in probe.alerts if a.rule == "probe_fault"]
        assert fault.layer == "blocks.0.attention"
        assert "a bug of ours" in fault.message


@needs_cpp
def test_the_users_own_pass_is_called_and_stays() -> None:
    called: list[int] = []

    def mine(graph: fx.Graph) -> None:
        called.append(len(graph.nodes))

    model = Model(Attention())
    with inductor.patch(pre_grad_custom_pass=mine, fx_graph_cache=False):
        with sp.watch(model, strict=True) as probe:
            loss_of(torch.compile(model), tokens()).backward()
            probe.step()
            assert probe.coverage[0].verified == "output"
        assert called
        assert inductor.pre_grad_custom_pass is mine


def hugging_face(name: str, attention: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    if name == "Llama":
        sizes |= {"num_key_value_heads": 2, "intermediate_size": 64}
    config = getattr(transformers, f"{name}Config")(**sizes, attn_implementation=attention)
    head = {"Bert": "BertForMaskedLM"}.get(name, f"{name}ForCausalLM")
    head = "GPT2LMHeadModel" if name == "GPT2" else head

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = getattr(transformers, head)(config)

        def forward(self, batch: Tensor) -> Tensor:
            return self.model(batch).logits

    return Logits().train()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["Llama", "GPT2", "Bert"])
def test_hugging_face_models(name: str, attention: str) -> None:
    bare = train(lambda: hugging_face(name, attention), whole("aot_eager"), watched=False)
    watched = train(lambda: hugging_face(name, attention), whole("aot_eager"))
    assert_nothing_changed(bare, watched)
    assert_same_numbers(watched, train(lambda: hugging_face(name, attention), None))


LATE = """
import sys
sys.path.insert(0, {tests!r})
import torch
import stability_probe as sp
from tiny_models import Attention, Model, loss_of, tokens

torch.manual_seed(0)
model = Model(Attention())
with sp.watch(model, strict=True) as probe:
    loss_of(model, tokens()).backward()
    probe.step()
    assert "torch._dynamo" not in sys.modules
    with sp.watch(Model(Attention())):  # one that ends before anything is compiled
        pass
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        loss_of(compiled, tokens()).backward()
        probe.step()
    frame = probe.frame()
    assert not probe.alerts, probe.alerts
assert frame["step"].unique().tolist() == [1, 2, 3], frame
assert not [f for f in sys.meta_path if type(f).__module__.startswith("stability_probe")]
"""


def test_the_compiler_is_imported_by_the_run_alone_and_its_graphs_are_seen() -> None:
    code = LATE.format(tests=str(Path(__file__).parents[1]))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
