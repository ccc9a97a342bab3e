"""TensorBoard: a few scalars and every alert, as event files in the run folder.

TensorBoard keeps 1,000 points a tag, drawn at random, so a log of every step loses the one step
that matters. Points are written one per cent of the run apart instead (about 800 in 100,000
steps), and each carries the extremum of all steps since the last one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event as EventProto
from tensorboard.compat.proto.event_pb2 import SessionLog
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR, Summary
from tensorboard.plugins.scalar.metadata import create_summary_metadata as scalar_metadata
from tensorboard.plugins.text.metadata import create_summary_metadata as text_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_tensor_proto

from stability_probe.errors import LogDirectoryError
from stability_probe.records import (
    Alert,
    FirstBad,
    LayerInfo,
    Observation,
    RunHeader,
    State,
    StepRecord,
)
from stability_probe.sinks import Event
from stability_probe.sinks.digest import digest, nonfinite
from stability_probe.sinks.markdown import alert_table
from stability_probe.sinks.tags import OVERVIEW, ScalarTag, layer_tags, overview_tag
from stability_probe.sinks.window import Window

POINTS_PER_RUN = 100  # a point is due after one part in so many of the run so far
FLUSH_SECONDS = 10.0

_LEVEL = overview_tag("alert_level")


class TensorBoardSink:
    """Writes what TensorBoard shows; at most 200 tags, whatever the model.

    `stability/...` is the overview, `stability.<statistic>/layer.<i>` the default statistics of a
    layer, `alerts/<severity>` the alerts as text. NaN is absent and is never written; non-finite
    trouble is a count. An alert writes a point at once, is flushed at once, and is in
    `alerts_total` for good.

    One writer a folder: TensorBoard's slow loader mixes up several writers in one folder, and
    purges the points of all of them at a restart.

    Not shown: single heads, and statistics outside the default set; the run directory has them.
    """

    def __init__(
        self,
        logdir: str | Path,
        *,
        start_step: int = 0,
        max_lag_s: float = 1200.0,
        alerts_total: int = 0,
        nonfinite_steps_total: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open a new event file in the folder.

        Args:
            logdir: The run folder itself, made where it is missing.
            start_step: The first step of this process. What earlier files hold from that step on
                is superseded. Give it from a run's first process on (0), since readers take the
                first such mark for the run's beginning and purge only at the later ones.
            max_lag_s: Seconds after which a step is written in any case.
            alerts_total: Alerts of the run before `start_step`, so that a resumed run counts on.
            nonfinite_steps_total: The same for steps with non-finite values.
            clock: Seconds, monotonic.

        Raises:
            LogDirectoryError: The folder cannot be made or written.
        """
        try:
            self._writer = EventFileWriter(str(logdir), flush_secs=FLUSH_SECONDS)
        except OSError as error:
            raise LogDirectoryError(
                f"cannot write TensorBoard files to {str(logdir)!r}: {error}. "
                "Expected a folder that can be made or written; choose another one."
            ) from error
        self._clock = clock
        self._max_lag_s = max_lag_s
        self._alerts_total = alerts_total
        self._nonfinite_total = nonfinite_steps_total
        self._window = Window()
        self._tags: dict[tuple[str, int], ScalarTag] = {}
        self._undescribed = {overview_tag(name): text for name, text in OVERVIEW.items()}
        self._step = start_step  # the latest step seen
        self._point_step: int | None = None
        self._point_time = clock()
        self._firing: dict[tuple[str, str | None], Alert] = {}
        self._tables: dict[str, tuple[int, tuple[Alert, ...]]] = {}
        self._known_bad: frozenset[FirstBad] = frozenset()
        start = EventProto(wall_time=time.time(), step=start_step)
        start.session_log.status = SessionLog.START
        self._writer.add_event(start)
        self._writer.flush()

    def emit(self, event: Event) -> None:
        """Take one event. Raises OSError when the file cannot be written."""
        match event:
            case RunHeader():
                self._plan(event.layers)
            case StepRecord():
                self._on_record(event)
            case Alert():
                self._on_alert(event)

    def close(self) -> None:
        """Write the last, unfinished window and close the file."""
        try:
            if self._window:
                self._write_point(time.time())
        finally:
            self._writer.close()

    def _plan(self, layers: tuple[LayerInfo, ...]) -> None:
        if layers and not self._tags:
            self._tags = layer_tags(layers)
            self._undescribed |= {tag.name: tag.description for tag in self._tags.values()}

    def _on_record(self, record: StepRecord) -> None:
        self._step = record.step
        if not self._tags:
            self._plan(tuple(_info(seen) for seen in record.observations))
        for tag, value, fold in digest(record, tags=self._tags):
            self._window.add(tag, value, fold=fold)
        self._nonfinite_total += nonfinite(record, known=self._known_bad)
        self._known_bad |= frozenset(record.scalars.first_bad)
        self._window.add(_LEVEL, self._level(), fold="max")
        if self._is_due(record):
            self._write_point(record.scalars.wall_time or time.time())

    def _on_alert(self, alert: Alert) -> None:
        episode = (alert.rule, alert.layer)
        if alert.state is State.FIRING:
            self._firing[episode] = alert
            self._alerts_total += 1
        else:
            self._firing.pop(episode, None)
        # An event that goes back in steps would make readers drop what came after it.
        self._step = max(self._step, alert.step)
        self._window.add(_LEVEL, self._level(), fold="max")
        self._write_point(time.time())
        self._write_text(alert)
        self._writer.flush()

    def _level(self) -> int:
        return max((alert.severity.rank + 1 for alert in self._firing.values()), default=0)

    def _is_due(self, record: StepRecord) -> bool:
        if self._clock() - self._point_time >= self._max_lag_s:
            return True
        if self._point_step is None or self._step < self._point_step:
            return record.measured
        gap = self._step - self._point_step
        return record.measured and gap >= self._step // POINTS_PER_RUN

    def _write_point(self, wall_time: float) -> None:
        values = self._window.drain() | {
            overview_tag("alerts_total"): self._alerts_total,
            overview_tag("nonfinite_steps_total"): self._nonfinite_total,
        }
        summary = Summary()
        for tag, value in values.items():
            written = summary.value.add(tag=tag, simple_value=value)
            # Readers keep the description that comes with a tag's first value.
            if (description := self._undescribed.pop(tag, None)) is not None:
                written.metadata.CopyFrom(scalar_metadata("", description))
                # Else the fast loader takes the value for an old one and drops the description.
                written.metadata.data_class = DATA_CLASS_SCALAR
        self._writer.add_event(EventProto(wall_time=wall_time, step=self._step, summary=summary))
        self._point_step, self._point_time = self._step, self._clock()

    def _write_text(self, alert: Alert) -> None:
        # Readers keep one value a tag and step, so alerts of one step share a growing table.
        tag = f"alerts/{alert.severity}"
        step, alerts = self._tables.get(tag, (self._step, ()))
        alerts = (*alerts, alert) if step == self._step else (alert,)
        self._tables[tag] = self._step, alerts
        summary = Summary()
        text = summary.value.add(tag=tag, metadata=text_metadata("", "Alerts, newest last."))
        text.tensor.CopyFrom(make_tensor_proto(alert_table(alerts).encode(errors="replace")))
        self._writer.add_event(EventProto(wall_time=time.time(), step=self._step, summary=summary))


def _info(seen: Observation) -> LayerInfo:
    return LayerInfo(name=seen.layer, index=seen.layer_index, heads=seen.heads)
