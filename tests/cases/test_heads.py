"""Heads, and what sits before and after their product: groups, norms, rotary, dropout, sinks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from attending import Attention, assert_agree, dense, random, watch_once
from torch import Tensor, nn

B, T, D = 2, 10, 8
HIDDEN = torch.ones(T, T, dtype=torch.bool).triu(1)
SDPA = F.scaled_dot_product_attention


def qkv(heads: int, *, groups: int | None = None) -> list[Tensor]:
    shapes = [(B, heads, T, D)] + 2 * [(B, groups or heads, T, D)]
    q, k, v = (random(*shape, seed=i) for i, shape in enumerate(shapes))
    return [q.requires_grad_(), k, v]


# ------------------------------------------------------------------ heads


@pytest.mark.parametrize(
    ("heads", "groups"), [(1, 1), (4, 4), (4, 2), (4, 1), (6, 3), (6, 2), (8, 1), (12, 4)]
)
@pytest.mark.parametrize(
    "how",
    [
        "enable_gqa",
        "expanded",
        "five axes",
        "einsum over groups",
    ],
)  # fmt: skip
def test_groups_of_any_ratio_count_query_heads(heads: int, groups: int, how: str) -> None:
    """Tiled with `repeat` in place of `repeat_interleave` the maxima belong to other heads."""
    q, k, v = qkv(heads, groups=groups)
    k = k * torch.arange(1, groups + 1).view(1, groups, 1, 1)
    share = heads // groups

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if how == "enable_gqa":
            return SDPA(q, k, v, enable_gqa=True)
        if how == "expanded":
            k, v = (x.repeat_interleave(share, 1) for x in (k, v))
            return torch.softmax(q @ k.mT / math.sqrt(D), -1) @ v
        grouped = q.reshape(B, groups, share, T, D)
        if how == "five axes":
            scores = grouped @ k.unsqueeze(2).mT / math.sqrt(D)
            return (torch.softmax(scores, -1) @ v.unsqueeze(2)).reshape(B, heads, T, D)
        scores = torch.einsum("bgrqd,bgkd->bgrqk", grouped, k) / math.sqrt(D)
        return torch.einsum("bgrqk,bgkd->bgrqd", torch.softmax(scores, -1), v)

    seen = watch_once(Attention(attend, heads), q, k, v)
    raw = q @ k.repeat_interleave(share, 1).mT / math.sqrt(D)
    assert_agree(seen.values, dense(raw))
    assert seen.coverage[0].heads == heads


@pytest.mark.parametrize("queries", [1, 2, 7])
@pytest.mark.parametrize("keys", [1, 3, 9])
@pytest.mark.parametrize("how", ["sdpa", "softmax"])
def test_cross_attention_of_any_lengths(queries: int, keys: int, how: str) -> None:
    q, k = random(B, 3, queries, D).requires_grad_(), random(B, 3, keys, D, seed=1)

    def attend(q: Tensor, k: Tensor) -> Tensor:
        return SDPA(q, k, k) if how == "sdpa" else torch.softmax(q @ k.mT / D**0.5, -1) @ k

    seen = watch_once(Attention(attend, 3), q, k)
    assert_agree(seen.values, dense(q @ k.mT / math.sqrt(D)))


@pytest.mark.parametrize("width", [D, 4, 16])
def test_values_of_another_width_and_a_shared_rotary_key(width: int) -> None:
    """Latent attention: k is a part by head beside a rotary part that all heads share."""
    q, k, _ = qkv(3)
    shared, v = random(B, 1, T, 4, seed=7), random(B, 3, T, width, seed=8)
    rotary = random(B, 3, T, 4, seed=9)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = torch.cat((q, rotary), -1)
        k = torch.cat((k, shared.expand(-1, 3, -1, -1)), -1)
        return SDPA(q, k, v, is_causal=True)

    seen = watch_once(Attention(attend, 3), q, k, v)
    raw = (q @ k.mT + rotary @ shared.mT) / math.sqrt(D + 4)
    assert_agree(seen.values, dense(raw, ~HIDDEN))


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("layout", ["b h t d", "(b h) t d", "b w h t d", "t d"])
def test_the_layouts_of_sdpa(layout: str, declared: bool) -> None:
    shapes = {"b h t d": (B, 3, T, D), "(b h) t d": (B * 3, T, D), "b w h t d": (B, 2, 3, T, D)}
    shape = shapes.get(layout, (T, D))
    q, k = random(*shape).requires_grad_(), random(*shape, seed=1)
    heads = {"t d": 1, "(b h) t d": 3 if declared else 1}.get(layout, 3)
    seen = watch_once(Attention(SDPA, heads if declared else None), q, k, k)
    raw = (q @ k.mT / math.sqrt(D)).reshape(-1, heads, T, T)
    assert_agree(seen.values, dense(raw))


# ------------------------------------------------------------------ what sits before the product


@pytest.mark.parametrize("norm", ["layer", "rms", "l2"])
@pytest.mark.parametrize("how", ["sdpa", "softmax"])
def test_qk_norm_and_rotary_are_in_the_numbers(norm: str, how: str) -> None:
    """Seen at the projections, weights of 200 would pass for logits of thousands."""

    class Normed(nn.Module):
        num_heads = 3

        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj = nn.Linear(24, 24), nn.Linear(24, 24)

        def attention(self, x: Tensor) -> tuple[Tensor, Tensor]:
            q, k = (p(x).view(B, T, 3, D).transpose(1, 2) for p in (self.q_proj, self.k_proj))
            normed = {
                "layer": lambda z: F.layer_norm(z, (D,)),
                "rms": lambda z: F.rms_norm(z, (D,)),
                "l2": lambda z: F.normalize(z, dim=-1) * math.sqrt(D),
            }[norm]
            return rotated(normed(q)), rotated(normed(k))

        def forward(self, x: Tensor) -> Tensor:
            q, k = self.attention(x)
            if how == "sdpa":
                return SDPA(q, k, k)
            return torch.softmax(q @ k.mT / math.sqrt(D), -1) @ k

    torch.manual_seed(0)
    model = Normed()
    with torch.no_grad():
        model.q_proj.weight *= 200
        model.k_proj.weight *= 200
    x = random(B, T, 24)
    seen = watch_once(model, x)
    q, k = model.attention(x)
    assert_agree(seen.values, dense(q @ k.mT / math.sqrt(D)))
    assert (seen.values["qk_abs_max_logit"] <= math.sqrt(D) * (1 + 1e-5)).all()
    assert not seen.alerts


def rotated(x: Tensor) -> Tensor:
    angle = torch.arange(T)[:, None] * 0.5 ** torch.arange(D // 2)
    a, b = x.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


# ------------------------------------------------------------------ dropout


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("how", ["sdpa", "F.dropout", "nn.MultiheadAttention"])
def test_dropped_weights_are_not_the_statistics(p: float, how: str) -> None:
    """After dropout a row sums to anything: 1.43 or 0.95 (what output_attentions gives)."""
    torch.manual_seed(0)
    q, k, v = qkv(3)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if how == "sdpa":
            return SDPA(q, k, v, dropout_p=p)
        return F.dropout(torch.softmax(q @ k.mT / math.sqrt(D), -1), p) @ v

    if how == "nn.MultiheadAttention":
        model = nn.MultiheadAttention(24, 3, dropout=p, batch_first=True)
        x = random(B, T, 24)
        seen = watch_once(model, x, x, x, need_weights=True)
        with torch.no_grad():
            both = F.linear(x, model.in_proj_weight, model.in_proj_bias)[..., :48]
        q, k = (z.view(B, T, 3, D).transpose(1, 2) for z in both.chunk(2, -1))
    else:
        seen = watch_once(Attention(attend, 3), q, k, v)
    assert_agree(seen.values, dense(q @ k.mT / math.sqrt(D)))
    assert seen.coverage[0].verified != "no"


# ------------------------------------------------------------------ sinks


@pytest.mark.parametrize("logit", [-20.0, 0.0, 4.0, 20.0])
@pytest.mark.parametrize("shifted", [True, False])
def test_a_sink_column_is_no_key(logit: float, shifted: bool) -> None:
    """A learnt logit beside the keys: entropy is over the real keys, renormalised to 1."""
    q, k, v = qkv(3)
    sinks = torch.full((3,), logit).requires_grad_()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT / math.sqrt(D)).masked_fill(HIDDEN, -math.inf)
        column = sinks.reshape(1, -1, 1, 1).expand(B, -1, T, -1)
        combined = torch.cat([scores, column], dim=-1)
        if shifted:
            combined = combined - combined.max(dim=-1, keepdim=True).values
        return torch.softmax(combined, -1)[..., :-1] @ v

    seen = watch_once(Attention(attend, 3), q, k, v)
    raw = q @ k.mT / math.sqrt(D)
    assert_agree(seen.values, dense(raw, ~HIDDEN))
    assert not seen.alerts


@pytest.mark.parametrize("weight", [0.5, 0.9, 0.999])
@pytest.mark.parametrize("how", ["sdpa", "softmax"])
def test_a_sink_on_the_first_token_is_named_and_no_alarm(weight: float, how: str) -> None:
    logit = math.log(weight / (1 - weight) * (T - 1))
    q, k = torch.ones(1, 2, T, 1), torch.zeros(1, 2, T, 1)
    k[..., 0, :] = logit

    def attend(q: Tensor, k: Tensor) -> Tensor:
        return SDPA(q, k, k, scale=1.0) if how == "sdpa" else torch.softmax(q @ k.mT, -1) @ k

    seen = watch_once(Attention(attend, 2), q.requires_grad_(), k)
    assert seen.values["first_key_mass"].tolist() == pytest.approx([weight] * 2, rel=1e-4)
    assert not seen.alerts
