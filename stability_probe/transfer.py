"""Small copies from a device to the host that never make the device wait."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


class HostCopy:
    """A tensor on its way to the host.

    On CUDA the copy goes to pinned memory on the current stream, marked by an event; nothing
    waits until `numpy` is called. Elsewhere it is there at once.
    """

    def __init__(self, tensor: Tensor) -> None:
        tensor = tensor.detach()
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensor.device))
        else:
            self._host = tensor.to("cpu", copy=True)

    @property
    def ready(self) -> bool:
        """Whether `numpy` would return at once."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def numpy(self) -> npt.NDArray[Any]:
        """The values, bfloat16 as float32; waits for the device where the copy is not done."""
        if self._event is not None:
            self._event.synchronize()
        host = self._host.float() if self._host.dtype == torch.bfloat16 else self._host
        values: npt.NDArray[Any] = host.numpy()
        return values
