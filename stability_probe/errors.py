"""What can go wrong, and what to do about it.

Each error says what was got, what is expected, and what to do next.
"""


class StabilityProbeError(Exception):
    """The base of every error this package raises on purpose."""


class NoAttentionError(StabilityProbeError, ValueError):
    """The model holds nothing that could be attention."""


class EvalModeError(StabilityProbeError, ValueError):
    """Every attention layer is in eval mode, where nothing would be recorded."""


class AlreadyWatchedError(StabilityProbeError, RuntimeError):
    """The model, or a part of it, is watched already."""


class ProbeClosedError(StabilityProbeError, RuntimeError):
    """The probe was closed."""


class LogDirectoryError(StabilityProbeError, OSError):
    """The log directory cannot be made or written."""


class RunNotFoundError(StabilityProbeError, FileNotFoundError):
    """There is no recorded run in the directory."""


class FrameError(StabilityProbeError, ValueError):
    """A DataFrame that cannot be read as a recorded run."""


class BackendError(StabilityProbeError, ValueError):
    """The backend asked for cannot take the statistics of a call."""


class ShapeError(StabilityProbeError, ValueError):
    """Tensor shapes, dtypes or devices that do not fit together."""
