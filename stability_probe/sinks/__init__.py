"""Where events go: the one protocol that every sink follows.

A sink shows or forwards what others measured and decided. It imports no rule, it takes every
event in the order in which the probe emits it, and it raises when it fails: the caller keeps
training alive, not the sink.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias, runtime_checkable

from stability_probe.records import Alert, RunHeader, StepRecord

Event: TypeAlias = StepRecord | Alert | RunHeader

__all__ = ["Event", "Sink"]


@runtime_checkable
class Sink(Protocol):
    """Something that takes events until it is closed."""

    def emit(self, event: Event) -> None:
        """Take one event. Raises whatever went wrong; a sink never hides its own failure."""
        ...

    def close(self) -> None:
        """Write what is left and let go of files and threads. A second call does nothing."""
        ...
