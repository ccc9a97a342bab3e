"""What a forward inside backward is: a computation of its own, or the same once more.

A reentrant checkpoint's first forward runs without gradients and is not recorded; its
recomputation builds the graph that backward goes through, and is. A non-reentrant checkpoint's
first forward is the one recorded, and its recomputation only restores saved tensors. The Python
stack tells them apart: a torch-wide switch for it does not exist, and saved-tensor hooks, which
would also tell, may be covered by others (offloading).
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

import torch

_FILE = torch.utils.checkpoint.__file__


class Recomputations:
    """Decides which forwards inside backward are recorded."""

    def __init__(self) -> None:
        # a reentrant checkpoint -> the backward that recomputed it first
        self._first: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def recorded(self) -> bool:
        """Whether the forward that begins now, inside backward, counts as a training forward.

        A second backward through a retained graph recomputes once more, and does not count.
        """
        frame = _innermost()
        if frame is None:
            return True  # another library's checkpoint, or a forward of its own
        if frame.f_code.co_name != "backward":
            return False  # saved tensors are restored
        task = torch._C._current_graph_task_id()
        return self._first.setdefault(frame.f_locals["ctx"], task) == task


def _innermost() -> FrameType | None:
    """The innermost frame of a checkpoint that recomputes."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == _FILE and code.co_name in ("backward", "unpack_hook"):
            return frame
        frame = frame.f_back
    return None
