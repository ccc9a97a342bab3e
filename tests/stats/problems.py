"""Random attention calls, exact in float32 so that counts and ties can be compared exactly."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

from stability_probe.records import AttentionCall

MASKS = ("none", "bool", "padding", "-inf", "finfo.min", "-1e4", "bias", "bias per head", "two")
TINY_TILE = 64  # scores, so that small calls take many tiles


def integers(shape: tuple[int, ...], g: torch.Generator, *, largest: int = 8) -> torch.Tensor:
    return torch.randint(-largest, largest + 1, shape, generator=g).to(torch.float32)


def spoil(x: torch.Tensor, g: torch.Generator, *, share: float) -> torch.Tensor:
    bad = torch.rand(x.shape, generator=g) < share
    kinds = torch.tensor([math.nan, math.inf, -math.inf])
    which = torch.randint(0, 3, x.shape, generator=g)
    return torch.where(bad, kinds[which].to(x.dtype), x)


def masks_of(kind: str, B: int, H: int, Q: int, K: int, g: torch.Generator) -> tuple:
    keep = torch.rand((B, 1, Q, K), generator=g) < 0.6
    keep[:, :, ::5] = False  # rows without any visible key
    keep[:, :, 1::5, 1:] = False  # and rows with one at most
    padding = (torch.rand((B, 1, 1, K), generator=g) < 0.7) | (torch.arange(K) == 0)
    bias = torch.randint(-6, 7, (Q, K), generator=g).float() / 4
    if kind == "none":
        return ()
    if kind == "bool":
        return (keep,)
    if kind == "padding":
        return (padding,)
    if kind in ("-inf", "finfo.min", "-1e4"):
        low = {"-inf": -math.inf, "finfo.min": torch.finfo(torch.float32).min, "-1e4": -1e4}[kind]
        return (torch.zeros(keep.shape).masked_fill(~keep, low),)
    if kind == "bias":
        return (bias,)
    if kind == "bias per head":
        return (torch.randint(-500, 7, (1, H, Q, K), generator=g).float(),)
    return (padding, bias.masked_fill(~keep[0, 0], torch.finfo(torch.bfloat16).min))


@st.composite
def calls(draw: st.DrawFn, *, spoilt: bool = False) -> AttentionCall:
    B, G, R = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    Q, K = draw(st.integers(1, 34)), draw(st.integers(1, 20))
    D = draw(st.sampled_from((1, 3, 8)))
    H = G * R
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    size = 2.0 ** draw(st.integers(-4, 5))
    dtype = draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16)))
    q, k = integers((B, H, Q, D), g) * size, integers((B, G, K, D), g)
    v, output = torch.ones(B, G, K, 2), torch.ones(B, H, Q, 2)
    scale = 2.0 ** -draw(st.integers(0, 3))
    if spoilt:
        q, k = spoil(q, g, share=0.02), spoil(k, g, share=0.02)
        v, output = spoil(v, g, share=0.1), spoil(output, g, share=0.1)
    kind = draw(st.sampled_from(MASKS))
    return AttentionCall(
        layer="layer",
        q_BHQD=q.to(dtype),
        k_BGKD=k.to(dtype),
        v_BGKE=v.to(dtype),
        output_BHQE=output.to(dtype),
        masks=masks_of(kind, B, H, Q, K, g),
        causal=draw(st.booleans()),
        scale=draw(st.sampled_from((scale, torch.tensor(scale).expand(B, H, 1, 1) * 1))),
        softcap=draw(st.sampled_from((None, None, None, 8.0))),
        dtype=dtype,
        input_rms=torch.tensor(1.5),
    )
