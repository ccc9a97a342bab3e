"""What a run's scalars say of its updates and of values that are not finite."""

from __future__ import annotations

from collections import deque

from stability_probe.records import FirstBad, StepScalars

GRADIENT = "grad_"  # how `FirstBad.tensor` begins where it is a gradient
_SKIPS_KEPT = 10_000  # records whose being skipped is remembered one by one


class Updates:
    """Which updates were skipped, and where values were first not finite.

    Attributes:
        count: records so far, skipped or not.
        skips: those whose update was skipped.
        fresh_bad: the newest record's `first_bad` entries that no earlier record had.
        bad_at: the step of the newest record with a fresh entry of a forward that masking cannot
            explain.
        bad_gradient_at: the step of the newest record with a fresh entry of a gradient.
    """

    def __init__(self) -> None:
        self.count, self.skips = 0, 0
        self.fresh_bad: tuple[FirstBad, ...] = ()
        self.bad_at: int | None = None
        self.bad_gradient_at: int | None = None
        self._skipped: deque[tuple[int, bool]] = deque()
        self._seen_bad: dict[tuple[str, str], int] = {}

    def note(self, scalars: StepScalars) -> None:
        """Take the next record's scalars."""
        self._skipped.append((scalars.step, scalars.skipped))
        self.count += 1
        self.skips += scalars.skipped
        if len(self._skipped) > _SKIPS_KEPT:
            self._skipped.popleft()
        self._note_bad(scalars)

    def forget_bad(self) -> None:
        """Start looking for values that are not finite again."""
        self.bad_at, self.bad_gradient_at = None, None

    def rewind(self, step: int) -> None:
        """Forget the updates from `step` on, which the run is about to do again."""
        while self._skipped and self._skipped[-1][0] >= step:
            self.skips -= self._skipped.pop()[1]
            self.count -= 1
        self.forget_bad()

    def was_skipped(self, step: int) -> bool:
        """Whether the update of a step was skipped, as far as that is remembered."""
        return any(skipped for at, skipped in reversed(self._skipped) if at == step)

    def bad_gradient_before(self, step: int) -> tuple[str, int] | None:
        """Layer and step of a gradient that was not finite at the last update before `step`."""
        last = next((s for s, skipped in reversed(self._skipped) if s < step and not skipped), None)
        found = [
            layer
            for (layer, tensor), at in self._seen_bad.items()
            if at == last and tensor.startswith(GRADIENT)
        ]
        return None if last is None or not found else (found[0], last)

    def _note_bad(self, scalars: StepScalars) -> None:
        self.fresh_bad = tuple(
            bad
            for bad in scalars.first_bad
            if self._seen_bad.get((bad.layer, bad.tensor)) != bad.step
        )
        for bad in self.fresh_bad:
            self._seen_bad[bad.layer, bad.tensor] = bad.step
        backward = [bad.tensor.startswith(GRADIENT) for bad in self.fresh_bad]
        if any(backward):
            self.bad_gradient_at = scalars.step
        if not all(b or bad.explained for b, bad in zip(backward, self.fresh_bad, strict=True)):
            self.bad_at = scalars.step
