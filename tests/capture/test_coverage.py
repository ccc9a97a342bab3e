"""What is watched, what is not, and that the probe says so."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from tiny_models import WIDTH, Attention, Encoder, Model, MultiHead, loss_of, tokens
from torch import Tensor, nn

import stability_probe as sp
from stability_probe.capture.hooks import InertHook, is_live
from stability_probe.capture.sites import attention_is_possible, candidates, canonical_name


def live_hooks(model: nn.Module) -> int:
    return sum(
        is_live(hook)
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        for hook in hooks.values()
    )


def run_step(model: nn.Module, probe: sp.Probe) -> None:
    loss = loss_of(model, tokens())
    loss.backward()
    probe.step(loss=loss)


def test_a_router_is_not_attention() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention()
            self.gate = nn.Linear(WIDTH, 4)
            self.experts = nn.Parameter(torch.randn(4, WIDTH) / 8)
            self.router = nn.Parameter(torch.randn(WIDTH, 4) / 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.attention(x)
            weights = torch.softmax(self.gate(x), -1) + F.softmax(x @ self.router, -1)
            chosen, index = weights.topk(2, -1)
            return x + (chosen.unsqueeze(-1) * self.experts[index]).sum(-2)

    model = Model(Routed())
    with sp.watch(model, strict=True) as probe:
        for _ in range(3):
            run_step(model, probe)
        assert [r.layer for r in probe.coverage] == ["blocks.0.attention.attention"]
        assert not probe.alerts


def test_what_a_router_weighs_are_hidden_states_and_no_attention_weights() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4 * WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            weights = torch.softmax(self.gate(x), -1)
            return (weights.unsqueeze(-1) * self.experts(x).unflatten(-1, (4, -1))).sum(-2)

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.experts = Attention("torch.softmax"), Experts()

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(x)
            return x + self.experts(x)

    model = Model(Routed(), Routed())
    with sp.watch(model, strict=True) as probe:
        for _ in range(3):
            run_step(model, probe)
        sites = {r.layer: (r.sees, r.verified) for r in probe.coverage}
        assert not probe.alerts
    layers = [f"blocks.{i}.attention.attention" for i in range(2)]
    assert sites == dict.fromkeys(layers, ("qk", "weights"))


@pytest.mark.parametrize("padded", [0, 3])
def test_additive_attention_is_seen_from_its_second_forward(padded: int) -> None:
    """No q k^T at all: its softmax is known by the values that it weighs, padded or not."""

    class Bahdanau(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.v = nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor) -> Tensor:
            mixed = torch.tanh(self.q(x).unsqueeze(2) + self.k(x).unsqueeze(1))
            weights = F.pad(torch.softmax(self.v(mixed).squeeze(-1), -1), (0, padded))
            return torch.bmm(weights, F.pad(x, (0, 0, 0, padded)))

    torch.manual_seed(0)
    model = Model(Bahdanau())
    with sp.watch(model, strict=True) as probe:
        for _ in range(2):
            run_step(model, probe)
        (report,) = probe.coverage
        assert (report.layer, report.sees) == ("blocks.0.attention", "scores")
        assert report.verified == "weights"
        entropy = probe.latest("entropy")["blocks.0.attention"]
        assert 0 < float(entropy) < torch.tensor(12.0).log()


def test_a_layer_that_gives_nothing_is_an_alert() -> None:
    class OpaqueAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            e = torch.exp2(q @ k.mT / WIDTH)  # a softmax of its own: nothing to recognise
            return (e / e.sum(-1, keepdim=True)) @ v

        def unused_softmax(self, x: Tensor) -> Tensor:
            return torch.softmax(x, -1)

    model = Model(Attention(), OpaqueAttention())
    with sp.watch(model, strict=True) as probe:
        for _ in range(4):
            run_step(model, probe)
        (alert,) = probe.alerts
        assert (alert.rule, alert.layer) == ("blind", "blocks.1.attention")
        assert "OpaqueAttention" in alert.message
        report = {r.layer: r for r in probe.coverage}
        assert report["blocks.1.attention"].reason == "gave no attention call"
        assert report["blocks.0.attention"].verified == "output"


def test_a_softmax_that_samples_is_told_as_info() -> None:
    class SamplingAttention(nn.Module):
        """As deformable attention: weights from a projection, for values picked elsewhere."""

        def __init__(self) -> None:
            super().__init__()
            self.weights, self.values = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4 * WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            weights = torch.softmax(self.weights(x), -1).unsqueeze(-1)
            return (weights * self.values(x).unflatten(-1, (4, -1))).sum(-2)

    model = Model(Attention(), SamplingAttention())
    with sp.watch(model, strict=True) as probe:
        for _ in range(4):
            run_step(model, probe)
        (alert,) = probe.alerts
        assert probe.coverage[1].reason == "its softmax is of no product of queries and keys"
    assert (alert.rule, alert.layer, alert.severity) == ("blind", "blocks.1.attention", "info")


def test_a_replaced_module_is_an_alert_and_is_found_again() -> None:
    model = Model(Attention(), Attention())
    with sp.watch(model, strict=True) as probe:
        for _ in range(3):
            run_step(model, probe)
        model.blocks[1].attention = Attention("torch.softmax")
        for _ in range(30):
            run_step(model, probe)
        (blind,) = [a for a in probe.alerts if a.rule == "blind"]
        assert (blind.layer, blind.step) == ("blocks.1.attention", 10)
        assert "(Attention) was replaced by a Attention" in blind.message
        assert probe.coverage[1].seam == "softmax"
        assert probe.coverage[1].verified == "weights"
        frame = probe.frame()
    steps = frame[frame["layer"] == "blocks.1.attention"]["step"].unique().tolist()
    assert steps == [1, 2, 3, *range(11, 34)]


def test_a_module_that_was_taken_out_is_an_alert() -> None:
    model = Model(Attention(), Attention())
    with sp.watch(model, strict=True) as probe:
        for _ in range(3):
            run_step(model, probe)
        model.blocks = model.blocks[:1]
        for _ in range(30):
            run_step(model, probe)
        (blind,) = [a for a in probe.alerts if a.rule == "blind"]
        assert probe.coverage[1].reason == "no part of the model any more"
    assert "blocks.1.attention (Attention) is no part of the model any more" in blind.message


def test_a_model_that_goes_to_eval_says_so() -> None:
    model = Model(Attention())
    with sp.watch(model, strict=True) as probe:
        for i in range(30):
            if i == 5:
                model.eval()
                model.requires_grad_(False)
            with torch.set_grad_enabled(i < 5):
                model(tokens())
            probe.step()
        (alert,) = [a for a in probe.alerts if a.rule == "blind"]
        assert "eval mode" in alert.message
        assert "model.train()" in alert.remedies[0]


def test_training_in_eval_mode_is_recorded_while_gradients_flow() -> None:
    model = Model(Attention()).eval()
    with sp.watch(model, strict=True, allow_eval=True) as probe:
        run_step(model, probe)
        assert probe.coverage[0].verified == "output"


def test_generate_inside_training_is_dropped() -> None:
    torch.manual_seed(0)
    model = Model(Attention())
    batch = tokens()
    with sp.watch(model, strict=True) as probe:
        loss_of(model, batch).backward()
        probe.step()
        alone = probe.latest("entropy")["blocks.0.attention"]
        with torch.no_grad():
            model(tokens(7, 12))  # train mode, no gradients, never recomputed
        loss_of(model, batch).backward()
        probe.step()
        assert torch.equal(alone, probe.latest("entropy")["blocks.0.attention"])
        assert [o.sequences for r in probe._kept for o in r.observations] == [3, 3]


def test_copies_and_pickles_are_inert() -> None:
    model = Model(Attention())
    with sp.watch(model, strict=True) as probe:
        run_step(model, probe)
        twin = copy.deepcopy(model)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        unpickled = pickle.loads(pickle.dumps(model))
        for other in (twin, loaded, unpickled):
            assert live_hooks(other) == 0
            assert any(
                isinstance(h, InertHook)
                for m in other.modules()
                for h in m._forward_pre_hooks.values()
            )
            loss_of(other, tokens())
        probe.step()
        assert not list(probe._kept)[-1].observations  # the copies' forwards are not the model's
        assert list(model.state_dict()) == list(twin.state_dict())
        with sp.watch(twin, strict=True) as second:  # a copy can be watched in its turn
            run_step(twin, second)
            assert second.coverage[0].verified == "output"


def test_close_leaves_nothing() -> None:
    model = Model(Attention(), Attention("torch.softmax"))
    before = {n: set(vars(m)) for n, m in model.named_modules()}
    probe = sp.watch(model, strict=True)
    for _ in range(2):
        run_step(model, probe)
    assert live_hooks(model) > 0
    probe.close()
    probe.close()
    assert live_hooks(model) == 0
    assert {n: set(vars(m)) for n, m in model.named_modules()} == before


class Interrupting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()
        self.error: type[BaseException] | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.error is not None:
            raise self.error
        return x


class InterruptedAttention(Attention):
    error: type[BaseException] | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return super().attend(q, k, v)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("settled", [False, True])
def test_an_interrupted_forward_is_healed(error: type[BaseException], settled: bool) -> None:
    from torch.overrides import _get_current_function_mode_stack

    model = Model(Attention(), InterruptedAttention())
    with sp.watch(model, strict=True) as probe:
        if settled:
            run_step(model, probe)
        model.blocks[1].attention.error = error
        with pytest.raises(error):
            model(tokens())
        model.blocks[1].attention.error = None
        loss_of(model, tokens()).backward()
        assert not _get_current_function_mode_stack()
        probe.step()
        assert [r.layer for r in probe.coverage] == ["blocks.0.attention", "blocks.1.attention"]
        assert [o.layer for o in list(probe._kept)[-1].observations] == [
            "blocks.0.attention",
            "blocks.1.attention",
        ]


def test_a_fault_in_the_probe_is_an_alert_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model(Attention(), Attention())
    with sp.watch(model) as probe:
        run_step(model, probe)

        def broken(*args: object, **kwargs: object) -> None:
            raise ZeroDivisionError("a bug of ours")

        with monkeypatch.context() as patch:
            patch.setattr("stability_probe.meter.accumulate", broken)
            run_step(model, probe)
        run_step(model, probe)
        faults = [a for a in probe.alerts if a.rule == "probe_fault"]
        assert [a.layer for a in faults] == ["blocks.0.attention", "blocks.1.attention"]
        assert "ZeroDivisionError: a bug of ours" in faults[0].message
        assert "training is not touched" in faults[0].message
        assert probe.coverage[0].reason == "ZeroDivisionError: a bug of ours"


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("", "(root)"),
        ("module", "(root)"),
        ("_orig_mod.attn", "attn"),
        ("module.0.attn", "0.attn"),
        ("_orig_mod.module.h.1.attn", "h.1.attn"),
        ("0._checkpoint_wrapped_module.attn", "0.attn"),
        ("_fsdp_wrapped_module.layers.3._fsdp_wrapped_module.attn", "layers.3.attn"),
        ("encoder.module.attn", "encoder.module.attn"),
    ],
)
def test_canonical_names_survive_wrappers(name: str, canonical: str) -> None:
    assert canonical_name(name) == canonical


def test_candidates_are_the_innermost() -> None:
    assert list(candidates(Encoder())) == [
        "encoder.layers.0.self_attn",
        "encoder.layers.1.self_attn",
    ]
    assert list(candidates(MultiHead(need_weights=False))) == ["attention"]
    assert not candidates(nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1)))


def test_whether_attention_is_possible_is_read_from_the_code() -> None:
    class ChannelAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.sigmoid(self.gate(x))

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.mix(x))

    class Given(nn.Module):
        def __init__(self, function: object) -> None:
            super().__init__()
            self.function = function

    assert not candidates(ChannelAttention())
    assert not attention_is_possible(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Mixer()))
    assert attention_is_possible(Model(Attention()))
    assert attention_is_possible(Encoder())
    assert attention_is_possible(Given(lambda x: x))


def test_operands_given_by_keyword_are_read() -> None:
    class Keywords(Attention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            bias = torch.zeros(1, 1, 1).expand(q.shape[0] * q.shape[1], 12, 12)
            flat = [z.reshape(-1, *z.shape[-2:]) for z in (q, k.mT)]
            scores = bias.baddbmm(batch1=flat[0], batch2=flat[1], beta=1.0, alpha=0.35)
            scores = torch.mul(input=scores.view(*q.shape[:3], -1), other=2.0)
            return torch.matmul(input=torch.softmax(input=scores, dim=-1), other=v)

    model = Model(Keywords())
    with sp.watch(model, strict=True) as probe:
        run_step(model, probe)
        (site,) = probe.coverage
        scale = probe.latest("scale")["blocks.0.attention"]
    assert (site.sees, site.verified) == ("qk", "weights")
    torch.testing.assert_close(scale, torch.full((4,), 0.7))


def test_a_module_that_is_put_in_place_during_the_first_forward_is_seen_by_its_name() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention: nn.Module = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            if isinstance(self.attention, nn.Identity):
                self.attention = Attention()
            return self.attention(x)

    model = Model(Lazy())
    with sp.watch(model, strict=True) as probe:
        for _ in range(3):
            run_step(model, probe)
        assert [r.layer for r in probe.coverage] == ["blocks.0.attention.attention"]
        assert not probe.alerts


def test_a_layer_whose_forward_never_ran_is_told_in_the_table_and_is_no_alert() -> None:
    model = Model(Attention())
    model.spare = Attention()
    with sp.watch(model, strict=True) as probe:
        for _ in range(30):
            run_step(model, probe)
        assert not probe.alerts
        assert probe.coverage[1].reason == "its forward never ran"


def test_a_part_that_a_user_calls_module_keeps_its_name() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = Model(Attention())

        def forward(self, tokens: Tensor) -> Tensor:
            return self.module(tokens)

    for model, name in (
        (Holder(), "module.blocks.0.attention"),
        (nn.DataParallel(Model(Attention())), "blocks.0.attention"),
    ):
        with sp.watch(model, strict=True) as probe:
            run_step(model, probe)
            assert [r.layer for r in probe.coverage] == [name]
