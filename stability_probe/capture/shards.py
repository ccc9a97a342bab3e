"""Calls whose tensors are spread over ranks: which heads are here, and what cannot be read.

Nothing here communicates. Under tensor parallelism a rank sees some of the heads: a distributed
tensor says which, or else the projections' parameters do. A call that is sharded along its rows
or keys (context parallelism) shows parts of each row's softmax and is refused.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from stability_probe.capture.layout import UnsupportedCallError, batch_and_heads

if TYPE_CHECKING:
    from stability_probe.capture.functions import Seen


@dataclass(frozen=True, slots=True)
class HeadShare:
    """Which of a layer's heads a call on this rank shows.

    Attributes:
        offset: number of the first one; None where there are more than it shows and which ones
            these are is not known.
        total: heads of the layer over all ranks.
        replica: another rank shows the same heads of the same data.
    """

    offset: int | None
    total: int
    replica: bool = False


def is_distributed(tensor: object) -> bool:
    """Whether it is a DTensor. Does not import what the run has not imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def localized(seen: Seen) -> Seen:
    """The call with the parts of its tensors that lie on this rank, and which heads these are.

    Raises:
        UnsupportedCallError: its rows or keys are sharded, or sums over ranks are pending.
    """
    matrix = seen.scores if seen.q is None else seen.q
    fields = ("q", "k", "v", "scores", "output", "weights")
    given = {name: t for name in fields if is_distributed(t := getattr(seen, name))}
    masks = tuple(_local(m, "the mask") for m in seen.masks)
    if not given:
        return replace(seen, masks=masks) if any(map(is_distributed, seen.masks)) else seen
    parts = {name: _local(tensor, name) for name, tensor in given.items()}
    return replace(seen, share=_share(matrix), masks=masks, **parts)  # type: ignore[arg-type]


def local_part(tensor: Tensor | None) -> Tensor | None:
    """What of a tensor lies on this rank; None where it is a sum that is still pending."""
    if tensor is None or not is_distributed(tensor):
        return tensor
    return None if _is_pending(tensor) else tensor.to_local()  # type: ignore[attr-defined]


def _is_pending(tensor: Any) -> bool:
    return any(placement.is_partial() for placement in tensor.placements)


def _local(tensor: Any, name: str) -> Tensor:
    if not is_distributed(tensor):
        return tensor  # type: ignore[no-any-return]
    if _is_pending(tensor):
        raise UnsupportedCallError(f"{name} is a sum over ranks that is still pending")
    axes = tensor.dim()
    allowed = range(axes - 2) if axes != 3 else ()  # with three axes heads and batch are one
    for placement in tensor.placements:
        if placement.is_shard() and placement.dim not in allowed:
            raise UnsupportedCallError(
                f"{name} is sharded over ranks along axis {placement.dim} of {axes}; only batch "
                "and heads can be. Context parallelism splits the rows of a softmax, whose "
                "parts are not merged"
            )
    return tensor.to_local()  # type: ignore[no-any-return]


def _share(matrix: Any) -> HeadShare | None:
    """The heads that a distributed q, or score matrix, holds here."""
    if not is_distributed(matrix) or matrix.dim() < 3:
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh = matrix.device_mesh
    _, offsets = compute_local_shape_and_global_offset(matrix.shape, mesh, matrix.placements)
    replica = any(
        placement.is_replicate() and mesh.get_local_rank(axis) > 0
        for axis, placement in enumerate(matrix.placements)
    )
    return HeadShare(int(offsets[-3]), int(matrix.shape[-3]), replica)


def share_of_module(module: nn.Module, heads: int, width: int) -> HeadShare | None:
    """The heads of a module with plain local tensors, as its column-parallel projections say.

    Such a projection is a distributed weight [rows, in], sharded along its rows, of which this
    rank holds those of q, of q, k and v, or of k alone. Ask during the forward: what FSDP shards
    is whole then.

    Args:
        module: that makes the call.
        heads: that the call shows.
        width: of one head.
    """
    for parameter in module.parameters():
        if not is_distributed(parameter) or parameter.dim() != 2:
            continue
        mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
        rows = parameter.to_local().shape[0]  # type: ignore[attr-defined]
        axes = [i for i, p in enumerate(placements) if p.is_shard(0) and mesh.size(i) > 1]
        if len(axes) == 1 and heads * width <= rows <= 3 * heads * width:
            parts, here = mesh.size(axes[0]), mesh.get_local_rank(axes[0])
            return HeadShare(here * heads, parts * heads)
    return None


def share_of(module: nn.Module | None, seen: Seen, declared: int | None) -> HeadShare | None:
    """Which heads a localized call shows; None where there is no sign that there are more.

    Args:
        module: that makes the call.
        seen: the call, its tensors local.
        declared: heads that the module declares.
    """
    if seen.share is not None:
        return seen.share
    q = seen.q if seen.q is not None else seen.scores
    if q is None or q.dim() < 4 or module is None:
        return None
    heads = batch_and_heads(q.shape[:-2], declared)[1]
    if seen.q is not None:
        share = share_of_module(module, heads, q.shape[-1])
        if share is not None:
            return share
    if declared and declared > heads and declared % heads == 0:
        return HeadShare(None, declared)
    return None
