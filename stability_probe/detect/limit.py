"""A limit with hysteresis: entered beyond one value, left beyond another.

Shape suffixes: N samples, C columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Whether numbers are beyond a limit, without flicker about it (Schmitt 1938).

    Attributes:
        enter: the value beyond which the state begins.
        leave: the value, on the other side, beyond which it ends. `enter` above `leave` is an
            upper limit, below it a lower one.
    """

    enter: float
    leave: float

    def __post_init__(self) -> None:
        if self.enter == self.leave:
            raise ValueError(
                f"Limit(enter={self.enter}, leave={self.leave}) has no hysteresis; give two "
                "different values, `leave` on the healthy side."
            )

    def __call__(self, samples_NC: Float64) -> Bool:
        """The state after the newest sample, [C]; a missing sample (NaN) holds it.

        Before any sample is beyond `enter` the state is False.
        """
        sign = 1.0 if self.enter > self.leave else -1.0
        with np.errstate(invalid="ignore"):
            entered_C = _latest(sign * samples_NC > sign * self.enter)
            left_C = _latest(sign * samples_NC < sign * self.leave)
        state: Bool = entered_C > left_C
        return state


def _latest(true_NC: Bool) -> npt.NDArray[np.intp]:
    """The last row in which each column is true, -1 where none."""
    rows = len(true_NC)
    last_C = rows - 1 - np.argmax(true_NC[::-1], axis=0)
    return np.where(true_NC.any(axis=0), last_C, -1)
