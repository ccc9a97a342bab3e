"""PyTorch's own `varlen_attn`, whose kernel needs a GPU: a stand-in with the real signature."""

from __future__ import annotations

import inspect
from itertools import pairwise

import pytest
import stand_ins
import torch
from seeing import Attentive, assert_reads_like, seen_by
from torch import Tensor
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode

from stability_probe.capture.adapters.varlen import read

X = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(3))
CU = torch.tensor([0, 4, 11, 18], dtype=torch.int32)  # and two positions of no sequence


def stand_in(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
    window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    last = int(cu_seq_q[-1])
    out, lse = stand_ins.by_segment(
        cu_seq_q, cu_seq_q if cu_seq_k is None else cu_seq_k, query, key, value,
        scale=scale, window=window_size,
    )  # fmt: skip
    out = torch.cat((out, torch.zeros_like(query[last:])))
    lse = torch.cat((lse, lse.new_zeros(lse.shape[0], len(query) - last)), 1)
    return (out, lse) if return_aux is not None and return_aux.lse else out


def test_the_stand_in_has_the_real_signature() -> None:
    real, mine = (inspect.signature(f).parameters for f in (varlen.varlen_attn, stand_in))
    assert [(p.name, p.kind, p.default) for p in real.values()] == [
        (p.name, p.kind, p.default) for p in mine.values()
    ]


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (3, 1)])
@pytest.mark.parametrize("lse", [False, True])
def test_every_sequence_on_its_own(
    monkeypatch: pytest.MonkeyPatch, window: tuple[int, int], lse: bool
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    aux = varlen.AuxRequest(lse=True) if lse else None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        out = varlen.varlen_attn(q, k, v, CU, None, 7, 7, return_aux=aux, window_size=window,
                                 enable_gqa=True)  # fmt: skip
        return (out[0] if lse else out).unflatten(0, (2, 10))

    model = Attentive(attend)
    calls, report, _ = seen_by(model, X)
    assert (len(calls), report.seam, calls[0].sequences) == (1, "varlen", 3)
    assert report.verified == ("lse" if lse else "output")
    q, k = (t.flatten(0, 1) for t in model.attention.heads(X)[:2])
    scores = torch.full((1, 4, 20, 20), -torch.inf)
    for a, b in pairwise(CU.tolist()):
        pair = stand_ins.scores_of(q[None, a:b], k[None, a:b], scale=None, window=window)
        scores[:, :, a:b, a:b] = pair.float()
    assert_reads_like(calls[0], scores)


class NoWaiting(TorchDispatchMode):
    """Fails on what makes the host wait for a device, and on squares of the sequence."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "equal"), name
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and name != "expand":
            assert out.numel() < 200 * 200
        return out


def test_reading_packed_sequences_waits_for_nothing_and_forms_no_square() -> None:
    q, k, v = (torch.randn(200, 4, 8) for _ in range(3))
    bound = inspect.signature(stand_in).bind(
        q, k, v, torch.tensor([0, 90, 200]), None, 110, 110, window_size=(-1, 0)
    )
    bound.apply_defaults()
    with NoWaiting():
        seen = read(bound.arguments, torch.zeros_like(q))
    assert seen.sequences == 2
    assert seen.mask_mod is not None
