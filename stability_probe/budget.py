"""How far the plan must be thinned for watching to keep to its share of the time."""

from __future__ import annotations

from stability_probe.plan import WIDEST, Thinning

WINDOW = 50  # steps between two decisions, and as many at least
SPARE = 1 / 3  # of the share: below it the plan may be as dense again as it was


class Budget:
    """Decides, now and then, by what share of the time watching took since the last decision.

    Whichever costs more goes first: what the steps between measured ones get, or every second
    measured one.

    Attributes:
        thinning: how the plan is to be thinned.
    """

    def __init__(self, share: float | None) -> None:
        """Keep to this share of the time; None for no limit."""
        self._share = share
        self._between = 0.0  # what the steps between took when they last were more than bare
        self._start()
        self.thinning = Thinning()

    def _start(self) -> None:
        self._steps, self._whole, self._all = 0, 0, 0.0
        self._own = {True: 0.0, False: 0.0}  # by whether the step was measured whole

    def note(self, own: float, step: float, *, whole: bool) -> None:
        """A step took so many seconds, `own` of them the probe's; it was measured whole or not."""
        if self._share is None:
            return
        self._steps += 1
        self._whole += whole
        self._all += step
        self._own[whole] += own
        over = sum(self._own.values()) > self._share * self._all
        # what a measured step costs is not known before two of them
        if self._steps >= WINDOW and (self._whole >= 2 or (over and self._steps >= 10 * WINDOW)):
            self._decide(self._share)
            self._start()

    def _decide(self, share: float) -> None:
        whole, between = (self._own[key] / max(self._all, 1e-9) for key in (True, False))
        thin = self.thinning
        if not thin.bare:
            self._between = between
        if whole + between > share:
            bare = thin.bare or between > whole or thin.stride >= WIDEST
            stride = thin.stride if bare and not thin.bare else min(2 * thin.stride, WIDEST)
            self.thinning = Thinning(stride, bare)
        elif whole + between < SPARE * share:
            if thin.stride > 1:
                self.thinning = Thinning(thin.stride // 2, thin.bare)
            elif thin.bare and whole + self._between < share:
                self.thinning = Thinning()
