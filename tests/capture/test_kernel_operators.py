"""PyTorch's kernels called as operators, and nested tensors of the jagged layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from seeing import Attentive, assert_reads_like, attended, dense, seen_by
from torch import Tensor, nn

import stability_probe as sp
from stability_probe.capture.adapters.aten import read, rows_of

KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@pytest.mark.parametrize("kernel", [KERNEL, KERNEL.default], ids=["packet", "overload"])
@pytest.mark.parametrize("mask", ["none", "causal", "bias"])
def test_a_kernel_called_as_an_operator(kernel: object, mask: str) -> None:
    bias = torch.randn(10, 10) if mask == "bias" else None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return kernel(q, k, v, 0.0, mask == "causal", attn_mask=bias, scale=0.3)[0].transpose(1, 2)

    torch.manual_seed(0)
    x = torch.randn(2, 10, 32)
    model = Attentive(attend, groups=4)
    calls, report, _ = seen_by(model, x)
    assert (report.seam, report.verified, len(calls)) == ("aten", "lse", 1)
    q, k, _ = model.attention.heads(x)
    scores = products = dense(q, k, 0.3)
    if bias is not None:
        scores = scores + bias
    if mask == "causal":
        scores = scores.masked_fill(torch.ones(10, 10, dtype=torch.bool).triu(1), -torch.inf)
    assert_reads_like(calls[0], scores, products)


def test_a_wrong_log_sum_exp_fails_the_check() -> None:
    """The kernel's own number is really compared: an output alone would not tell a shift."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return KERNEL(q, k, v)[0].transpose(1, 2)

    model = Attentive(attend, groups=4)
    real = read

    def shifted(*args: object) -> object:
        seen = real(*args)
        seen.lse.add_(0.5)
        return seen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stability_probe.capture.adapters.aten.read", shifted)
        _, report, _ = seen_by(model, torch.randn(2, 10, 32))
    assert report.verified == "no"
    assert "rebuilt lse differs" in report.reason


@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 3, 32), (2, 3, 5, 1)])
def test_the_padding_of_a_log_sum_exp_is_cut(shape: tuple[int, ...]) -> None:
    q = torch.zeros(2, 3, 5, 8)
    lse = torch.arange(torch.Size(shape).numel()).float().view(shape)
    cut = rows_of(lse, q)
    assert cut is not None
    assert torch.equal(cut, lse.squeeze(-1)[..., :5] if len(shape) == 4 else lse[..., :5])
    assert rows_of(torch.zeros(0), q) is None


class Jagged(nn.Module):
    """Attention over sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def heads(self, x: Tensor) -> list[Tensor]:
        return [project(x).unflatten(-1, [4, 8]) for project in self.qkv]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (z.transpose(1, 2) for z in self.heads(x))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


def sequences(*lengths: int) -> Tensor:
    parts = [torch.randn(n, 32) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def test_jagged_sequences_are_read_apart() -> None:
    torch.manual_seed(0)
    x = sequences(3, 7, 2)
    model = nn.Sequential(Jagged())
    calls, report, _ = seen_by(model, x, forwards=2)
    assert (report.layer, report.verified, report.heads) == ("0", "output", 4)
    assert calls[0].sequences == 3
    q, k, _ = (z.unsqueeze(0) for z in model[0].heads(x.values()))
    products = dense(q, k)
    document = torch.tensor([0] * 3 + [1] * 7 + [2] * 2)
    apart = document[:, None] != document
    assert_reads_like(calls[0], products.masked_fill(apart, -torch.inf), products)
    assert calls[0].input_rms is not None
    torch.testing.assert_close(calls[0].input_rms, x.values().square().mean().sqrt())


def test_a_probe_counts_jagged_sequences(tmp_path: Path) -> None:
    model = nn.Sequential(Jagged())
    with sp.watch(model, tmp_path, strict=True) as probe:
        for _ in range(2):
            loss = model(sequences(3, 7, 2)).values().square().mean()
            loss.backward()
            probe.step(loss=loss)
        assert set(probe.latest("entropy")) == {"0"}
    records = [r for r in sp.load(tmp_path).records() if r.measured]
    assert {o.sequences for r in records for o in r.observations} == {3}


def test_strided_nested_tensors_are_refused_with_a_reason() -> None:
    class Strided(Jagged):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (z.transpose(1, 2) for z in self.heads(x))
            q, k, v = (torch.nested.as_nested_tensor(list(t)) for t in (q, k, v))
            return torch.nested.to_padded_tensor(F.scaled_dot_product_attention(q, k, v), 0.0)

    model = nn.Sequential(Strided())
    with sp.watch(model) as probe:
        for _ in range(4):
            loss = model(torch.randn(2, 5, 32)).square().mean()
            loss.backward()
            probe.step(loss=loss)
        (report,) = probe.coverage
        assert "strided layout" in report.reason


def test_the_helpers_agree_with_pytorch() -> None:
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8)
    want = F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(attended(dense(q, k), v), want)
