"""Which code reads the scores of a call. All backends give the same `Scored`.

A further backend is one more entry of `_BACKENDS`: what it cannot read, and the function.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from stability_probe.errors import BackendError
from stability_probe.records import AttentionCall
from stability_probe.stats.scored import Scored
from stability_probe.stats.tiles import sizes_of
from stability_probe.stats.torch_scores import torch_scores
from stability_probe.stats.triton_scores import triton_refuses, triton_scores

Backend = Literal["auto", "torch", "triton"]

_LOG = logging.getLogger("stability_probe")
_failed: list[str] = []  # why "auto" takes Triton no more in this process


def score(
    call: AttentionCall,
    bad: Mapping[str, Tensor],
    *,
    full: bool,
    rows: bool,
    backend: Backend = "auto",
) -> Scored:
    """What the scores of one call give, from the backend asked for.

    Args:
        call: the attention call.
        bad: as `torch_scores` takes it; so are `full` and `rows`.
        full: see there.
        rows: see there.
        backend: "torch" reads any call. "triton" reads q and k with one kernel of its own. "auto"
            takes Triton for what it can read on a CUDA device, else PyTorch; should the kernel
            not compile or start on this machine it says so once in the log, and takes PyTorch
            from then on.

    Raises:
        BackendError: the backend asked for cannot read the call.
        ValueError: the call has neither q and k nor scores.
    """
    check_backend(backend)
    if backend == "torch" or sizes_of(call).empty:
        return torch_scores(call, bad, full=full, rows=rows)
    if backend == "auto":
        return _automatic(call, bad, full=full, rows=rows)
    reason = triton_refuses(call)
    if reason is not None:
        raise BackendError(
            f"backend='triton' cannot read this call of {call.layer!r}: {reason} Or pass "
            f"backend='auto', which takes PyTorch where Triton cannot."
        )
    return triton_scores(call, bad, full=full, rows=rows)


def check_backend(backend: str) -> None:
    """Refuses what is no backend.

    Raises:
        BackendError: it is none.
    """
    if backend not in get_args(Backend):
        raise BackendError(f"backend is {backend!r}; expected 'auto', 'torch' or 'triton'.")


def _automatic(call: AttentionCall, bad: Mapping[str, Tensor], *, full: bool, rows: bool) -> Scored:
    on_device = call.q_BHQD is not None and call.q_BHQD.device.type == "cuda"
    if on_device and not _failed and triton_refuses(call) is None:
        try:
            return triton_scores(call, bad, full=full, rows=rows)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # no C compiler, an unknown GPU: found out only when the kernel is first built
            _failed.append(f"{type(error).__name__}: {error}")
            # no `warnings.warn`: where warnings are errors it would stop more than itself
            _LOG.warning(
                "Triton could not run the attention statistics (%s). They are taken in PyTorch "
                "instead, exactly but more slowly. Pass backend='triton' to see the error, or "
                "backend='torch' to silence this.",
                _failed[0],
            )
    return torch_scores(call, bad, full=full, rows=rows)
