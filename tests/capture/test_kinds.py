"""What kind of attention a site is: self or cross, grouped, biased, capped, with sinks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from tiny_models import HEADS, WIDTH, Attention, Encoder, Model, MultiHead, hidden, loss_of, tokens
from torch import Tensor, nn

import stability_probe as sp

EVERYTHING = sp.every(1, full_every=1)


class Cross(nn.Module):
    """Attends from x to whatever is chosen; as many queries as keys in each case."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.to_q, self.to_kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.latents = nn.Parameter(torch.randn(1, 12, WIDTH))
        self.down, self.up = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)

    def forward(self, x: Tensor, context: Tensor | None = None, *, mask: Tensor) -> Tensor:
        source = x if context is None else context
        target = self.latents.expand_as(x) if self.how == "learned queries" else x
        if self.how == "low rank":
            source = self.up(self.down(source))
        if self.how == "both":
            source = source + x
        q, (k, v) = self.to_q(target), self.to_kv(source).chunk(2, -1)
        if self.how == "written by an index":
            turned = torch.zeros_like(q)
            turned[..., ::2] = q[..., 1::2]
            turned[..., 1::2] = q[..., ::2]
            q = turned
        q, k, v = (z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class Decoder(nn.Module):
    """An embedding, one attention over it and perhaps over a second input, a head."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embedding, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)
        self.attention = Cross(how)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        context = None if self.how in ("self", "learned queries", "low rank") else x * 2
        return self.head(self.attention(x, context, mask=~hidden(12)))


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("self", "self"),
        ("low rank", "self"),
        ("cross", "cross"),
        ("written by an index", "cross"),
        ("learned queries", "cross"),
        ("both", "mixed"),
    ],
)
def test_self_and_cross_attention_are_told_apart_by_where_q_and_k_come_from(
    how: str, expected: str
) -> None:
    torch.manual_seed(0)
    model = Decoder(how)
    with sp.watch(model, strict=True) as probe:
        for _ in range(3):
            loss_of(model, tokens()).backward()
            probe.step()
        (site,) = probe.coverage
    assert site.attends == expected


@pytest.mark.parametrize("model", [Encoder(), MultiHead(need_weights=True), Model(Attention())])
def test_torch_s_own_layers_and_a_plain_model_are_self_attention(model: nn.Module) -> None:
    with sp.watch(model, strict=True) as probe:
        for _ in range(3):
            loss_of(model, tokens()).backward()
            probe.step()
        assert {site.attends for site in probe.coverage} == {"self"}


def test_a_decoder_layer_of_torch_has_one_self_and_one_cross_attention() -> None:
    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)
            self.decoder = nn.TransformerDecoderLayer(WIDTH, HEADS, 64, batch_first=True)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            return self.head(self.decoder(x, x.flip(1)))

    model = Translator()
    with sp.watch(model, strict=True) as probe:
        for _ in range(3):
            loss_of(model, tokens()).backward()
            probe.step()
        found = {site.layer: site.attends for site in probe.coverage}
    assert found == {"decoder.self_attn": "self", "decoder.multihead_attn": "cross"}


def test_labels_end_with_the_forward_and_keep_nothing() -> None:
    model = Decoder("cross")
    with sp.watch(model, strict=True) as probe:
        for _ in range(3):
            loss_of(model, tokens()).backward()
            probe.step()
        assert probe._attachment._mode._local.origins is None


def test_grouped_queries_are_counted_by_query_head_and_the_keys_heads_are_told() -> None:
    class Grouped(Attention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)

    model = Model(Grouped())
    with sp.watch(model, strict=True) as probe:
        loss_of(model, tokens()).backward()
        probe.step()
        (site,) = probe.coverage
    assert (site.heads, site.key_heads) == (HEADS, 1)


def test_a_relative_bias_shows_in_the_maximum_with_it_and_not_in_the_one_without() -> None:
    class Biased(Attention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            bias = torch.full((1, HEADS, q.shape[-2], k.shape[-2]), -500.0)
            bias[:, 1] = 30.0
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    torch.manual_seed(0)
    model = Model(Biased())
    with sp.watch(model, strict=True) as probe:
        loss_of(model, tokens()).backward()
        probe.step()
        raw = probe.latest("qk_abs_max_logit")["blocks.0.attention"]
        whole = probe.latest("abs_max_logit")["blocks.0.attention"]
        masked = probe.latest("masked_rows")["blocks.0.attention"]
    assert (raw < 10).all()
    assert whole[0] > 490  # a large negative bias is a bias, and no mask
    assert 20 < whole[1] < 40
    assert (masked == 0).all()


class Capped(Attention):
    """A model whose config asks for a soft-cap, with a kernel that gives one or does not."""

    attn_logit_softcapping = 2.0

    def __init__(self, *, applied: bool) -> None:
        super().__init__()
        self.applied = applied

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.applied:
            return F.scaled_dot_product_attention(q * 20, k, v)
        scores = torch.tanh(q * 20 @ k.mT / math.sqrt(q.shape[-1]) / 2.0) * 2.0
        return torch.softmax(scores, -1) @ v


def test_a_soft_cap_that_the_kernel_did_not_get_is_an_alert_that_says_so() -> None:
    for applied in (True, False):
        torch.manual_seed(0)
        model = Model(Capped(applied=applied))
        with sp.watch(model, plan=EVERYTHING, strict=True) as probe:
            for _ in range(3):
                loss_of(model, tokens()).backward()
                probe.step()
            raw = probe.latest("qk_abs_max_logit")["blocks.0.attention"]
            capped = probe.latest("abs_max_logit")["blocks.0.attention"]
            alerts = [a for a in probe.alerts if a.rule == "soft_cap_missing"]
        assert (raw > 2).any()
        if applied:
            assert (capped <= 2).all()
            assert not alerts
        else:
            assert torch.equal(raw, capped)
            (alert,) = alerts
            assert alert.layer == "blocks.0.attention"
            assert "soft-cap of 2.0" in alert.message
            assert "eager" in alert.remedies[0]


class Sinks(Attention):
    """A learned logit per head takes part in the softmax, as a last or a first column."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.sinks = nn.Parameter(torch.tensor([4.0, 0.0, -2.0, 1.0]))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(hidden(12), -torch.inf)
        if "bias" in self.how:
            scores = scores + torch.zeros_like(scores)  # a temporary of their size: not exact
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
        parts = [sinks, scores] if "first" in self.how else [scores, sinks]
        together = torch.cat(parts, dim=-1)
        if "shift" in self.how:
            together = together - together.max(dim=-1, keepdim=True).values
        weights = torch.softmax(together, dim=-1)
        return (weights[..., 1:] if "first" in self.how else weights[..., :-1]) @ v


@pytest.mark.parametrize(
    "how", ["last", "last, shift", "first", "first, shift", "last, bias", "first, shift, bias"]
)
def test_a_sink_is_no_key(how: str) -> None:
    torch.manual_seed(0)
    model = Model(Sinks(how))
    batch = tokens()
    with sp.watch(model, plan=EVERYTHING, strict=True) as probe:
        loss_of(model, batch).backward()
        probe.step()
        (site,) = probe.coverage
        got = {name: probe.latest(name)["blocks.0.attention"].double()
               for name in ("entropy", "sink_mass", "abs_max_logit", "keys")}  # fmt: skip
    qkv = model.blocks[0].attention.qkv(model.embedding(batch)).detach().double()
    q, k, _ = (z.view(*batch.shape, HEADS, -1).transpose(1, 2) for z in qkv.chunk(3, -1))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    seen = scores.masked_fill(hidden(12), -torch.inf)
    p = torch.softmax(seen, -1)
    entropy = -torch.special.xlogy(p, p).sum(-1)[..., 1:].mean((0, 2))
    sinks = model.blocks[0].attention.sinks.detach().double().view(1, -1, 1)
    mass = torch.sigmoid(sinks - seen.logsumexp(-1))
    sees = "scores, qk" if "bias" in how else "qk"
    assert (site.verified, site.sees) == ("weights", sees)
    torch.testing.assert_close(got["entropy"], entropy, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got["sink_mass"], mass[..., 1:].mean((0, 2)), rtol=1e-5, atol=1e-6)
    largest = scores.masked_fill(hidden(12), 0).abs().amax((0, 2, 3))
    torch.testing.assert_close(got["abs_max_logit"], largest, rtol=1e-5, atol=1e-6)
    assert (got["keys"] == 12).all()
