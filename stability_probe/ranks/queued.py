"""A measured step on its way to the other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stability_probe.meter import Measurement
from stability_probe.ranks.packing import Contribution
from stability_probe.ranks.reduced import Reduced
from stability_probe.records import Level
from stability_probe.transfer import HostCopy


@dataclass(slots=True, eq=False)
class Ticket:
    """What a step waits for: its pooled result, or word that there will be none."""

    done: bool = False
    result: Reduced | None = None

    def give(self, result: Reduced | None) -> None:
        """Ends the waiting."""
        self.result, self.done = result, True


@dataclass(frozen=True, slots=True, eq=False)
class Queued:
    """A step to be pooled whose numbers may still be on their way to the host."""

    step: int
    tick: int  # of the schedule
    phase_start: int
    thinning: int
    ticket: Ticket
    measurement: Measurement | None = None
    numbers: Mapping[str, HostCopy] | None = None
    seen_bad: tuple[Measurement, ...] = ()  # sentinels read since the last pooled step

    @property
    def ready(self) -> bool:
        """Whether `contribution` would not wait for a device."""
        return all(m.ready for m in self.seen_bad) and all(
            copy.ready for copy in (self.numbers or {}).values()
        )

    def contribution(self) -> Contribution:
        """What this rank adds; without a measurement that is nothing but its presence."""
        measured = self.measurement
        return Contribution(
            step=self.step,
            phase_start=self.phase_start,
            thinning=self.thinning,
            full=measured is not None and measured.level is Level.FULL,
            numbers={name: float(copy.numpy()) for name, copy in (self.numbers or {}).items()},
            parts=[
                (part.blocks, part.extrema.numpy(), part.sums.numpy())
                for part in (() if measured is None else measured.handovers)
            ],
            first_bad=[bad for m in self.seen_bad for bad in m.first_bad()],
        )
