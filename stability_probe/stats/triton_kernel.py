"""The row pass as one Triton kernel, reduced per block of queries before it leaves the device.

One program reads the keys of one head once, in blocks, for a block of queries, and carries a few
numbers per query. The maximum of a row is known only at its end, so what was summed before is
moved to each new maximum (Milakov and Gimelshein 2018, "Online normalizer calculation for
softmax", arXiv:1805.02867). The shifted moment sum e (S - m) is carried and not sum e S: at large
logits the latter loses the entropy in the difference of two large numbers.

What the sums mean is said in `rowsums.py`: entries at the maximum are counted, and only the mass
off it is summed.

Products and sums must not be fused (`enable_fp_fusion=False`): fma(q.k, scale, -m) is not 0 at
the maximum.

Shape suffixes: M queries of a block, N keys of a block, D head width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stability_probe.stats import masks as mask_tiles
from stability_probe.stats import precision, scored
from stability_probe.stats.triton_rows import (
    distribution,
    most,
    store_all,
    store_bins,
    store_peak,
    total,
)
from stability_probe.stats.triton_tiles import (
    fold,
    fold_all,
    largest_of,
    mask_block,
    products,
    smallest_of,
    spread_of,
    tanh,
    total_of,
)

INF = tl.constexpr(float("inf"))
LEAK_WEIGHT = tl.constexpr(scored.LEAK_WEIGHT)
MASKED_BIAS = tl.constexpr(mask_tiles.MASKED_BIAS)
FLOAT16_MAX = tl.constexpr(precision.FLOAT16_MAX)


@triton.jit(do_not_specialize=["Q", "K", "blocks"])
def attention_kernel(
    q,
    k,
    masks,
    scale,
    sink,
    bad_output,
    maxima,
    sums,
    peaks,
    peak_rows,
    row_entropy,
    Q,
    K,
    H,
    R,
    blocks,
    softcap,
    saturation,
    q_strides,
    k_strides,
    mask_strides,
    sink_strides,
    ADDED: tl.constexpr,
    BIASED: tl.constexpr,
    CAUSAL: tl.constexpr,
    CAPPED: tl.constexpr,
    FULL: tl.constexpr,
    DTYPE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Fill the column of one block of queries in `maxima`, `sums`, `peaks` and `peak_rows`.

    Args:
        q: [B, H, Q, D] of any strides; float32, float16 or bfloat16.
        k: [B, G, K, D] likewise; query head h reads key head h // R.
        masks: as many as `ADDED`, each broadcast to [B, H, Q, K] by strides of 0.
        scale: float32 [B, H].
        sink: None, or broadcast to [B, H, Q] by strides of 0.
        bad_output: None, or float32 [B, H, Q]: values of the output that are not finite.
        maxima: float32 [names, B, H, blocks], in the order of `triton_scores.maxima_names`.
        sums: float64 [names, B, H, blocks], in the order of `triton_scores.sum_names`.
        peaks: float32 [B, H, blocks]: scale x q.k where it is largest in size; -inf: no pair.
        peak_rows: int32 likewise: its query.
        row_entropy: None, or float32 [B, H, Q]; NaN where a row does not count.
        Q: number of queries.
        K: number of keys.
        H: number of query heads.
        R: query heads per key head.
        blocks: blocks of queries per head.
        softcap: read where `CAPPED`.
        saturation: the largest 1 - p at which p rounds to 1.
        q_strides: in elements, over [B, H, Q, D]; the other strides likewise.
        k_strides: over [B, G, K, D].
        mask_strides: one tuple a mask, over [B, H, Q, K].
        sink_strides: over [B, H, Q].
        ADDED: for each mask whether it is added; else it is bool, True where visible.
        BIASED: whether any is added.
        CAUSAL: whether key j is hidden from query i wherever j > i.
        CAPPED: whether there is a soft-cap.
        FULL: all that the catalogue asks for.
        DTYPE: in which the run forms its scores, for ties.
        D: head width.
        BLOCK_D: how much of the width is multiplied at a time.
        BLOCK_M: queries of a program.
        BLOCK_N: keys read at a time.
    """
    column = tl.program_id(0)
    head = column // blocks
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    first_row = (column % blocks) * BLOCK_M
    row_M = first_row + tl.arange(0, BLOCK_M)
    # rows beyond the last one read the last one again, and are left out at the end
    at_M = tl.minimum(row_M, Q - 1).to(tl.int64)
    q_M = q + b * q_strides[0] + h * q_strides[1] + at_M * q_strides[2]
    k_head = k + b * k_strides[0] + (h // R) * k_strides[1]
    factor = tl.load(scale + head)

    zero_M = tl.full([BLOCK_M], 0.0, tl.float32)
    none_M = tl.full([BLOCK_M], -INF, tl.float32)
    largest, smallest, raw_largest, raw_smallest = none_M, -none_M, none_M, -none_M
    ones, off, off_square, moment = zero_M, zero_M, zero_M, zero_M
    visible, trouble, shift, spread = zero_M, zero_M, zero_M, zero_M
    ties, scaled, unscaled, first = zero_M, zero_M, zero_M, none_M
    leak_top, leak_total, leaked = none_M, zero_M, none_M

    stop = tl.minimum(K, first_row + BLOCK_M) if CAUSAL else K
    whole = (tl.minimum(K, first_row + 1) if CAUSAL else K) // BLOCK_N * BLOCK_N
    for edge in tl.static_range(2):  # blocks of keys that every row sees, then those that are cut
        begin = whole if edge else 0
        end = stop if edge else whole
        for start in range(begin, end, BLOCK_N):
            key_N = start + tl.arange(0, BLOCK_N)
            product = products(q_M, k_head, key_N, q_strides[3], k_strides, K, D, BLOCK_D, edge)
            raw = product * factor
            s = raw
            if CAPPED:
                s = tanh(tl.div_rn(raw, softcap)) * softcap
            kept, bias = mask_block(
                masks, mask_strides, b, h, at_M, row_M, key_N, K, ADDED, CAUSAL, edge
            )
            shown, masked = kept, kept
            if BIASED:
                s = s + bias
                shown = kept & (bias > MASKED_BIAS)
                masked = kept & ~(bias > MASKED_BIAS)
            finite = tl.abs(s) < INF
            used = shown & finite
            bad = kept & ~finite
            if BIASED:  # -inf under an additive mask is the mask at work
                bad = bad & ~(masked & (s == -INF))
            trouble += total_of(bad, 1.0)
            if len(ADDED) == 0:
                limit_M = (
                    tl.minimum(row_M + 1, K) if CAUSAL else tl.full([BLOCK_M], 0, tl.int32) + K
                )
                n = tl.minimum(tl.maximum(limit_M - start, 0), BLOCK_N).to(tl.float32)
            else:
                n = total_of(shown, 1.0)

            before = largest
            largest = tl.maximum(before, largest_of(used, s))
            smallest = tl.minimum(smallest, smallest_of(used, s))
            base = tl.where(largest == -INF, 0.0, largest)
            step = tl.where(before == -INF, 0.0, before - base)  # 0, or how far the maximum rose
            x = tl.where(used, s - base[:, None], 0.0)

            ones, off, off_square, moment = fold(x, used, step, ones, off, off_square, moment)
            earlier = shift + visible * step
            x_sum = tl.sum(x, 1)
            if FULL:
                spread += spread_of(x, used, x_sum, n, earlier, visible)
            shift = earlier + x_sum
            visible += n

            if CAPPED or BIASED:
                known = shown & (tl.abs(raw) < INF)
                raw_largest = tl.maximum(raw_largest, largest_of(known, raw))
                raw_smallest = tl.minimum(raw_smallest, smallest_of(known, raw))
            if FULL:
                beyond = shown & (tl.abs(raw) < INF) & (tl.abs(raw) > FLOAT16_MAX * tl.abs(factor))
                unscaled += total_of(beyond, 1.0)
                scaled += total_of(used & (tl.abs(s) > FLOAT16_MAX), 1.0)
                top = base.to(DTYPE).to(tl.float32)
                same = before.to(DTYPE).to(tl.float32) == top
                equal = used & (s.to(DTYPE).to(tl.float32) == top[:, None])
                ties = tl.where(same, ties, 0.0) + total_of(equal, 1.0)
                if start == 0:
                    first = largest_of(used & (key_N == 0)[None, :], s)
            if FULL and BIASED:
                leak_top, leak_total = fold_all(s, kept & finite, leak_top, leak_total)
                leaked = tl.maximum(leaked, largest_of(masked & finite, s))

    inside = row_M < Q
    if not (CAPPED or BIASED):
        raw_largest, raw_smallest = largest, smallest
    entropy, ratio, trace, top, rest, lse = distribution(
        ones, off, off_square, moment, largest, visible
    )
    sound = inside & (trouble == 0.0) & (visible > 0.0)
    counts = sound & (visible > 1.0)
    columns = tl.num_programs(0)
    extrema = (
        most(inside, largest),
        most(inside, -smallest),
        most(inside, raw_largest),
        most(inside, -raw_smallest),
        most(inside, visible),
    )
    if FULL:
        extrema += (most(sound, lse), most(sound, -lse), most(counts, top))
    store_all(maxima, extrema, column, columns)
    totals = (
        total(counts, 1.0),
        total(counts, visible),
        total(counts, entropy),
        total(counts, ratio),
        total(counts, trace),
        total(counts, -shift / tl.maximum(visible, 1.0)),
        total(inside & (visible == 0.0), 1.0),
        total(inside, trouble),
    )
    row_at = head.to(tl.int64) * Q + at_M
    if bad_output is not None:
        bad_M = tl.load(bad_output + row_at)
        totals += (
            total(inside & (visible > 0.0), bad_M),
            total(inside & (visible == 0.0), bad_M),
        )
    if FULL:
        leak = tl.exp(leaked - leak_top) / leak_total
        totals += (
            total(counts, top),
            total(counts, tl.exp(first - largest) * top),
            total(counts, tl.sqrt_rn(spread / tl.maximum(visible, 1.0))),
            total(counts & (ties >= 2.0), 1.0),
            total(counts & (rest <= saturation), 1.0),
            total(inside & (leaked > -INF) & (leak > LEAK_WEIGHT), 1.0),
            total(inside, unscaled),
            total(inside, scaled),
        )
        if sink is not None:
            sink_M = tl.load(
                sink + b * sink_strides[0] + h * sink_strides[1] + at_M * sink_strides[2]
            )
            mass = 1.0 / (1.0 + tl.exp(lse - sink_M.to(tl.float32)))
            known = counts & (mass == mass)
            totals += (total(known, mass), total(known, 1.0))
        store_bins(sums + len(totals) * columns, counts, ratio, column, columns)
    store_all(sums, totals, column, columns)
    store_peak(peaks, peak_rows, inside, row_M, raw_largest, raw_smallest, column)
    if row_entropy is not None:
        tl.store(row_entropy + row_at, tl.where(counts, entropy, float("nan")), mask=inside)


INTERPRETED = not isinstance(attention_kernel, triton.JITFunction)  # TRITON_INTERPRET=1
