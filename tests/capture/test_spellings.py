"""Whatever spelling a model uses, the numbers are those of the scores its softmax received."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_models import HEADS, KERNELS, PRODUCTS, Attention, Model, hidden, loss_of, tokens
from torch import Tensor, nn

import stability_probe as sp


def dense(model: Model, batch: Tensor, spelling: str) -> dict[str, Tensor]:
    """The statistics of the first block in float64, from its projections."""
    attention = model.blocks[0].attention
    with torch.no_grad():
        qkv = attention.qkv(model.embedding(batch)).double()
    b, t, _ = qkv.shape
    q, k, _ = (z.view(b, t, HEADS, -1).transpose(1, 2) for z in qkv.chunk(3, -1))
    scale = torch.full((1, HEADS, 1, 1), 1 / math.sqrt(q.shape[-1]), dtype=torch.float64)
    if spelling == "temperature":
        scale = torch.tensor([0.2, 0.4, 0.8, 1.6], dtype=torch.float64).view(1, HEADS, 1, 1)
    raw = q @ k.mT * scale
    scores = torch.tanh(raw / 2) * 2 if spelling == "soft-cap" else raw
    if spelling.endswith("bias"):
        distance = -(torch.arange(t)[:, None] - torch.arange(t)).abs().double()
        slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]).view(1, HEADS, 1, 1).double()
        scores = scores + distance * slopes
    visible = ~hidden(t)
    p = torch.softmax(scores.masked_fill(~visible, -torch.inf), -1)
    entropy = -torch.special.xlogy(p, p).sum(-1)
    rows = visible.sum(-1) > 1
    return {
        "qk_abs_max_logit": raw.abs().masked_fill(~visible, 0).amax((0, 2, 3)),
        "abs_max_logit": scores.abs().masked_fill(~visible, 0).amax((0, 2, 3)),
        "entropy": entropy[..., rows].mean((0, 2)),
        "q_norm_max": q.norm(dim=-1).amax((0, 2)),
        "jacobian_trace": (1 - (p * p).sum(-1))[..., rows].mean((0, 2)),
    }


@pytest.mark.parametrize("spelling", [*KERNELS, *PRODUCTS])
def test_statistics_are_those_of_the_scores_softmax_received(spelling: str) -> None:
    torch.manual_seed(0)
    model = Model(Attention(spelling))
    batch = tokens()
    with sp.watch(model, strict=True) as probe:
        loss_of(model, batch).backward()
        probe.step()
        (site,) = probe.coverage
        got = {name: probe.latest(name)["blocks.0.attention"] for name in dense(model, batch, "")}
    assert site.verified == ("output" if spelling in KERNELS else "weights")
    for name, expected in dense(model, batch, spelling).items():
        torch.testing.assert_close(got[name].double(), expected, rtol=1e-5, atol=1e-6)
    blurred = spelling.endswith(
        ("setitem", "clamp")
    )  # the scores are certain, q and k only before that
    assert site.sees == ("scores, qk" if blurred else "qk")


@pytest.mark.parametrize("spelling", ["sdpa", "torch.softmax"])
def test_settled_sites_give_the_same_numbers_as_discovery(spelling: str) -> None:
    torch.manual_seed(0)
    model = Model(Attention(spelling), Attention(spelling))
    batch = tokens()
    seen = []
    with sp.watch(model, strict=True) as probe:
        for _ in range(2):  # discovery, then the sites' own hooks
            loss_of(model, batch).backward()
            probe.step()
            seen.append(probe.latest("entropy"))
    assert list(seen[0]) == list(seen[1]) == ["blocks.0.attention", "blocks.1.attention"]
    assert all(torch.equal(seen[0][name], seen[1][name]) for name in seen[0])


def test_einsum_with_other_axes_is_read_the_right_way_round() -> None:
    class Transposed(Attention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = torch.einsum("bhqd,bhkd->bkqh", q, k) / math.sqrt(q.shape[-1])
            weights = torch.softmax(scores, dim=1)
            return torch.einsum("bkqh,bhkd->bhqd", weights, v)

    torch.manual_seed(0)
    model = Model(Transposed("einsum"))
    batch = tokens()
    with sp.watch(model, strict=True) as probe:
        loss_of(model, batch).backward()
        probe.step()
        entropy = probe.latest("entropy")["blocks.0.attention"]
        (site,) = probe.coverage
    qkv = model.blocks[0].attention.qkv(model.embedding(batch)).double()
    q, k, _ = (z.view(*batch.shape, HEADS, -1).transpose(1, 2) for z in qkv.chunk(3, -1))
    p = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1)
    expected = -torch.special.xlogy(p, p).sum(-1).mean((0, 2))
    assert site.heads == HEADS
    assert site.verified == "weights"
    torch.testing.assert_close(entropy.double(), expected, rtol=1e-5, atol=1e-6)


def test_grouped_query_attention_counts_query_heads() -> None:
    class Grouped(Attention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(
                q, k[:, :2], v[:, :2], enable_gqa=True
            )

    torch.manual_seed(0)
    model = Model(Grouped())
    batch = tokens()
    with sp.watch(model, strict=True) as probe:
        loss_of(model, batch).backward()
        probe.step()
        largest = probe.latest("qk_abs_max_logit")["blocks.0.attention"]
        (site,) = probe.coverage
    qkv = model.blocks[0].attention.qkv(model.embedding(batch)).double()
    q, k, _ = (z.view(*batch.shape, HEADS, -1).transpose(1, 2) for z in qkv.chunk(3, -1))
    k = k[:, :2].repeat_interleave(2, dim=1)
    expected = (q @ k.mT / math.sqrt(q.shape[-1])).abs().amax((0, 2, 3))
    assert (site.heads, site.verified) == (HEADS, "output")
    torch.testing.assert_close(largest.double(), expected, rtol=1e-5, atol=1e-6)


class Root(Attention):
    """Attends with grouped queries in an einsum, and is the watched model itself."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).chunk(3, -1)
        q, (k, v) = q.view(b, t, 2, 2, 8), (z[..., :16].view(b, t, 2, 8) for z in (k, v))
        scores = torch.einsum("btgrd,bsgd->bgrts", q, k) / math.sqrt(8)
        return torch.einsum("bgrts,bsgd->btgrd", scores.softmax(-1), v).reshape(b, t, -1)


def test_an_einsum_over_groups_is_read_per_query_head_and_a_root_that_attends_is_seen() -> None:
    torch.manual_seed(0)
    model, x = Root(), torch.randn(2, 5, 32)
    with sp.watch(model, strict=True) as probe:
        for _ in range(3):
            model(x).sum().backward()
            probe.step()
        largest = probe.latest("qk_abs_max_logit")["(root)"].double()
        (site,) = probe.coverage
    q, k, _ = model.qkv(x).detach().double().chunk(3, -1)
    q = q.view(2, 5, 4, 8).transpose(1, 2)
    k = k[..., :16].view(2, 5, 2, 8).transpose(1, 2).repeat_interleave(2, 1)
    expected = (q @ k.mT / math.sqrt(8)).abs().amax((0, 2, 3))
    assert (site.calls, site.heads, site.sees, site.attends) == (3, 4, "qk", "self")
    torch.testing.assert_close(largest, expected, rtol=1e-5, atol=1e-6)


def test_talking_heads_are_seen_by_the_scores_their_softmax_received() -> None:
    class TalkingHeads(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.Linear(HEADS, HEADS), nn.Linear(HEADS, HEADS)

        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = q @ k.mT / math.sqrt(q.shape[-1])
            self.scores = self.before(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            weights = self.scores.softmax(-1)
            return self.after(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) @ v

    torch.manual_seed(0)
    model = Model(TalkingHeads())
    with sp.watch(model, strict=True) as probe:
        loss_of(model, tokens()).backward()
        probe.step()
        (site,) = probe.coverage
        largest = probe.latest("abs_max_logit")["blocks.0.attention"]
    expected = model.blocks[0].attention.scores.detach().abs().amax((0, 2, 3))
    assert (site.layer, site.sees, site.verified) == ("blocks.0.attention", "scores", "weights")
    torch.testing.assert_close(largest, expected)
