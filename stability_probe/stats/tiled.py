"""The row pass in PyTorch: a few float32 numbers per row, from tiles that stay in cache.

No T x T tensor is kept: memory is O(batch x heads x T) and a few tiles. Nothing waits for the
device: shapes and flags alone decide what runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stability_probe.finite import known_at_most, known_finite
from stability_probe.records import AttentionCall
from stability_probe.stats.general import general_pass
from stability_probe.stats.plain import plain_pass
from stability_probe.stats.precision import FLOAT16_MAX
from stability_probe.stats.rowsums import Rows, empty_rows
from stability_probe.stats.tiles import Products, products_of, sizes_of


def row_pass(call: AttentionCall, bad_keys_BGK: Tensor | None, *, full: bool) -> Rows:
    """The row numbers of one call. Call it inside `precision.full_float32`.

    Args:
        call: the attention call.
        bad_keys_BGK: how many values of each key are not finite; None where none is, or the call
            has no k.
        full: all of `rowsums.FULL_ROWS`, else `rowsums.DEFAULT_ROWS`.

    Returns:
        Float32 [B, G, R, Q] by name. In a row with `trouble`, or without a visible key, only the
        extrema, `visible` and `trouble` mean anything.

    Raises:
        ValueError: the call has neither q and k nor scores.
    """
    sizes = sizes_of(call)
    given = call.q_BHQD if call.scores_BHQK is None else call.scores_BHQK
    assert given is not None  # sizes_of has looked
    rows = empty_rows(sizes, given.device, full=full)
    if sizes.empty:
        return rows
    products = products_of(call, sizes)
    functions = call.score_mod is not None or call.mask_mod is not None
    masked = bool(call.masks) or call.softcap is not None or call.scores_BHQK is not None
    dtype = call.dtype or given.dtype
    if products is None or masked or functions or (full and not known_finite(call.q_BHQD)):
        plain = False
    elif full and bad_keys_BGK is not None:
        plain = False  # whose scores that are not finite are counted one by one
    else:
        bad_BGK = None if bad_keys_BGK is None else bad_keys_BGK > 0
        plain_pass(products, sizes, rows, bad_BGK, causal=call.causal, dtype=dtype)
        plain = not full or _fits_float16(rows, products)
    if not plain:
        general_pass(call, products, sizes, rows, dtype=dtype, full=full)
    return rows


def _fits_float16(rows: Rows, products: Products) -> bool:
    """Whether no entry is known to exceed float16, before the scale or after it."""
    strength = torch.maximum(rows["largest"], -rows["smallest"])
    product = strength / products.scale.squeeze(-1).abs()
    return known_at_most(torch.maximum(strength, product), FLOAT16_MAX)
