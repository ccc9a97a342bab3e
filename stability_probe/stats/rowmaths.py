"""From a row's sums to its entropy, its softmax slope and its largest weight.

With `ones` the number of entries at the maximum, x = `off` the sum of e over the others and y =
`off_square` that of e^2: l = ones + x, and

    H           = log l - (sum e (S - m)) / l
    1 - sum p^2 = (ones (ones - 1) + 2 ones x + (x^2 - y)) / l^2
    1 - max p   = (l - 1) / l

where no term is a difference of numbers close to 1, so that they hold in a nearly one-hot row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RowMaths:
    """Values per row; they mean something where `counts`, `lse` where `sound`."""

    sound: Tensor  # bool: a key is visible, and every score is finite
    counts: Tensor  # bool: also there is more than one key to choose from
    entropy: Tensor  # nats, never below 0
    entropy_ratio: Tensor  # entropy / ln n, in [0, 1]
    trace: Tensor  # 1 - sum p^2
    top: Tensor  # max p
    rest: Tensor  # 1 - max p
    lse: Tensor  # log-sum-exp of S


def row_maths(rows: Mapping[str, Tensor]) -> RowMaths:
    """The distribution of every row, from what `tiled.row_pass` left of it."""
    n, ones, off = rows["visible"], rows["ones"], rows["off"]
    sound = (rows["trouble"] == 0) & (n > 0)
    counts = sound & (n > 1)
    more = ones - 1 + off  # l - 1
    total = 1 + more
    log_total = torch.log1p(more)
    entropy = (log_total - rows["moment"] / total).clamp_min(0.0)
    spread = (off.square() - rows["off_square"]).clamp_min(0.0)
    return RowMaths(
        sound=sound,
        counts=counts,
        entropy=entropy,
        entropy_ratio=(entropy / n.clamp_min(2.0).log()).clamp_max(1.0),
        trace=(ones * (ones - 1) + 2 * ones * off + spread) / total.square(),
        top=1 / total,
        rest=more / total,
        lse=rows["largest"] + log_total,
    )
