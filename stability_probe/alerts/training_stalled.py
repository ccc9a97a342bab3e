"""Little has been learned and attention is at an end: a stall, not a divergence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stability_probe.alerts.actions import QK_NORM, START_AGAIN
from stability_probe.alerts.extremes import SATURATED, UNIFORM, extreme
from stability_probe.alerts.history import History
from stability_probe.alerts.rule import Finding, Verdict, announce
from stability_probe.alerts.staircase import LOSS_WINDOW
from stability_probe.alerts.trend import HOLDS, RESTS
from stability_probe.detect.plateau import Plateau
from stability_probe.detect.span import SHORT, Span
from stability_probe.records import Alert, Severity

FROM_SCRATCH = Plateau()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStalled:
    """After hundreds of steps the loss is where it began, and most heads are at one end.

    A warning where they look at one key alone, info where they look at all alike: so do the heads
    of a run that merely learns slowly. Only runs from scratch are judged: after a mark, or from a
    checkpoint, a flat loss is no news.

    Attributes:
        plateau: 300 steps, and a tenth of the first loss.
        share: of all heads of the model that look at one key alone, or at all alike.
    """

    name: str = "training_stalled"
    plateau: Plateau = FROM_SCRATCH
    share: float = 0.5
    each_layer: bool = False

    @property
    def lookback(self) -> Span:
        """The longest window the rule looks back over."""
        return SHORT

    def evaluate(self, history: History, step: int) -> Verdict:
        """Judge the newest measured record of the run's first phase."""
        if not history.fresh or history.start != history.first or history.first > 1:
            return {}
        stalled = self.plateau(history.loss(within=LOSS_WINDOW), step)
        shares = self._shares(history)
        if stalled is None or shares is None:
            return {}
        saturated, uniform = shares
        share = max(saturated, uniform)
        if not stalled or share < self.share:
            return {None: None}
        return {
            None: Finding(
                severity=Severity.WARNING if saturated >= uniform else Severity.INFO,
                statistic="entropy_ratio",
                value=share,
                limit=self.share,
                since=history.first,
                holds=HOLDS,
                rests=RESTS,
            )
        }

    def explain(self, history: History, finding: Finding) -> Alert:
        """Say how little was learned."""
        track = history.loss(within=LOSS_WINDOW)
        first = track.first[1] if track.first else np.nan
        return announce(
            self.name,
            finding,
            history,
            message=(
                f"The loss has hardly fallen in {history.step - history.first} steps "
                f"({first:.3g} -> {track.value:.3g}) and {100 * (finding.value or 0):.0f} % of the "
                "heads look at one key alone or at all keys alike."
            ),
            cause="Attention carries no gradient or no choice.",
            remedies=(START_AGAIN, QK_NORM),
        )

    def _shares(self, history: History) -> tuple[float, float] | None:
        """The shares of heads at the two ends; None where no entropy is known."""
        saturated, uniform = (extreme(history, end, away=0.5) for end in (SATURATED, UNIFORM))
        known = np.count_nonzero(saturated.known_LH)
        if not known:
            return None
        counts = (np.count_nonzero(e.there_LH) for e in (saturated, uniform))
        one, all_alike = (count / known for count in counts)
        return one, all_alike
