"""What the Triton kernel makes of the rows of a block once they are read: `rowmaths.py` over again.

Shape suffix: M queries of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stability_probe.stats.catalogue import HISTOGRAM_BINS
from stability_probe.stats.triton_tiles import log1p

INF = tl.constexpr(float("inf"))
BINS = tl.constexpr(HISTOGRAM_BINS)


@triton.jit
def distribution(ones, off, off_square, moment, largest, visible):
    """Entropy, entropy / ln n, 1 - sum p^2, max p, 1 - max p and lse of each row."""
    more = ones - 1.0 + off
    total = 1.0 + more
    log_total = log1p(more)
    entropy = tl.maximum(log_total - tl.div_rn(moment, total), 0.0)
    ratio = tl.minimum(tl.div_rn(entropy, tl.log(tl.maximum(visible, 2.0))), 1.0)
    apart = tl.maximum(off * off - off_square, 0.0)
    trace = tl.div_rn(ones * (ones - 1.0) + 2.0 * ones * off + apart, total * total)
    top = tl.div_rn(tl.full(total.shape, 1.0, tl.float32), total)
    return entropy, ratio, trace, top, tl.div_rn(more, total), largest + log_total


@triton.jit
def most(use, x):
    """The largest of `x` [M] where `use`; -inf: there is none."""
    return tl.max(tl.where(use, x, -INF), 0)


@triton.jit
def total(use, x):
    """The sum of `x` [M] where `use`, in float64."""
    return tl.sum(tl.where(use, x, 0.0).to(tl.float64), 0)


@triton.jit
def store_all(table, values, column, columns):
    """Write each value into its row of `table`, at `column`."""
    for i in tl.static_range(len(values)):
        tl.store(table + i * columns + column, values[i])


@triton.jit
def store_bins(table, use, ratio, column, columns):
    """Write into `BINS` rows of `table` how many of `ratio` fall into each bin of [0, 1]."""
    bin_M = tl.minimum(tl.floor(ratio * BINS), BINS - 1.0).to(tl.int32)
    slots = tl.arange(0, BINS)
    hits = (bin_M[:, None] == slots[None, :]) & use[:, None]
    tl.store(table + slots * columns + column, tl.sum(tl.where(hits, 1.0, 0.0), 0).to(tl.float64))


@triton.jit
def store_peak(peaks, peak_rows, inside, row_M, raw_largest, raw_smallest, column):
    """Write the pair that is largest in size: its value and its query, the first of several."""
    signed = tl.where(raw_largest >= -raw_smallest, raw_largest, raw_smallest)
    size = tl.where(inside, tl.maximum(raw_largest, -raw_smallest), -INF)
    row = tl.min(tl.where(size == tl.max(size, 0), row_M, 2147483647), 0)
    tl.store(peaks + column, most(row_M == row, signed))
    tl.store(peak_rows + column, row)
