"""How far the plan must be thinned for watching to keep to its share of the time."""

from __future__ import annotations

from stability_probe.plan import WIDEST

WINDOW = 50  # steps between two decisions
SPARE = 1 / 3  # of the share: below it the plan may be as dense again as it was


class Budget:
    """Decides, now and then, by what share of the time watching took since the last decision.

    Attributes:
        stride: how many times the plan is to be thinned: 1, 2, 4, ... 64.
    """

    def __init__(self, share: float | None) -> None:
        """Keep to this share of the time; None for no limit."""
        self._share = share
        self._steps, self._own, self._all = 0, 0.0, 0.0
        self.stride = 1

    def note(self, own: float, whole: float) -> None:
        """A step took `whole` seconds, `own` of them the probe's."""
        if self._share is None:
            return
        self._steps += 1
        self._own += own
        self._all += whole
        if self._steps >= WINDOW * self.stride or self._steps >= WINDOW * 10:
            self._decide(self._own / self._all if self._all > 0 else 0.0, self._share)
            self._steps, self._own, self._all = 0, 0.0, 0.0

    def _decide(self, taken: float, share: float) -> None:
        if taken > share:
            self.stride = min(2 * self.stride, WIDEST)
        elif taken < SPARE * share:
            self.stride = max(self.stride // 2, 1)
