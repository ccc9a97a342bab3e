"""PyTorch's own kernels, called as operators: `torch.ops.aten._scaled_dot_product_...`.

The torch-function mode sees such a call. The kernel gives its log-sum-exp beside the output; on
some devices its rows are padded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from stability_probe.capture.functions import Seen


def read(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Seen:
    """A call of one of `kernels.KERNELS`."""
    schema = getattr(func, "default", func)._schema
    given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | dict(kwargs)
    output, lse = result[0], result[1]
    q, k, v = (given[n].detach().to(output.dtype) for n in ("query", "key", "value"))
    bias, scale = given.get("attn_bias", given.get("attn_mask")), given.get("scale")
    return Seen(
        seam="aten",
        path=(),
        q=q,
        k=k,
        v=v,
        masks=() if bias is None else (bias.detach(),),
        causal=bool(given.get("is_causal", False)),
        scale=1 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
        output=output.detach(),
        lse=rows_of(lse, q),
        dropout=float(given.get("dropout_p", 0.0)),
        dtype=output.dtype,
    )


def rows_of(lse: Any, q_BHQD: Tensor) -> Tensor | None:
    """The log-sum-exp as [B, H, Q], without the padding that a kernel adds; None: not given."""
    if not isinstance(lse, Tensor) or lse.dim() not in (3, 4):
        return None
    lse = lse.detach().squeeze(-1) if lse.dim() == 4 else lse.detach()
    lse = lse[..., : q_BHQD.shape[2]]
    return lse if lse.shape == q_BHQD.shape[:3] else None
