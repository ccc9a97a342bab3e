"""What capture tests share: a model around one attention function, and what was seen of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from stability_probe.capture import Attachment, attach
from stability_probe.records import AttentionCall, SiteReport
from stability_probe.stats.accumulate import accumulate
from stability_probe.stats.finish import finish

BATCH, TIME, HEADS, GROUPS, WIDTH = 2, 10, 4, 2, 32

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """Self-attention around `attend(q, k, v)`: q [B, T, H, D], k and v [B, T, G, D]."""

    def __init__(self, attend: Attend, groups: int = GROUPS) -> None:
        super().__init__()
        self.width, self.groups = WIDTH // HEADS, groups
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * groups) * self.width)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.attend = attend

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        sizes = [n * self.width for n in (HEADS, self.groups, self.groups)]
        split = self.qkv(x).split(sizes, -1)
        return tuple(t.unflatten(-1, (-1, self.width)) for t in split)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attend(*self.heads(x)).flatten(-2))


class Attentive(nn.Module):
    """A model with one such layer, under the name `attention`."""

    def __init__(self, attend: Attend, groups: int = GROUPS) -> None:
        super().__init__()
        self.attention = Layer(attend, groups)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.attention(x))


class Taker:
    """Takes calls in, and keeps their statistics and a few plain facts."""

    measuring = True

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def call(self, call: AttentionCall) -> None:
        self.calls.append(call)  # tests keep what the meter may not

    def values(self, call: AttentionCall, v: Tensor, output: Tensor) -> None:
        """Not needed here."""

    def gradient(self, layer: str, call_index: int, kind: str, gradient: Tensor) -> None:
        """Not needed here."""


def seen_by(
    model: nn.Module, *inputs: Tensor, forwards: int = 1
) -> tuple[list[AttentionCall], SiteReport, Attachment]:
    """The calls of some training forwards, the coverage line of the first site."""
    taker = Taker()
    attachment = attach(model, taker, strict=True)
    try:
        for _ in range(forwards):
            model(*inputs)
        (report,) = attachment.report()
    finally:
        attachment.close()
    return taker.calls, report, attachment


def assert_reads_like(call: AttentionCall, scores: Tensor, products: Tensor | None = None) -> None:
    """The call's statistics are those of dense scores [B, H, Q, K], -inf where hidden."""
    plain = AttentionCall(layer="dense", scores_BHQK=scores, dtype=call.dtype)
    got = finish(accumulate(call, full=True), full=True)
    want = finish(accumulate(plain, full=True), full=True)
    names = ("entropy", "entropy_ratio", "logit_gap", "max_logit", "min_logit", "lse_max", "keys")
    for name in (*names, "masked_rows", "rows"):
        torch.testing.assert_close(got[name], want[name], rtol=2e-5, atol=2e-5, equal_nan=True,
                                   msg=lambda m, n=name: f"{n}: {m}")  # fmt: skip
    if products is not None:
        largest = products.masked_fill(scores == -torch.inf, 0.0).abs().amax((0, 2, 3))
        torch.testing.assert_close(got["qk_abs_max_logit"], largest, rtol=2e-5, atol=2e-5)


def dense(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """scale q k^T [B, H, Q, K] of q [B, T, H, D] and k [B, T, G, D]."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return torch.einsum("bqhd,bkhd->bhqk", q, k) * scale


def attended(scores: Tensor, v: Tensor, sink: Tensor | None = None) -> Tensor:
    """softmax(scores) v as [B, T, H, E]; rows without a key give 0."""
    v = v.repeat_interleave(scores.shape[1] // v.shape[2], 2)
    if sink is not None:
        scores = torch.cat((scores, sink.expand(*scores.shape[:3], 1)), -1)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)[..., : v.shape[1]]
    return torch.einsum("bhqk,bkhe->bqhe", weights, v)
