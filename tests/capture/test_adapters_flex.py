"""FlexAttention itself, in eager mode on a CPU: its forward runs there, its backward does not.

The inputs of each call are therefore detached; the layer still trains through its residual.
"""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from seeing import Attend, Attentive, assert_reads_like, attended, dense, seen_by
from torch import Tensor
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as early_bound

import stability_probe as sp
from stability_probe.capture.adapters.flex import read

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:.*return_lse is deprecated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.* is deprecated"),
]

X = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(3))
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
DOCUMENT = torch.tensor([[0] * 4 + [1] * 6, [0] * 7 + [1] * 3])
ROW, KEY = torch.arange(10)[:, None], torch.arange(10)


def alibi(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return 2 * torch.tanh(s / 2) - SLOPES[h] * (i - j).abs()


def packed_causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (DOCUMENT[b, i] == DOCUMENT[b, j]) & (i >= j)


def wanted(products: Tensor, *, score: bool, mask: bool) -> Tensor:
    scores = products
    if score:
        scores = 2 * torch.tanh(scores / 2) - SLOPES.view(-1, 1, 1) * (ROW - KEY).abs()
    if mask:
        same = (DOCUMENT[:, :, None] == DOCUMENT[:, None]) & (ROW >= KEY)
        scores = scores.masked_fill(~same[:, None], -torch.inf)
    return scores


def attend_with(**how: object) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.detach().transpose(1, 2) for t in (q, k, v))
        out = early_bound(q, k, v, enable_gqa=True, **how)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return attend


@pytest.mark.parametrize("score", [False, True], ids=["plain", "score_mod"])
@pytest.mark.parametrize("mask", [False, True], ids=["all", "block_mask"])
def test_score_and_mask_functions_are_honoured(score: bool, mask: bool) -> None:
    block = create_block_mask(packed_causal, 2, None, 10, 10, device="cpu") if mask else None
    how = {"score_mod": alibi if score else None, "block_mask": block, "scale": 0.4}
    model = Attentive(attend_with(**how))
    bare = model(X)
    calls, report, _ = seen_by(model, X)
    assert (report.layer, report.seam, report.verified) == ("attention", "flex", "output")
    assert len(calls) == 1
    q, k, _ = model.attention.heads(X)
    products = dense(q, k, 0.4)
    assert_reads_like(calls[0], wanted(products, score=score, mask=mask), products)
    assert torch.equal(model(X), bare)


def test_a_call_through_the_module_is_seen() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.detach().transpose(1, 2) for t in (q, k, v))
        return flex_module.flex_attention(q, k, v, enable_gqa=True).transpose(1, 2)

    model = Attentive(attend)
    calls, report, _ = seen_by(model, X, forwards=2)
    assert (len(calls), report.verified) == (2, "output")


@pytest.mark.parametrize("form", ["aux", "lse"])
def test_its_own_log_sum_exp_is_compared(form: str) -> None:
    how = {"return_aux": AuxRequest(lse=True)} if form == "aux" else {"return_lse": True}
    model = Attentive(attend_with(score_mod=alibi, **how))
    calls, report, _ = seen_by(model, X)
    assert report.verified == "lse"
    q, k, _ = model.attention.heads(X)
    scores = wanted(dense(q, k), score=True, mask=False)
    torch.testing.assert_close(calls[0].lse_BHQ, torch.logsumexp(scores, -1))


def test_its_largest_scores_are_compared() -> None:
    """A CPU does not give them, so the reading is checked on a made-up result."""
    q, k, v = (t.transpose(1, 2) for t in (torch.randn(2, 10, 4, 8) for _ in range(3)))
    scores = dense(q.transpose(1, 2), k.transpose(1, 2))
    output = attended(scores, v.transpose(1, 2)).transpose(1, 2)
    aux = namedtuple("AuxOutput", "lse max_scores")(scores.logsumexp(-1), scores.amax(-1))
    arguments = {"query": q, "key": k, "value": v, "score_mod": None, "block_mask": None}
    seen = read(arguments, (output, aux))
    assert torch.equal(seen.row_max, aux.max_scores)

    from stability_probe.capture.verify import verify
    from stability_probe.records import AttentionCall

    call = AttentionCall(layer="a", q_BHQD=q, k_BGKD=k, v_BGKE=v, scale=seen.scale,
                         output_BHQE=output, lse_BHQ=seen.lse)  # fmt: skip
    assert verify(call, None, 0.0, seen.row_max).passed()
    assert not verify(call, None, 0.0, seen.row_max + 0.01).passed()
    assert verify(call, None, 0.0, seen.row_max.amax((0, 2))).passed()
    assert not verify(call, None, 0.0, seen.row_max.amax((0, 2)) - 0.5).passed()


def test_training_around_it_is_the_same_to_the_bit() -> None:
    def train(*, watched: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Attentive(attend_with(score_mod=alibi))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        probe = sp.watch(model, strict=True) if watched else None
        for _ in range(4):
            loss = model(X + torch.randn_like(X)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if probe is not None:
                probe.step(loss=loss)
        if probe is not None:
            probe.close()
            assert [(r.seam, r.calls) for r in probe.coverage] == [("flex", 4)]
        return [*(p.detach() for p in model.parameters()), torch.get_rng_state()]

    bare, seen = train(watched=False), train(watched=True)
    assert all(torch.equal(a, b) for a, b in zip(bare, seen, strict=True))
