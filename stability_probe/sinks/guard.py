"""Hands events to every sink, and keeps a sink that fails from hurting anything else."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from stability_probe.sinks import Event, Sink

FORGOTTEN_AFTER = 100  # events taken without failure before a sink counts as sound again


class GuardedSinks:
    """Several sinks as one that never raises.

    A sink that failed is tried again with the next event. Each start of a failure is kept in
    `failures` until it is taken; a sink that goes on failing is not reported again.
    """

    def __init__(self, sinks: Iterable[Sink], *, strict: bool = False) -> None:
        self._sinks = list(sinks)
        self._strict = strict
        self._failing: dict[int, int] = {}  # a sink that fails: events it took since then
        self._failures: list[tuple[str, Exception]] = []

    def add(self, make: Callable[[], Sink]) -> None:
        """Makes one more sink; a failure to make it is a failure like any other."""
        try:
            self._sinks.append(make())
        except Exception as error:
            self._failed(make, error)

    def emit(self, event: Event) -> None:
        """Gives every sink the event."""
        for sink in self._sinks:
            try:
                sink.emit(event)
            except Exception as error:
                self._failed(sink, error)
            else:
                self._worked(sink)

    def close(self) -> None:
        """Closes every sink."""
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:
                self._failed(sink, error)

    def take_failures(self) -> list[tuple[str, Exception]]:
        """The sinks' names and errors since the last call."""
        taken, self._failures = self._failures, []
        return taken

    def _worked(self, sink: object) -> None:
        """Forgets a failure after a while: on a nearly full disk a short event may still fit."""
        if id(sink) in self._failing:
            self._failing[id(sink)] += 1
            if self._failing[id(sink)] >= FORGOTTEN_AFTER:
                del self._failing[id(sink)]

    def _failed(self, sink: object, error: Exception) -> None:
        if self._strict:
            raise error
        if id(sink) not in self._failing:
            self._failures.append((type(sink).__name__, error))
        self._failing[id(sink)] = 0
