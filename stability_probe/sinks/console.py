"""Alerts on the console, through `logging`, readable in the middle of anybody's training log."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType

from stability_probe.records import Alert, RunHeader, Severity, State, StepRecord
from stability_probe.sinks import Event
from stability_probe.sinks.wording import place, plain

# Not logging.CRITICAL: that says the program cannot go on, and training does.
LEVELS: Mapping[Severity, int] = MappingProxyType(
    {
        Severity.INFO: logging.INFO,
        Severity.WARNING: logging.WARNING,
        Severity.CRITICAL: logging.ERROR,
    }
)

MAX_PER_STEP = 8  # of one severity; a fault in every layer of a deep model is one fault

MANY_SKIPPED = 0.1  # a share of the updates; a loss scale that settles stays far below


def alert_text(alert: Alert) -> str:
    """What to read when an alert fires: what, where, why, and what to do, a line each."""
    lines = [f"{alert.severity.upper()} at step {alert.step}: {alert.message or alert.rule}"]
    lines.append(f"  where: {place(alert)} (rule {alert.rule})")
    if alert.cause:
        lines.append(f"  cause: {alert.cause}")
    label = "  to do: "
    for remedy in alert.remedies:
        lines.append(label + remedy)
        label = " " * len(label)
    return plain("\n".join(lines))


def is_not_finite(record: StepRecord) -> bool:
    """Whether the loss, or a tensor of an attention layer, was not finite at the step."""
    loss = record.scalars.loss
    bad = loss is not None and loss - loss != 0
    return bad or any(not b.explained and b.step == record.step for b in record.scalars.first_bad)


def resolved_text(alert: Alert) -> str:
    """One quiet line: the episode is over."""
    return plain(f"resolved at step {alert.step}: {alert.rule}, {place(alert)}")


class ConsoleSink:
    """Logs alerts: info as INFO, warning as WARNING, critical as ERROR, a resolved one as INFO.

    Without any logging set up, Python itself prints warnings and worse to stderr. Where tqdm
    draws a bar, the bar makes way for the lines and comes back below them. `close` logs a
    summary.

    Not shown: the measurements of a step; a training log has enough numbers.
    """

    def __init__(self, logger: str = "stability_probe") -> None:
        """Log to the logger of this name."""
        self._logger = logging.getLogger(logger)
        self._step = 0
        self._updates, self._skipped = 0, 0
        self._not_finite: list[int] = [0, 0]  # how many steps, the first one
        self._counts: Counter[Severity] = Counter()
        self._firsts: dict[Severity, Alert] = {}
        self._firing: set[tuple[str, str | None]] = set()
        self._lines: Counter[tuple[int, Severity]] = Counter()
        self._closed = False

    def emit(self, event: Event) -> None:
        """Take one event."""
        match event:
            case RunHeader():
                heads = sum(layer.heads for layer in event.layers)
                watching = f"watching {len(event.layers)} attention layers, {heads} heads"
                self._log(logging.INFO, watching)
            case StepRecord():
                self._log_unprinted()
                self._step = event.step
                self._updates += 1
                self._skipped += event.scalars.skipped
                if is_not_finite(event):
                    count, first = self._not_finite
                    self._not_finite = [count + 1, first or event.step]
            case Alert():
                self._on_alert(event)

    def close(self) -> None:
        """Log how many alerts there were, the first of each severity, and what still fires.

        Skipped updates and steps that were not finite are counted once more: an alert stands for
        an episode. They are warnings where they are many.
        """
        if self._closed:
            return
        self._closed = True
        self._log_unprinted()
        worrying = self._counts[Severity.WARNING] + self._counts[Severity.CRITICAL]
        self._log(logging.WARNING if worrying else logging.INFO, self._summary())
        if self._skipped:
            many = self._skipped >= MANY_SKIPPED * self._updates
            counted = f"{self._skipped} of {self._updates} updates skipped"
            self._log(logging.WARNING if many else logging.INFO, counted)
        count, first = self._not_finite
        if count:
            counted = f"{count} of {self._updates} steps not finite (first at step {first})"
            self._log(logging.WARNING, counted)

    def _on_alert(self, alert: Alert) -> None:
        self._step = max(self._step, alert.step)
        episode = (alert.rule, alert.layer)
        if alert.state is State.RESOLVED:
            self._firing.discard(episode)
            self._log(logging.INFO, resolved_text(alert))
            return
        self._firing.add(episode)
        self._firsts.setdefault(alert.severity, alert)
        self._counts[alert.severity] += 1
        self._lines[alert.step, alert.severity] += 1
        if self._lines[alert.step, alert.severity] <= MAX_PER_STEP:
            self._log(LEVELS[alert.severity], alert_text(alert))

    def _log_unprinted(self) -> None:
        for (step, severity), count in self._lines.items():
            if count > MAX_PER_STEP:
                unprinted = f"and {count - MAX_PER_STEP} more {severity} alerts at step {step}"
                self._log(LEVELS[severity], unprinted)
        self._lines.clear()

    def _summary(self) -> str:
        total = self._counts.total()
        if not total:
            return f"no alerts in {self._step} steps"
        split = ", ".join(
            f"{self._counts[severity]} {severity} (first at step {first.step}: {first.rule})"
            for severity, first in sorted(self._firsts.items(), key=lambda item: -item[0].rank)
        )
        alerts = "1 alert" if total == 1 else f"{total} alerts"
        still = f"; {len(self._firing)} not resolved" if self._firing else ""
        return plain(f"{alerts} in {self._step} steps: {split}{still}")

    def _log(self, level: int, text: str) -> None:
        with _bars_cleared():
            self._logger.log(level, "%s", text)


def _bars_cleared() -> AbstractContextManager[object]:
    """A context in which tqdm's bars, if there are any, are off the terminal."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if tqdm is None:
        return nullcontext()
    cleared: AbstractContextManager[object] = tqdm.external_write_mode(file=sys.stderr)
    return cleared
