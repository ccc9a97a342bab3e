"""xformers, through stand-ins with the real signatures and mask classes."""

from __future__ import annotations

import sys
import types

import pytest
import stand_ins
import torch
from seeing import Attentive, assert_reads_like, seen_by
from stand_ins import package
from torch import Tensor

X = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(3))
BIAS = torch.randn(2, 4, 10, 10, generator=torch.Generator().manual_seed(4))


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    for name in ("xformers", "xformers.ops", "xformers.ops.fmha"):
        monkeypatch.setitem(sys.modules, name, None)
    fmha = package("xformers.ops.fmha", stand_ins.memory_efficient_attention)
    top = package("xformers.ops")
    top.memory_efficient_attention = fmha.memory_efficient_attention
    return top


def local(cls: type, lengths: list[int], size: int) -> object:
    mask = stand_ins.BlockDiagonalMask.from_seqlens(lengths)
    return cls(mask.q_seqinfo, mask.k_seqinfo, None, size)


WHOLE = {
    "none": (None, {"window": (-1, -1)}),
    "tensor": (BIAS, {"window": (-1, -1)}),
    "LowerTriangularMask": (stand_ins.LowerTriangularMask(), {"window": (-1, 0)}),
    "with bias": (stand_ins.LowerTriangularMaskWithTensorBias(BIAS), {"window": (-1, 0)}),
    "from bottom right": (
        stand_ins.LowerTriangularFromBottomRightMask(),
        {"window": (-1, 0), "bottom_right": True},
    ),
    "causal window": (
        stand_ins.LowerTriangularFromBottomRightLocalAttentionMask(3),
        {"window": (2, 0), "bottom_right": True},
    ),
    "window": (
        stand_ins.LocalAttentionFromBottomRightMask(1, 2),
        {"window": (1, 2), "bottom_right": True},
    ),
}


@pytest.mark.parametrize(
    ("name", "keys"),
    [*((name, 10) for name in WHOLE), *((n, 7) for n in WHOLE if n not in ("tensor", "with bias"))],
)
def test_whole_sequences(ops: types.ModuleType, name: str, keys: int) -> None:
    mask, how = WHOLE[name]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.memory_efficient_attention(q, k[:, :keys], v[:, :keys], attn_bias=mask)

    model = Attentive(attend, groups=4)
    calls, report, _ = seen_by(model, X)
    assert (len(calls), report.seam, report.verified) == (1, "xformers", "output")
    q, k, _ = model.attention.heads(X)
    scores = stand_ins.scores_of(q, k[:, :keys], scale=None, **{"bottom_right": False} | how)
    if name in ("tensor", "with bias"):
        scores = scores + BIAS
    assert_reads_like(calls[0], scores.float())


PACKED = {
    "BlockDiagonalMask": ((-1, -1), False),
    "BlockDiagonalCausalMask": ((-1, 0), False),
    "BlockDiagonalCausalFromBottomRightMask": ((-1, 0), True),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences(ops: types.ModuleType, name: str) -> None:
    lengths = (
        ([4, 7, 9], [6, 7, 7]) if "Bottom" in name or "Causal" not in name else ([4, 7, 9],) * 2
    )
    mask = getattr(stand_ins, name).from_seqlens(*lengths)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.flatten(0, 1)[None] for t in (q, k, v))
        out = ops.memory_efficient_attention(q, k, v, attn_bias=mask, scale=0.5)
        return out[0].unflatten(0, (2, 10))

    model = Attentive(attend, groups=4)
    calls, report, _ = seen_by(model, X)
    assert (len(calls), report.verified, calls[0].sequences) == (1, "output", 3)
    q, k = (t.flatten(0, 1) for t in model.attention.heads(X)[:2])
    window, corner = PACKED[name]
    scores = torch.full((1, 4, 20, 20), -torch.inf)
    starts_q, starts_k = mask.q_seqinfo.seqstart_py, mask.k_seqinfo.seqstart_py
    for a, b, c, d in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
        scores[:, :, a:b, c:d] = stand_ins.scores_of(
            q[None, a:b], k[None, c:d], scale=0.5, window=window, bottom_right=corner
        ).float()
    assert_reads_like(calls[0], scores)


def test_a_packed_window(ops: types.ModuleType) -> None:
    mask = local(stand_ins.BlockDiagonalCausalLocalAttentionMask, [4, 7, 9], 3)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.flatten(0, 1)[None] for t in (q, k, v))
        return ops.memory_efficient_attention(q, k, v, mask)[0].unflatten(0, (2, 10))

    calls, report, _ = seen_by(Attentive(attend, groups=4), X)
    assert (len(calls), report.verified) == (1, "output")


@pytest.mark.parametrize("axes", [3, 5])
def test_one_head_and_groups_of_heads(ops: types.ModuleType, axes: int) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if axes == 3:
            q, k, v = (t[:, :, 0] for t in (q, k, v))
            return ops.memory_efficient_attention(q, k, v).repeat(1, 1, 4).unflatten(-1, (4, 8))
        q, k, v = (t.unflatten(2, (2, 2)) for t in (q, k, v))
        return ops.memory_efficient_attention(q, k, v).flatten(2, 3)

    model = Attentive(attend, groups=4)
    calls, report, _ = seen_by(model, X)
    assert (report.verified, report.heads) == ("output", 1 if axes == 3 else 4)
    q, k, _ = model.attention.heads(X)
    q, k = (q[:, :, :1], k[:, :, :1]) if axes == 3 else (q, k)
    assert_reads_like(calls[0], stand_ins.scores_of(q, k, scale=None).float())


def test_an_unknown_mask_says_so(ops: types.ModuleType) -> None:
    mask = stand_ins.BlockDiagonalGappyKeysMask.from_seqlens([10])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([ops.memory_efficient_attention(*(t[i : i + 1] for t in (q, k, v)), mask)
                          for i in range(2)])  # fmt: skip

    calls, report, _ = seen_by(Attentive(attend, groups=4), X)
    assert not calls
    assert "BlockDiagonalGappyKeysMask are not read" in report.reason


def test_a_kernel_with_dropout_and_no_log_sum_exp_says_that_it_is_not_checked(
    ops: types.ModuleType,
) -> None:
    mask = stand_ins.LocalAttentionFromBottomRightMask(1, 2)
    model = Attentive(
        lambda q, k, v: ops.memory_efficient_attention(q, k, v, mask, p=0.1), groups=4
    )
    calls, report, _ = seen_by(model, X)
    assert (len(calls), report.verified) == (1, "no")
    assert "dropout" in report.reason
