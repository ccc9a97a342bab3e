"""When do attention logits overflow in float16, when in float32, and what does QK-norm change?

    python examples/fp16_trial.py

Random queries and keys of width 64, multiplied by a growing weight scale as drifting weights
would. The products are formed in float16, in float32, and in float16 after each vector is brought
to length 1, times g = 10. Finite is not enough: where the length itself is computed in float16 it
overflows to infinity, every vector becomes 0, and attention looks everywhere alike.

Shape suffixes: T positions, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

import stability_probe as sp

WIDTH, TOKENS, GAIN = 64, 16, 10.0
SCALES = (1, 4, 16, 50, 64, 400, 2000, 16000)


def vectors() -> tuple[Tensor, Tensor]:
    """q and k, float64 [T, D]."""
    rng = np.random.default_rng(0)
    q_TD, k_TD = (rng.normal(size=(TOKENS, WIDTH)) for _ in range(2))
    return torch.from_numpy(q_TD), torch.from_numpy(k_TD)


def plain(scale: float, dtype: torch.dtype) -> Tensor:
    """Logits [T, T] with every step in `dtype`: the product overflows before it is divided."""
    q_TD, k_TD = ((scale * x).to(dtype) for x in vectors())
    return q_TD @ k_TD.T / math.sqrt(WIDTH)


def normalised(scale: float, unit: Callable[[Tensor], Tensor]) -> Tensor:
    """Logits [T, T] of float16 vectors that `unit` brought to length 1, times g, in float16."""
    q_TD, k_TD = (unit((scale * x).half()) for x in vectors())
    return GAIN * (q_TD @ k_TD.T)


def unit_by_float32(x: Tensor) -> Tensor:
    """Length 1, the length taken in float32."""
    return (x.float() / torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True)).half()


def unit_by_float16(x: Tensor) -> Tensor:
    """Length 1 only while the sum of squares stays below 65504."""
    return x / (x * x).sum(-1, keepdim=True).sqrt()


def entropy(logits_TT: Tensor) -> float:
    """Mean row entropy of their softmax in nats; NaN where a logit is not finite."""
    p_TT = logits_TT.float().softmax(-1)
    return float(torch.special.entr(p_TT).sum(-1).mean())


def first_overflow(dtype: torch.dtype) -> float:
    """The smallest weight scale at which a plain logit is not finite, to one part in 10^9."""
    low, high = 1.0, 1e30
    while high / low > 1 + 1e-9:
        middle = math.sqrt(low * high)
        if torch.isfinite(plain(middle, dtype)).all():
            low = middle
        else:
            high = middle
    return high


def row(scale: float) -> str:
    """One line of the table."""
    q_TD, k_TD = ((scale * x).half() for x in vectors())
    plain_TT = plain(scale, torch.float16)
    by_32_TT, by_16_TT = (normalised(scale, f) for f in (unit_by_float32, unit_by_float16))
    headroom = sp.measure(q_TD, k_TD)["fp16_headroom_log2"].item()
    cells = (
        f"{scale:>7}",
        f"{plain(scale, torch.float32).abs().max():>12.4g}",
        f"{headroom:>9.2f}",
        f"{(~torch.isfinite(plain_TT)).sum():>7} of {plain_TT.numel()}",
        f"{by_32_TT.abs().max():>9.3f} {entropy(by_32_TT):>8.3f}",
        f"{by_16_TT.abs().max():>9.3f} {entropy(by_16_TT):>8.3f}",
    )
    return "  ".join(cells)


def main() -> None:
    print("  scale   fp32 |logit|   headroom   fp16 overflow    float32 norm H     float16 norm H")
    for scale in SCALES:
        print(row(scale))
    print(f"\nln {TOKENS} = {math.log(TOKENS):.3f}: the entropy H of attention that looks nowhere")
    for name, dtype in (("float16", torch.float16), ("float32", torch.float32)):
        print(f"plain {name} logits first overflow at weight scale {first_overflow(dtype):.4g}")


if __name__ == "__main__":
    main()
