"""What the Triton kernel does with one block of queries and keys.

Shape suffixes: M queries of a block, N keys of a block, D head width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stability_probe.stats import rowsums

INF = tl.constexpr(float("inf"))
FLOOR = tl.constexpr(rowsums.FLOOR)


@triton.jit
def products(
    q_M,
    k_head,
    key_N,
    q_step,
    k_strides,
    K,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CUT: tl.constexpr,
):
    """q.k as float32 [M, N]: whole float32 products, or exact ones of halves summed in float32."""
    k_N = k_head + key_N.to(tl.int64) * k_strides[2]
    product = tl.full([q_M.shape[0], key_N.shape[0]], 0.0, tl.float32)
    for first in range(0, D, BLOCK_D):
        d = (first + tl.arange(0, BLOCK_D)).to(tl.int64)
        wide = d < D
        there = wide[:, None] & (key_N < K)[None, :] if CUT else wide[:, None]
        a = tl.load(q_M[:, None] + (d * q_step)[None, :], mask=wide[None, :], other=0.0)
        c = tl.load(k_N[None, :] + (d * k_strides[3])[:, None], mask=there, other=0.0)
        if a.dtype != c.dtype:
            a = a.to(tl.float32)
            c = c.to(tl.float32)
        product = tl.dot(a, c, product, input_precision="ieee")
    return product


@triton.jit
def mask_block(
    masks,
    mask_strides,
    b,
    h,
    at_M,
    row_M,
    key_N,
    K,
    ADDED: tl.constexpr,
    CAUSAL: tl.constexpr,
    CUT: tl.constexpr,
):
    """What no bool mask and no edge drops, bool [M, N], and the sum of what is added."""
    kept = tl.full([row_M.shape[0], key_N.shape[0]], True, tl.int1)
    bias = tl.full([row_M.shape[0], key_N.shape[0]], 0.0, tl.float32)
    if CUT:
        kept = kept & (key_N < K)[None, :]
        if CAUSAL:
            kept = kept & (key_N[None, :] <= row_M[:, None])
    for i in tl.static_range(len(ADDED)):
        steps = mask_strides[i]
        mask_M = masks[i] + b * steps[0] + h * steps[1] + at_M * steps[2]
        at = mask_M[:, None] + (key_N.to(tl.int64) * steps[3])[None, :]
        value = tl.load(at, mask=(key_N < K)[None, :], other=0)
        if ADDED[i]:
            bias += value.to(tl.float32)
        else:
            kept = kept & (value != 0)
    return kept, bias


@triton.jit
def fold(x, used, step, ones, off, off_square, moment):
    """Add a block's weights to those of the blocks before it, moved to the new maximum.

    Args:
        x: [M, N] S minus the new maximum, 0 where not used.
        used: [M, N] visible and finite.
        step: [M] the old maximum minus the new one; 0 where there was none.
        ones: [M] entries at the maximum; the others as in `rowsums.DEFAULT_ROWS`.
        off: [M].
        off_square: [M].
        moment: [M].

    Returns:
        The new `ones`, `off`, `off_square`, `moment`.
    """
    x = tl.maximum(x, FLOOR)
    step = tl.maximum(step, FLOOR)
    at_top = x == 0.0
    e = tl.where(at_top, 0.0, tl.exp(x))
    shrink = tl.exp(step)
    moved = tl.where(step < 0.0, ones, 0.0)  # what was a maximum is one no more
    moment = shrink * (moment + step * (off + ones)) + tl.sum(e * x, 1)
    off_square = shrink * shrink * (off_square + moved) + tl.sum(e * e, 1)
    off = shrink * (off + moved) + tl.sum(e, 1)
    ones = (ones - moved) + total_of(at_top & used, 1.0)
    return ones, off, off_square, moment


@triton.jit
def spread_of(x, used, x_sum, n, earlier_sum, earlier_n):
    """What a block adds to the sum of squared distances from the mean, [M].

    Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample
    variances": its own, and that between its mean and the mean before it.
    """
    mean = x_sum / tl.maximum(n, 1.0)
    rest = tl.where(used, x - mean[:, None], 0.0)
    apart = mean - earlier_sum / tl.maximum(earlier_n, 1.0)
    share = earlier_n * n / tl.maximum(earlier_n + n, 1.0)
    return tl.sum(rest * rest, 1) + apart * apart * share


@triton.jit
def fold_all(s, alive, top, total):
    """The largest of `s` and the sum of all weights next to it, with a block more: each [M]."""
    new_top = tl.maximum(top, largest_of(alive, s))
    base = tl.where(new_top == -INF, 0.0, new_top)
    weight = tl.exp(tl.maximum(s - base[:, None], FLOOR))
    return new_top, total * tl.exp(tl.maximum(top - base, FLOOR)) + total_of(alive, weight)


@triton.jit
def tanh(y):
    """The hyperbolic tangent to 2e-7 relative, NaN of NaN: Cephes tanhf (Moshier 1989).

    Triton has none that holds near 0, where 2 sigmoid(2 y) - 1 loses all but its absolute size.
    """
    z = y * y
    p = -5.70498872745e-3 * z + 2.06390887954e-2
    p = p * z - 5.37397155531e-2
    p = p * z + 1.33314422036e-1
    p = p * z - 3.33332819422e-1
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(y)) + 1.0)
    return tl.where(tl.abs(y) < 0.625, y + y * z * p, tl.where(y < 0.0, -far, far))


@triton.jit
def log1p(x):
    """log(1 + x) for x >= 0, to a few 1e-7 relative however small x is."""
    z = x / (2.0 + x)
    w = z * z
    near = 2.0 * z * (1.0 + w * (1.0 / 3.0 + w * (0.2 + w * (1.0 / 7.0 + w * (1.0 / 9.0)))))
    return tl.where(x < 0.25, near, tl.log(1.0 + x))


@triton.jit
def largest_of(use, x):
    """[M] the largest of each row of `x` where `use`; -inf: there is none."""
    return tl.max(tl.where(use, x, -INF), 1)


@triton.jit
def smallest_of(use, x):
    """[M] the smallest of each row of `x` where `use`; +inf: there is none."""
    return tl.min(tl.where(use, x, INF), 1)


@triton.jit
def total_of(use, x):
    """[M] the sum of each row of `x` where `use`."""
    return tl.sum(tl.where(use, x, 0.0), 1)
