"""Has a number stopped getting better?"""

from __future__ import annotations

from dataclasses import dataclass

from stability_probe.detect.loss import LossTrack


@dataclass(frozen=True, slots=True, kw_only=True)
class Plateau:
    """A loss that has hardly left the value that it began with, after long enough.

    It asks how much was learned since the run began, so it is for runs that start from scratch.

    Attributes:
        after: steps from the first loss on.
        learned: the share of its first value by which the loss must have fallen.
    """

    after: int = 300
    learned: float = 0.1

    def __call__(self, track: LossTrack, step: int) -> bool | None:
        """Whether the slow average is still up there; None while it is too early to say."""
        first, slow = track.first, track.slow
        if first is None or slow is None or step - first[0] < self.after:
            return None
        return first[1] - slow < self.learned * abs(first[1])
