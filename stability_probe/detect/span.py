"""How far back a comparison goes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """At least so many steps, at least so many samples, and at least such a share of the phase.

    A run measured every step is compared over `steps`; a run measured rarely over the
    `samples` newest samples, both ends included, however many steps these take. A span with a
    `share` grows with the phase, so that a run whose every process is ten times slower is judged
    alike; and it is used only once the phase is `age` times as long as the span, because what
    changes over most of a run is early learning.
    """

    steps: int = 40
    samples: int = 8
    share: float = 0.0
    age: float = 0.0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.samples < 2 or not 0 <= self.share < 1:
            raise ValueError(
                f"Span(steps={self.steps}, samples={self.samples}, share={self.share}) cannot "
                "hold a comparison; give at least 1 step and at least 2 samples, and a share in "
                "[0, 1)."
            )

    def reach(self, age: int) -> float:
        """The steps to look back over in a phase that is `age` steps old."""
        return max(float(self.steps), self.share * age)


SHORT = Span()
LONG = Span(steps=200, share=0.1, age=3.0)


def longest(spans: Iterable[Span]) -> Span:
    """The span of fixed length that holds all such; the short one where there is none."""
    found = [s for s in spans if not s.share] or [SHORT]
    return Span(steps=max(s.steps for s in found), samples=max(s.samples for s in found))
