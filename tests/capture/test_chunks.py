"""Calls that are parts of one attention are one record; calls that are not, are not."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from tiny_models import Attention, Block, Model, hidden, loss_of, tokens
from torch import Tensor, nn

import stability_probe as sp
from stability_probe.capture.chunks import chunk_of

EVERYTHING = sp.every(1, full_every=1)


class Chunked(Attention):
    """Attends chunk by chunk of queries; the causal edge is a mask, or shorter keys."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        t, outputs = q.shape[-2], []
        for start in range(0, t, 4):
            rows = slice(start, start + 4)
            keys = slice(0, start + 4) if "prefix" in self.how else slice(0, t)
            mask = ~hidden(t)[rows, keys]
            part, of_k, of_v = q[:, :, rows], k[:, :, keys], v[:, :, keys]
            if self.how.startswith("sdpa"):
                outputs.append(F.scaled_dot_product_attention(part, of_k, of_v, attn_mask=mask))
            else:
                scores = (part @ of_k.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, -torch.inf)
                outputs.append(torch.softmax(scores, -1) @ of_v)
        return torch.cat(outputs, dim=-2)


@pytest.mark.parametrize("how", ["sdpa", "sdpa, prefix", "softmax", "softmax, prefix"])
def test_chunks_of_queries_are_one_record_equal_to_the_whole_call(how: str) -> None:
    torch.manual_seed(0)
    whole = Model(Attention("sdpa"))
    chunked = Model(Chunked(how))
    chunked.load_state_dict(whole.state_dict())
    batch, frames = tokens(), []
    for model in (whole, chunked):
        with sp.watch(model, plan=EVERYTHING, strict=True) as probe:
            loss_of(model, batch).backward()
            probe.step()
            frames.append(probe.frame())
            (site,) = probe.coverage
            assert site.error is not None
            assert site.error < 1e-6
    names = ["qk_abs_max_logit", "entropy", "entropy_ratio", "softmax_slope", "q_norm_max", "rows"]
    for name in names:
        one, two = (torch.tensor(frame[name].to_numpy()) for frame in frames)
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


def test_segments_of_a_packed_batch_are_one_record_whatever_their_number() -> None:
    class Packed(Attention):
        lengths = (5, 4, 3)

        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            parts = zip(*(z.split(self.lengths, dim=2) for z in (q, k, v)), strict=True)
            return torch.cat([F.scaled_dot_product_attention(*p) for p in parts], dim=2)

    torch.manual_seed(0)
    model = Model(Packed())
    with sp.watch(model, plan=EVERYTHING, strict=True) as probe:
        for lengths in ((5, 4, 3), (6, 6), (1, 1, 1, 9)):
            model.blocks[0].attention.lengths = lengths
            loss_of(model, tokens(batch=1)).backward()
            probe.step()
        frame = probe.frame()
    assert frame["layer"].unique().tolist() == ["blocks.0.attention"]
    assert frame.groupby("step")["keys"].max().tolist() == [5, 6, 9]
    assert (frame["rows"] == 12).all()


class Twice(Attention):
    """Two attention maps over halves of the heads, or two streams over the same keys."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sdpa = F.scaled_dot_product_attention
        if self.how == "halves of the heads":
            pairs = zip(q.chunk(2, 1), k.chunk(2, 1), v.chunk(2, 1), strict=True)
            return torch.cat([sdpa(*pair) for pair in pairs], dim=1)
        return sdpa(q, k, v) + sdpa(q * 2, k, v)


@pytest.mark.parametrize("how", ["halves of the heads", "two streams"])
def test_other_heads_and_other_queries_are_records_of_their_own(how: str) -> None:
    torch.manual_seed(0)
    model = Model(Twice(how))
    with sp.watch(model, plan=EVERYTHING, strict=True) as probe:
        loss_of(model, tokens()).backward()
        probe.step()
        layers = list(probe.latest("entropy"))
    assert layers == ["blocks.0.attention", "blocks.0.attention#1"]


class Shared(nn.Module):
    """One block, used three times in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.block = Block(Attention())
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for _ in range(3):
            x = self.block(x)
        return self.head(x)


def test_a_module_used_in_three_layers_has_three_records_at_every_step() -> None:
    torch.manual_seed(0)
    model = Shared()
    with sp.watch(model, plan=EVERYTHING, strict=True) as probe:
        for _ in range(3):  # discovery, then settled hooks
            for _ in range(2):  # micro-batches pool, call by call
                loss_of(model, tokens()).backward()
            probe.step()
        frame = probe.frame()
    assert frame["layer"].unique().tolist() == [
        "block.attention", "block.attention#1", "block.attention#2",
    ]  # fmt: skip
    assert (frame.groupby(["step", "layer"])["rows"].first() == 2 * 3 * 12).all()


def test_a_part_that_is_trained_alone_counts_its_calls_one_by_one() -> None:
    torch.manual_seed(0)
    model = Model(Attention())
    with sp.watch(model, plan=EVERYTHING, strict=True) as probe:
        for _ in range(2):
            for _ in range(2):
                model.blocks(torch.randn(2, 5, 32)).sum().backward()
            probe.step()
        frame = probe.frame()
    assert frame["layer"].unique().tolist() == ["blocks.0.attention"]
    assert (frame["rows"] == 20).all()


def test_a_decoder_that_goes_token_by_token_has_one_record() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            steps = [
                F.scaled_dot_product_attention(self.project(x[:, None, t : t + 1]), x[:, None],
                                               x[:, None])
                for t in range(x.shape[1])
            ]  # fmt: skip
            return torch.cat(steps, dim=2).squeeze(1)

    torch.manual_seed(0)
    model = Model(Recurrent())
    with sp.watch(model, plan=EVERYTHING, strict=True) as probe:
        loss_of(model, tokens()).backward()
        probe.step()
        frame = probe.frame()
    assert frame["layer"].unique().tolist() == ["blocks.0.attention"]
    assert (frame["rows"] == 3 * 12).all()


@pytest.mark.parametrize("layout", ["heads first", "rows first", "batch of one", "three axes"])
def test_slices_along_rows_belong_together_and_slices_along_heads_do_not(layout: str) -> None:
    whole = {
        "heads first": torch.randn(2, 4, 6, 8),
        "rows first": torch.randn(2, 6, 4, 8).transpose(1, 2),
        "batch of one": torch.randn(1, 4, 6, 8),
        "three axes": torch.randn(4, 6, 8),
    }[layout]
    one, two = (chunk_of(part, part) for part in whole.split(3, dim=-2))
    assert one is not None
    assert two is not None
    assert two.continues(one)
    assert not two.continues(two)
    heads = [chunk_of(part, part) for part in whole.split(2, dim=-3)]
    assert not heads[1].continues(heads[0])
    other = torch.randn_like(whole)
    assert not chunk_of(other, other).continues(one)
    if layout != "three axes":
        widths = [chunk_of(part, part) for part in whole.split(4, dim=-1)]
        assert not widths[1].continues(widths[0])


def test_a_slice_of_memory_that_was_freed_is_not_taken_for_its_successor() -> None:
    x = torch.randn(2, 4, 6, 8)
    first = chunk_of(x[:, :, :3], x)
    second = chunk_of(x[:, :, 3:], x)
    assert second.continues(first)
    del x
    assert not second.continues(first)
