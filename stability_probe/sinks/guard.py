"""Hands events to every sink, and keeps a sink that fails from hurting anything else."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from stability_probe.sinks import Event, Sink


class GuardedSinks:
    """Several sinks as one that never raises.

    A sink that failed is tried again with the next event. Each start of a failure is kept in
    `failures` until it is taken; a sink that goes on failing is not reported again.
    """

    def __init__(self, sinks: Iterable[Sink], *, strict: bool = False) -> None:
        self._sinks = list(sinks)
        self._strict = strict
        self._failing: set[int] = set()
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
                self._failing.discard(id(sink))

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

    def _failed(self, sink: object, error: Exception) -> None:
        if self._strict:
            raise error
        if id(sink) not in self._failing:
            self._failing.add(id(sink))
            self._failures.append((type(sink).__name__, error))
