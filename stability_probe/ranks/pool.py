"""Pools measured steps over ranks without ever holding up the training.

At the end of each step of the schedule, which is the same on every rank, a rank starts one
pooled reduction and goes on. The result is taken at a later step. Whatever goes wrong (a rank
that is gone, too slow, or at another step) ends the pooling for good: the steps that wait become
this rank's own, and one alert says why.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

from stability_probe.meter import Measurement
from stability_probe.plan import Plan
from stability_probe.ranks.channel import Pending
from stability_probe.ranks.layout import Hello, Layout
from stability_probe.ranks.meeting import Meeting, Met, is_one_of_many
from stability_probe.ranks.packing import pack, unpack
from stability_probe.ranks.queued import Queued, Ticket
from stability_probe.ranks.reduced import Reduced
from stability_probe.ranks.schedule import LAG, Schedule
from stability_probe.records import Alert, Level, Origin, Severity, State
from stability_probe.transfer import HostCopy

LONELY_STEPS, LONELY_SECONDS = 20, 3.0  # after both, or a minute, a missing rank is told
CLOSE_SECONDS = 10.0  # how long the end of a run waits for the last pooled steps
REMEMBERED = 256  # steps that may end between agreeing on the first pooled step and hearing of it


class RankPool:
    """One probe's part in pooling. In a run of one process it does nothing.

    Attributes:
        met: what the ranks agreed on, once they have met and while they pool.
    """

    def __init__(self, plan: Plan, *, enabled: bool = True) -> None:
        """Pool by this plan, the same on every rank, or not at all."""
        self._plan = plan
        self._meeting: Meeting | None = None
        self._over = not enabled  # never (again)
        self._told_lonely = False
        self._alerts: list[Alert] = []
        self._strangers: set[str] = set()  # layers that have no place in the layout, and are told
        self._ended: deque[int] = deque(maxlen=REMEMBERED)
        self.met: Met | None = None
        self._layout: Layout | None = None
        self._schedule = Schedule(plan, 0, 1)
        self._due = False  # whether the step that is under way is pooled
        self._bad: list[Measurement] = []
        self._queue: deque[Queued] = deque()
        self._sent: deque[tuple[Queued, Pending]] = deque()

    # What the probe asks

    @property
    def layout(self) -> Layout | None:
        """The layers of all ranks, once they have met; also after pooling has ended."""
        return self._layout

    def level(self, step: int) -> Level | None:
        """What to measure at the next step, `step`; None where this rank decides alone."""
        level = None if self.met is None else self._schedule.level(step)
        self._due = level is not None and level.whole
        return level

    @property
    def pooling(self) -> bool:
        """Whether the ranks have met and still pool."""
        return self.met is not None

    @property
    def due(self) -> bool:
        """Whether the step that is under way is pooled."""
        return self._due

    def take_alerts(self) -> list[Alert]:
        """What is to be told since the last call."""
        taken, self._alerts = self._alerts, []
        return taken

    def end_step(
        self,
        step: int,
        measurement: Measurement,
        numbers: Mapping[str, HostCopy],
        *,
        phase_start: int,
        thinning: int,
    ) -> Ticket | None:
        """Ends a step; never waits. A ticket where its record is to come from all ranks.

        Args:
            step: the step.
            measurement: this rank's.
            numbers: loss and so on.
            phase_start: first step of the newest phase that this rank knows of.
            thinning: the code of how far this rank would thin the plan; that of rank 0 counts.
        """
        if self.met is None:
            return None
        if measurement.bad:
            self._bad.append(measurement)
        self._note_strangers(step, self.met.layout, measurement)
        ticket = Ticket() if self._due else None
        if ticket is not None:
            thinning = thinning if self.met.rank == 0 else 0
            self._send(step, phase_start, ticket, measurement, numbers, thinning=thinning)
        self._schedule.advance(step)
        self._advance()
        return ticket

    def look_for_others(self, step: int, hello: Callable[[], Hello | None]) -> None:
        """Between steps: begins to wait for the other ranks, or sees whether they have come.

        Args:
            step: the last step that ended.
            hello: says what this rank has to pool; None while that is not clear yet.
        """
        if self._over or self.met is not None:
            return
        if self._meeting is None:
            said = hello() if is_one_of_many() else None
            if said is not None:
                self._meeting = Meeting(said, step)
            return
        self._meeting.step = step
        self._ended.append(step)
        if self._meeting.error is not None:
            self._give_up(step, _first_line(self._meeting.error))
        elif self._meeting.met is not None:
            self._begin(step, self._meeting.met)
        elif self._is_lonely():
            self._tell_lonely(step)

    def close(self, step: int) -> None:
        """Sends what is left, waits a bounded time for the last results, and disconnects."""
        until = time.monotonic() + CLOSE_SECONDS
        if self.met is not None:
            self._advance(force=True)
        while self._sent and time.monotonic() < until:
            time.sleep(0.002)
            self._advance(force=True)
        if self._sent:
            self._give_up(step, f"a rank did not end its last steps within {CLOSE_SECONDS:.0f} s")
        if self._meeting is not None:
            if self._is_lonely(at_end=True):
                self._tell_lonely(step)
            self._meeting.close()
            unused = None if self._over or self.met is not None else self._meeting.met
            if unused is not None:
                unused.channel.close()
        if self.met is not None:
            self.met.channel.close()
        self._over, self.met, self._due = True, None, False

    # Inside

    def _begin(self, step: int, met: Met) -> None:
        """The ranks have met: pool from the agreed step on, also those that ended meanwhile."""
        self.met, self._layout = met, met.layout
        self._schedule = Schedule(self._plan, met.first, met.layout.phase_start)
        for name, why in met.layout.left_out:
            self._tell(step, f"{name} is not pooled over ranks: {why}.", layer=name)
        if self._told_lonely:
            self._tell(
                step, f"All {met.world} ranks watch; records are pooled.", state=State.RESOLVED
            )
        if len(self._ended) == REMEMBERED and self._ended[0] > met.first:
            self._give_up(step, "this rank heard too late of the first pooled step")
        for ended in self._ended:
            if self._schedule.due(ended) and self.met is not None:
                self._send(ended, met.layout.phase_start, Ticket(), None, {})
            self._schedule.advance(ended)
        self._advance()

    def _note_strangers(self, step: int, layout: Layout, measurement: Measurement) -> None:
        """Tells of layers that came, or changed their heads, after the ranks had met."""
        left_out = {name for name, _ in layout.left_out}
        for block in (b for part in measurement.handovers for b in part.blocks):
            name = block.layer
            if layout.place(block) is None and name not in left_out | self._strangers:
                self._strangers.add(name)
                why = "it was not there, or had other heads, when the ranks met"
                self._tell(step, f"{name} is not pooled over ranks: {why}.", layer=name)

    def _send(
        self,
        step: int,
        phase_start: int,
        ticket: Ticket,
        measurement: Measurement | None,
        numbers: Mapping[str, HostCopy],
        *,
        thinning: int = 0,
    ) -> None:
        bad, self._bad = tuple(self._bad), []
        seen = bad if measurement is None or measurement.bad else (*bad, measurement)
        tick = self._schedule.tick + 1
        self._queue.append(
            Queued(step, tick, phase_start, thinning, ticket, measurement, numbers, seen)
        )

    def _advance(self, *, force: bool = False) -> None:
        """Sends what is on the host, and takes the results that have come."""
        met = self.met
        while met is not None and self._queue:
            queued = self._queue[0]
            if not (force or queued.ready or len(self._queue) > 1):
                break
            try:
                pending = met.channel.reduce(*pack(met.layout, queued.contribution()))
            except Exception as error:
                self._give_up(queued.step, f"sending failed ({_first_line(error)})")
                return
            self._queue.popleft()
            self._sent.append((queued, pending))
        while self.met is not None and self._sent and self._sent[0][1].done:
            self._take(self.met, *self._sent.popleft())
        oldest = self._sent[0][0] if self._sent else self._queue[0] if self._queue else None
        if self.met is not None and oldest and oldest.tick <= self._schedule.tick - LAG + 1:
            self._give_up(oldest.step, f"a rank is more than {LAG} steps behind")

    def _take(self, met: Met, queued: Queued, pending: Pending) -> None:
        step, ticket = queued.step, queued.ticket
        try:
            merged = unpack(met.layout, *pending.result())
        except Exception as error:  # gloo raises what its transport gives it
            ticket.give(None)
            self._give_up(step, f"a rank is gone ({_first_line(error)})")
            return
        first, last = merged.steps
        if first != last:
            ticket.give(None)
            self._give_up(step, f"ranks are at different steps ({first} and {last})")
            return
        reduced = Reduced.of(met.layout, merged)
        self._schedule.hear(queued.tick, reduced)
        ticket.give(reduced)

    def _give_up(self, step: int, why: str) -> None:
        """For good: ranks that disagree once cannot know what the others think."""
        for queued, _ in self._sent:
            queued.ticket.give(None)
        for queued in self._queue:
            queued.ticket.give(None)
        if self.met is not None and not self._sent:
            self.met.channel.close()
        self._queue.clear()
        self._sent.clear()
        self._bad.clear()
        self._over, self.met, self._due = True, None, False
        self._tell(step, f"Records are not pooled over ranks any more: {why}. They are now this "
                   "rank's own.")  # fmt: skip

    def _is_lonely(self, *, at_end: bool = False) -> bool:
        meeting = self._meeting
        if meeting is None or self._told_lonely or self._over or meeting.here >= meeting.world:
            return False
        waited = time.monotonic() - meeting.began
        many = len(self._ended) >= LONELY_STEPS
        return waited > 60 or (many and (waited > LONELY_SECONDS or at_end))

    def _tell_lonely(self, step: int) -> None:
        meeting = self._meeting
        assert meeting is not None
        self._told_lonely = True
        self._tell(
            step,
            f"{meeting.here} of {meeting.world} ranks watch and step; records are this rank's "
            "only.",
            "Call watch() and probe.step() on every rank: only rank 0 writes. Or pass pool=False.",
        )

    def _tell(
        self,
        step: int,
        message: str,
        remedy: str = "",
        layer: str | None = None,
        state: State = State.FIRING,
    ) -> None:
        self._alerts.append(
            Alert(
                step=step,
                rule="blind",
                severity=Severity.WARNING,
                state=state,
                layer=layer,
                message=message,
                remedies=(remedy,) if remedy else (),
                origin=Origin.OPERATIONAL,
            )
        )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
