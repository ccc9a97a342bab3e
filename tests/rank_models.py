"""Small models that are spread over ranks in different ways."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny_models import HEADS, WIDTH, Attention, Model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


def small_model() -> Model:
    torch.manual_seed(0)
    return Model(Attention("sdpa"), Attention("torch.softmax"))


class Sharded(nn.Module):
    """Causal self-attention with projections of their own, which tensor parallelism can cut."""

    def __init__(self, *, fused: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (
            p(x).view(b, t, -1, WIDTH // HEADS).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:  # distributed tensors have no fused attention on a CPU
            y = torch.softmax(q @ k.mT * (WIDTH // HEADS) ** -0.5, dim=-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, -1))


def sharded_model(*, fused: bool = True) -> Model:
    """Two layers of `Sharded`, their scores not too small."""
    torch.manual_seed(0)
    model = Model(Sharded(fused=fused), Sharded(fused=fused))
    with torch.no_grad():
        for block in model.blocks:
            block.attention.q.weight.mul_(4)
    return model


def tensor_parallel(model: Model, mesh: DeviceMesh, *, local: bool = True) -> Model:
    """Cuts the heads of every layer over the ranks of a mesh."""
    cut = ColwiseParallel(use_local_output=local)
    for block in model.blocks:
        plan = {"q": cut, "k": cut, "v": cut, "out": RowwiseParallel()}
        parallelize_module(block.attention, mesh, plan)
    return model


def dropping_model() -> Model:
    torch.manual_seed(0)
    return Model(Attention("sdpa", 0.1), Attention("torch.softmax", 0.1))


class Stage(nn.Module):
    """One block of a model that is cut in stages; it keeps its name."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)
        self.blocks = nn.ModuleDict({str(number): Attention("sdpa")})

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks.values():
            x = x + block(x)
        return self.head(x)


class RowSharded(nn.Module):
    """Attention whose rows are cut over ranks, as context parallelism does."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, HEADS, -1).transpose(1, 2)
        mesh = init_device_mesh("cpu", (2,))
        part = q.chunk(2, dim=2)[dist.get_rank()].contiguous()
        k = DTensor.from_local(q, mesh, [Replicate()])
        q = DTensor.from_local(part, mesh, [Shard(2)])
        y = (torch.softmax(q @ k.mT, dim=-1) @ k).full_tensor()  # fused is slow to dispatch
        return y.transpose(1, 2).reshape(b, t, -1)
