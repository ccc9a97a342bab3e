"""`torch.nn.attention.flex_attention.flex_attention`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from stability_probe.capture.adapters.entry_point import EntryPoint
from stability_probe.capture.functions import Seen


def read(arguments: Mapping[str, Any], result: Any) -> Seen:
    """A call of `flex_attention`; its own log-sum-exp and largest scores where it gave them."""
    output, lse, largest = _parts(result)
    q, k, v = (arguments[n].detach().to(output.dtype) for n in ("query", "key", "value"))
    scale, block_mask = arguments.get("scale"), arguments.get("block_mask")
    return Seen(
        seam="flex",
        path=(),
        q=q,
        k=k,
        v=v,
        score_mod=arguments.get("score_mod"),
        mask_mod=None if block_mask is None else block_mask.mask_mod,
        scale=1 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
        output=output.detach(),
        lse=None if lse is None else lse.detach(),
        row_max=None if largest is None else largest.detach(),
        dtype=output.dtype,
    )


def _parts(result: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Output, log-sum-exp, largest scores: of `return_aux`, the older `return_lse`, or neither."""
    if isinstance(result, Tensor):
        return result, None, None
    output, beside = result
    if isinstance(beside, Tensor):
        return output, beside, None
    return output, getattr(beside, "lse", None), getattr(beside, "max_scores", None)


ENTRY_POINTS = (EntryPoint("torch.nn.attention.flex_attention", "flex_attention", read),)
