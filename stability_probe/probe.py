"""The live probe: composes capture, meter, monitor and sinks around a training loop."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from stability_probe.alerts.rule import Rule
from stability_probe.capture import attach
from stability_probe.course import Course
from stability_probe.errors import ProbeClosedError
from stability_probe.header import run_header
from stability_probe.lookout import Lookout
from stability_probe.meter import Meter
from stability_probe.modes import unobserved
from stability_probe.monitor import Monitor
from stability_probe.outputs import board, own_rank, own_sinks
from stability_probe.plan import Plan
from stability_probe.ranks.pool import RankPool
from stability_probe.records import (
    Alert,
    LayerInfo,
    Level,
    Origin,
    Severity,
    SiteReport,
    State,
    StepRecord,
    StepScalars,
)
from stability_probe.roster import hello, layers_here, layers_of
from stability_probe.sinks import Sink
from stability_probe.sinks.guard import GuardedSinks
from stability_probe.stats.backend import Backend
from stability_probe.updates import Updates
from stability_probe.views.coverage import coverage_text
from stability_probe.waiting import (
    Scalar,
    WaitingStep,
    copied,
    is_trouble,
    learning_rate,
    numbers_of,
)

if TYPE_CHECKING:
    import pandas as pd

KEPT_RECORDS = 1000  # in memory, where there is no run directory
_LOG = logging.getLogger("stability_probe")


class Probe:
    """Watches one model while it trains. Made by `watch`; ends with `close`, or as a context."""

    def __init__(
        self,
        model: nn.Module,
        logdir: str | Path | None = None,
        *,
        plan: Plan | None = None,
        rules: Sequence[Rule] | None = None,
        sinks: Iterable[Sink] = (),
        on_alert: Callable[[Alert], object] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        strict: bool = False,
        allow_eval: bool = False,
        pool: bool = True,
        compiled: bool = True,
        backend: Backend = "auto",
    ) -> None:
        self._rank = own_rank()
        self._writes = self._rank == 0 or not pool
        self.logdir = Path(logdir) if logdir is not None and self._writes else None
        self._plan, self._created = plan or Plan(), time.time()
        self._pool = RankPool(self._plan, enabled=pool)
        self._monitor = Monitor(rules)
        self._on_alert, self._optimizer, self._strict = on_alert, optimizer, strict
        self._course = Course(self._plan)
        self._meter = Meter(self._course.stopwatch, backend)
        self._attachment = attach(
            model, self._meter, strict=strict, allow_eval=allow_eval, compiled=compiled
        )
        try:
            header = run_header((), self._plan, created=self._created)
            own = own_sinks(self.logdir, header, rank=self._rank, writes=self._writes)
            self._sinks = GuardedSinks([*own, *sinks], strict=strict)
        except BaseException:
            self._attachment.close()
            raise
        self._updates = Updates(optimizer)
        self._lookout = Lookout(self._attachment, allow_eval=allow_eval)
        self._on_cpu = not any(p.device.type == "cuda" for p in model.parameters())
        self._alerts: list[Alert] = []
        self._kept: deque[StepRecord] = deque(maxlen=KEPT_RECORDS)
        self._waiting: deque[WaitingStep] = deque()
        self._step = 0  # the last step that was ended
        self._ended = 0  # how many were
        self._jump = 1  # from the step before it to the last one: a loop may count in tens
        self._phase = ""
        self._escalate = 0  # so many measured steps more get every statistic
        self._announced: tuple[LayerInfo, ...] = ()
        self._closed = False

    # The loop's side

    def step(
        self,
        loss: Scalar | None = None,
        *,
        grad_norm: Scalar | None = None,
        eval_loss: Scalar | None = None,
        step: int | None = None,
        skipped: bool = False,
    ) -> None:
        """Ends an optimizer step: call it once after each `optimizer.step()`.

        Args:
            loss: the step's training loss, in nats where rules are to judge it; a float or a
                tensor of one element, on any device. Optional, and so is all that follows.
            grad_norm: the norm of the gradients before clipping.
            eval_loss: the loss on a fixed evaluation batch, at the steps that have one; the
                rules prefer it to the training loss.
            step: the number of this step, where the loop counts itself; else one more than the
                last, the first being 1.
            skipped: the optimizer did not update (GradScaler found an overflow). Where `watch`
                was given the optimizer, it sees this by itself.

        Raises:
            ProbeClosedError: after `close`. Nothing else: a fault becomes an alert.
        """
        if self._closed:
            raise ProbeClosedError(
                "got a step for a probe that is closed; expected one that watches. Call "
                "stability_probe.watch(model, ...) again, or move the call inside the `with`."
            )
        try:
            now = self._step + 1 if step is None else int(step)
            given = {"loss": loss, "grad_norm": grad_norm, "eval_loss": eval_loss}
            level = self._meter.level
            with self._course.stopwatch.running():
                numbers = numbers_of(given, self._fault)
                with unobserved():
                    self._end_step(now, numbers, skipped)
            self._course.end_step(level)
        except Exception as error:
            self._fault("ending the step", error)

    def mark(self, phase: str) -> None:
        """Begins a phase with the next step: baselines start again, and measuring is dense.

        Args:
            phase: what changed, in a few words: "data mix B", "longer context".
        """
        self._phase = phase
        begun = self._meter.begun  # what some of a step's calls got, the others must get too
        self._course.mark(self._step + 1 + begun)
        if not begun:
            self._meter.level = self._level(self._step + 1)

    def nonfinite_flag(self) -> Tensor:
        """Device bool, 0-dim: whether a value or gradient of this step so far is not finite.

        Look at it before `optimizer.step()`; reading it is what waits for the device. Rows
        without any visible key count too, and gradients as a GradScaler has scaled them.
        """
        flag = self._meter.nonfinite_flag()
        return torch.zeros((), dtype=torch.bool) if flag is None else flag

    def latest(self, statistic: str) -> dict[str, Tensor]:
        """{layer: device tensor [heads]} of the last measured step.

        Raises:
            KeyError: the statistic is unknown, or was not measured at that step.
        """
        if statistic not in self._meter.latest:
            have = ", ".join(self._meter.latest) or "none yet: no measured step has ended"
            raise KeyError(
                f"got statistic {statistic!r}; expected one of the last measured step: {have}. "
                "Statistics outside the default set are measured at fewer steps; see Plan."
            )
        return dict(self._meter.latest[statistic])

    # The reader's side

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """Every alert so far, oldest first."""
        return tuple(self._alerts)

    @property
    def coverage(self) -> tuple[SiteReport, ...]:
        """What is seen of the model, site by site, and what is not and why."""
        return self._attachment.report()

    def frame(self) -> pd.DataFrame:
        """The statistics, long: step, layer, head, one column a statistic.

        From the run directory where there is one, else of the last 1000 steps.
        """
        from stability_probe.runlog.frame import observations_frame
        from stability_probe.runlog.read import load

        if self.logdir is not None:
            return load(self.logdir).frame()
        return observations_frame(self._kept)

    # The end

    def close(self) -> None:
        """Removes every hook, writes what waits, closes the sinks. Again is harmless."""
        if self._closed:
            return
        self._closed = True
        self._attachment.close()
        self._updates.close()
        try:
            self._pool.close(self._step)
            self._tell_pool()
        except Exception as error:
            self._fault("parting from the other ranks", error)
        try:
            self._flush(wait=True)
            self._emit_header()  # with what the coverage table has come to
        except Exception as error:
            self._fault("writing the last steps", error)
        self._sinks.close()
        self._sink_failures()

    def __enter__(self) -> Probe:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # Inside

    def _begin(self, first: int) -> None:
        """What must know the run's first step: a resumed run starts where it was."""
        self._course.mark(first)
        logdir = self.logdir
        if logdir is not None:
            self._sinks.add(lambda: board(logdir, first))

    def _end_step(self, now: int, numbers: dict[str, Scalar], skipped: bool) -> None:
        self._attachment.heal()
        if self._ended == 0:
            self._begin(now)
        self._ended += 1
        read_sentinel = self._on_cpu or is_trouble(numbers)
        due = self._pool.due
        measurement = self._meter.drain(now, read_sentinel=read_sentinel, for_ranks=due)
        scalars = StepScalars(
            step=now,
            learning_rate=learning_rate(self._optimizer),
            skipped=skipped,
            phase=self._phase,
            wall_time=time.time(),
        )
        copies = {name: copied(value) for name, value in numbers.items()}
        ticket = self._pool.end_step(
            now,
            measurement,
            copies,
            phase_start=self._course.past.phase_start,
            thinning=self._course.asked_thinning,
        )
        update = self._updates.take()
        self._waiting.append(WaitingStep(scalars, copies, measurement, update, ticket))
        jump = now - self._step if self._ended > 1 else 1
        next_step = now + (jump if jump == self._jump and jump > 0 else 1)
        self._step, self._jump = now, jump
        self._escalate -= self._escalate > 0 and (due or not self._pool.pooling)
        try:
            self._tell()
        finally:  # whatever a rule or a sink does, the next step is not measured as this one was
            self._look_for_ranks()
            self._attachment.step = self._meter.turn = next_step
            self._meter.level = self._level(next_step)
        self._announce()

    def _tell(self) -> None:
        """What has come to be known by the end of a step."""
        self._flush(wait=False)
        for alert in self._lookout.after_step(self._step):
            self._raise(alert)
        if self._updates.error is not None:
            error, self._updates.error = self._updates.error, None
            self._fault("watching the optimizer", error)

    def _level(self, step: int) -> Level:
        """What is measured at the next step: all of it right after an alert."""
        agreed = self._pool.level(step)
        if agreed is not None and not agreed.whole:
            return agreed  # the ranks measure at the same steps, whatever one of them has seen
        level = agreed or self._course.level(step)
        return Level.FULL if self._escalate else level

    def _look_for_ranks(self) -> None:
        self._pool.look_for_others(
            self._step,
            lambda: hello(
                self._attachment,
                self._meter,
                self._plan,
                steps=self._ended,
                phase_start=self._course.past.phase_start,
            ),
        )
        self._tell_pool()

    def _tell_pool(self) -> None:
        for alert in self._pool.take_alerts():
            self._raise(alert)

    def _flush(self, *, wait: bool) -> None:
        """Passes on the steps whose numbers have arrived; at most one measured step waits."""
        measured = sum(1 for w in self._waiting if w.measurement.exact)
        while self._waiting and (wait or measured > 1 or self._waiting[0].ready):
            if self._waiting[0].awaits_ranks and not wait:
                break
            waiting = self._waiting.popleft()
            measured -= waiting.measurement.exact
            self._take(waiting.record())

    def _take(self, record: StepRecord) -> None:
        self._course.take(record, self._step + 1)
        self._sinks.emit(record)
        if self.logdir is None:
            self._kept.append(record)
        for alert in self._monitor.observe(record):
            self._raise(alert)
        self._sink_failures()

    def _raise(self, alert: Alert) -> None:
        self._alerts.append(alert)
        self._sinks.emit(alert)
        if alert.state is State.FIRING and alert.severity is not Severity.INFO:
            # where ranks pool, the others see the alert up to a measured step later or sooner
            self._escalate = 2 if self._pool.pooling else 1
        if self._on_alert is not None:
            try:
                self._on_alert(alert)
            except Exception as error:
                self._on_alert = None
                self._fault("calling on_alert (it is not called any more)", error)

    def _sink_failures(self) -> None:
        for name, error in self._sinks.take_failures():
            self._fault(f"writing to {name} (it is tried again at each step)", error)

    def _fault(self, doing: str, error: Exception) -> None:
        """Fails open: a fault of the probe is an alert, and training goes on."""
        if self._strict:
            raise error
        self._raise(
            Alert(
                step=self._step,
                rule="probe_fault",
                severity=Severity.WARNING,
                message=f"The probe failed while {doing}: {type(error).__name__}: {error}. "
                "Training is not touched.",
                remedies=("Please report it if it is not the disk or your own callback.",),
                origin=Origin.OPERATIONAL,
            )
        )

    def _announce(self) -> None:
        """Tells the sinks which layers there are, whenever that has changed."""
        layers = self._layers()
        if self._attachment.discovering or layers == self._announced:
            return
        self._announced = layers
        _LOG.info("coverage:\n%s", coverage_text(self._emit_header()))

    def _emit_header(self) -> tuple[SiteReport, ...]:
        """Writes the run's header; returns the coverage table that it holds."""
        coverage, layers = self.coverage, self._layers()
        self._sinks.emit(run_header(layers, self._plan, created=self._created, coverage=coverage))
        return coverage

    def _layers(self) -> tuple[LayerInfo, ...]:
        """Those of all ranks where they pool, else this rank's."""
        here, layout = layers_here(self._attachment, self._meter), self._pool.layout
        return here if layout is None else layers_of(layout, here)


def watch(
    model: nn.Module,
    logdir: str | Path | None = None,
    *,
    plan: Plan | None = None,
    rules: Sequence[Rule] | None = None,
    sinks: Iterable[Sink] = (),
    on_alert: Callable[[Alert], object] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    strict: bool = False,
    allow_eval: bool = False,
    pool: bool = True,
    compiled: bool = True,
    backend: Backend = "auto",
) -> Probe:
    """Starts to watch the attention layers of a model that trains.

    Losses, gradients, weights and random state stay bit-identical; evaluation is not touched.

    Args:
        model: the model, in train mode; before or after a wrapper such as DDP.
        logdir: where the run directory and the TensorBoard files go. None keeps the last 1000
            records in memory and writes nothing.
        plan: what is measured at which step; by default every step for 200 steps of a phase,
            then every 10.
        rules: what alerts are raised by; by default the stock rules.
        sinks: further takers of records and alerts, beside TensorBoard and the console.
        on_alert: called with every alert.
        optimizer: its learning rate is recorded with each step, and updates that it did not
            make (a GradScaler skipped them) are seen; call `step` after `optimizer.step()`.
        strict: faults of the probe raise instead of becoming alerts; for tests.
        allow_eval: accept attention that is all in eval mode (LoRA and DPO loops train so).
        pool: where this process is one of several ranks (torch.distributed), pool the measured
            steps over all of them, and write on rank 0 alone. Call `watch` on every rank; on
            some alone it does not hang, and their records are their own. False: each rank
            records and writes for itself; give each a directory of its own.
        compiled: also watch what torch.compile makes of the model after this call; False leaves
            compiled graphs as they are, and unwatched.
        backend: what takes the statistics: "torch", "triton" (CUDA; a site with calls that its
            kernel cannot read is an alert and is not watched), or "auto", which takes Triton
            where it can and PyTorch elsewhere.

    Raises:
        BackendError: there is no such backend.
        NoAttentionError, EvalModeError, AlreadyWatchedError: the model cannot be watched.
        LogDirectoryError: the directory cannot be made or written.
    """
    return Probe(
        model,
        logdir,
        plan=plan,
        rules=rules,
        sinks=sinks,
        on_alert=on_alert,
        optimizer=optimizer,
        strict=strict,
        allow_eval=allow_eval,
        pool=pool,
        compiled=compiled,
        backend=backend,
    )
