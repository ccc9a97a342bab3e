"""How much time the probe itself takes, without waiting for a device."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_REMEMBERED = 10_000  # pairs of events that the device has not reached yet


class Stopwatch:
    """Sums the time inside `running` until `take`. Several threads may use it.

    On a CPU that is wall time. On CUDA it is the device's own time between the first and the last
    of the probe's kernels, by events that are read once they have passed, or the host's where
    that is longer, and while a CUDA graph is captured; work that the host does while the device
    is busy with the user's is counted as if it held the device up.
    """

    def __init__(self, *, on: bool) -> None:
        """A stopwatch that is off costs nothing and takes no time."""
        self._on = on
        self._seconds = 0.0
        self._lock = threading.Lock()
        self._events: deque[tuple[float, torch.cuda.Event, torch.cuda.Event]] = deque(
            maxlen=_REMEMBERED
        )

    @contextmanager
    def running(self, device: torch.device | None = None) -> Iterator[None]:
        """Times a block whose kernels run on `device`."""
        if not self._on:
            yield
            return
        on_device = device is not None and device.type == "cuda" and not _is_capturing()
        before = _event(device) if on_device else None
        start = time.perf_counter()
        try:
            yield
        finally:
            host = time.perf_counter() - start
            with self._lock:
                if before is None:
                    self._seconds += host
                else:
                    self._events.append((host, before, _event(device)))

    def take(self) -> float:
        """Seconds since the last call, as far as they are known by now."""
        with self._lock:
            while self._events and self._events[0][2].query():  # type: ignore[no-untyped-call]
                host, before, after = self._events.popleft()
                on_device = before.elapsed_time(after) / 1000
                self._seconds += max(host, on_device)
            seconds, self._seconds = self._seconds, 0.0
        return seconds


def _is_capturing() -> bool:
    """Whether a CUDA graph is being captured: an event in it would not pass by itself."""
    return bool(torch.cuda.is_current_stream_capturing())


def _event(device: torch.device | None) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
