"""Reads attention calls from the autograd graph of a module's output.

For kernels that no call shows: TorchScript functions, C++ extensions that end in PyTorch's own
kernels, and the known Python autograd functions. Backward needs q, k and v, so the graph holds
them, and nothing is intercepted. Only nodes made since the module's forward began are looked at.

Where saved-tensor hooks are in use (checkpointing, offloading) nothing is read: unpacking a
tensor would compute or copy it once more. Without gradients there is no graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from stability_probe.capture.adapters.aten import rows_of
from stability_probe.capture.adapters.flash_attn import settings_of
from stability_probe.capture.adapters.kernel_call import packed_sequences, whole_sequences
from stability_probe.capture.nests import tensors_in
from stability_probe.capture.seen import Seen
from stability_probe.capture.segments import places

_MOST_NODES = 1000  # of one module's forward


def read_graph(output: object, since: int) -> list[Seen]:
    """The attention calls that `output` was computed by, oldest first.

    Args:
        output: what a module's forward returned: a tensor, or any nest of lists and mappings.
        since: the autograd sequence number when that forward began.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return []
    found = []
    for node in _nodes(output, since):
        read = _READERS.get(node.name())
        if read is not None and not _is_hooked(node):
            found.append((node._sequence_nr(), read(node)))
    return [seen for _, seen in sorted(found, key=lambda pair: pair[0])]


def saved_lse(output: torch.Tensor, q: torch.Tensor) -> torch.Tensor | None:
    """The row log-sum-exp that PyTorch's kernel keeps for backward, [B, H, Q]; None: it has none.

    Args:
        output: what `scaled_dot_product_attention` has just returned.
        q: its query.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return None
    node: Any = output.grad_fn
    for _ in range(_STEPS_TO_KERNEL):
        if node is None or node.name() in _KERNEL_NODES:
            break
        node = next((following for following, _ in node.next_functions), None)
    return None if node is None or node.name() not in _KERNEL_NODES else rows_of(_lse(node), q)


def _lse(node: Any) -> torch.Tensor | None:
    return getattr(node, "_saved_logsumexp", getattr(node, "_saved_log_sumexp", None))


def _nodes(output: object, since: int) -> Iterator[Any]:
    """The nodes behind a module's output, down to where its forward began."""
    waiting: list[Any] = [t.grad_fn for t in tensors_in(output)]
    known: set[Any] = set()
    while waiting and len(known) < _MOST_NODES:
        node = waiting.pop()
        if node is None or node in known or node.name() == "torch::autograd::AccumulateGrad":
            continue
        if node._sequence_nr() < since:
            continue
        known.add(node)
        yield node
        waiting += [following for following, _ in node.next_functions]


def _is_hooked(node: Any) -> bool:
    """Whether reading what the node saved would run somebody's hook."""
    many = getattr(node, "_raw_saved_tensors", ())
    query = getattr(node, "_raw_saved_query", None)
    saved = (*many, *(() if query is None else (query,)))
    return any(getattr(s, "unpack_hook", None) is not None for s in saved)


def _read_kernel(node: Any) -> Seen:
    """A node of one of PyTorch's fused kernels."""
    output = node._saved_output
    q, k, v = (t.detach() for t in (node._saved_query, node._saved_key, node._saved_value))
    bias = getattr(node, "_saved_attn_mask", getattr(node, "_saved_attn_bias", None))
    scale = node._saved_scale
    return Seen(
        seam="graph",
        path=(),
        q=q,
        k=k,
        v=v,
        masks=() if bias is None else (bias.detach(),),
        causal=bool(node._saved_is_causal),
        scale=1 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
        output=output.detach(),
        lse=rows_of(_lse(node), q),
        dropout=float(node._saved_dropout_p),
        dtype=output.dtype,
    )


def _read_flash(node: Any) -> Seen:
    """A node of flash-attn's function over sequences of equal length."""
    q, k, v, output, lse, *_ = node.saved_tensors
    return whole_sequences(settings_of(_Kept(node)), q, k, v, output, lse)


def _read_packed_flash(node: Any) -> Seen:
    """A node of flash-attn's function over packed sequences."""
    q, k, v, output, lse, cu_q, cu_k, *_ = node.saved_tensors
    where = places(cu_q, q.shape[0]), places(cu_k, k.shape[0], outside=-2)
    return packed_sequences(settings_of(_Kept(node)), q, k, v, output, where, lse)


class _Kept(Mapping[str, Any]):
    """What an autograd function keeps on its node, read as arguments by name."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self._node, name)
        except AttributeError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self._node))

    def __len__(self) -> int:
        return len(vars(self._node))


_KERNEL_NODES = frozenset(
    f"ScaledDotProduct{kernel}Backward0"
    for kernel in (
        *("FlashAttention", "EfficientAttention", "CudnnAttention"),
        *("FlashAttentionForCpu", "FusedAttentionOverrideable"),
    )
)
_STEPS_TO_KERNEL = 3  # a kernel may pad the head width: its output is then a slice

_READERS: dict[str, Callable[[Any], Seen]] = {
    **dict.fromkeys(_KERNEL_NODES, _read_kernel),
    "FlashAttnFuncBackward": _read_flash,
    "FlashAttnVarlenFuncBackward": _read_packed_flash,
}
