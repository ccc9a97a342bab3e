"""Where in the model we are, and whether the capture may look.

Module hooks push and pop one `Frame` each on a stack of their thread. While the innermost
frame was admitted by the `admit` gate, a torch-function mode is on; everywhere else it is off,
because an active mode alone switches off PyTorch's native fast paths in evaluation and with
them changes numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from stability_probe.capture.recompute import Recomputations
from stability_probe.modes import take_out, unobserved


class Admission(Enum):
    """What the gate says of one forward of one module."""

    REFUSED = "refused"
    TRAIN = "train"
    EVAL_GRAD = "eval_grad"  # eval mode, yet gradients flow: LoRA and DPO loops train so


def admit(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    recomputations: Recomputations,
    *,
    outer: bool = False,
) -> Admission:
    """Decides whether a forward of `module` may be recorded; `outer` is the answer around it.

    A forward under tracing, vmap or functorch, one of fake tensors (a memory estimate, say), and
    an evaluation, are refused. So is whatever runs without gradients: `generate()` inside
    training, and the first forward of a reentrant checkpoint, whose recomputation is recorded.
    """
    if (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.is_inference_mode_enabled()
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    ):
        return Admission.REFUSED
    if not torch.is_grad_enabled():
        return Admission.REFUSED
    if torch._C._current_graph_task_id() != -1 and not recomputations.recorded():
        return Admission.REFUSED
    if module.training:
        return Admission.TRAIN
    flow = _gradients_flow(module, args, kwargs, outer=outer)
    return Admission.EVAL_GRAD if flow else Admission.REFUSED


def _gradients_flow(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, outer: bool
) -> bool:
    """Whether anything here requires a gradient: then no native fast path would be taken.

    A global hook is not given keywords. Without an argument to ask, gradients flow where they do
    around the module, unless it is one of torch's own, which alone have such a path.
    """
    values = (*args, *kwargs.values())
    if not values and outer and not type(module).__module__.startswith("torch.nn"):
        return True
    return any(isinstance(v, torch.Tensor) and v.requires_grad for v in values) or any(
        p.requires_grad for p in module.parameters()
    )


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One forward of one hooked module, from its pre-hook to its post-hook."""

    name: str
    module: nn.Module
    admission: Admission
    mode_before: bool  # whether the mode was on outside this frame
    input: torch.Tensor | None = None  # the caller's own: the first floating-point argument
    since: int = 0  # autograd's sequence number when the forward began

    @property
    def looking(self) -> bool:
        """Whether attention calls in here are recorded."""
        return self.admission is not Admission.REFUSED


class Scope(threading.local):
    """The stack of frames of the current thread, and the switch of the mode."""

    def __init__(self, mode: TorchFunctionMode) -> None:
        self.mode = mode
        self._recomputations = Recomputations()
        self.frames: list[Frame] = []
        self.mode_on = False
        self.muted = False

    def enter(
        self,
        name: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Frame:
        """Asks the gate and pushes a frame; call it from a forward pre-hook."""
        if any(frame.module is module for frame in self.frames):
            self.heal()  # its post-hook never ran: Ctrl-C skips even `always_call` hooks
        outer = bool(self.frames) and self.frames[-1].looking
        admission = Admission.REFUSED
        with unobserved():
            if not self.muted:
                admission = admit(module, args, kwargs, self._recomputations, outer=outer)
            tensors = (a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor))
            first = next((t for t in tensors if t.is_floating_point()), None)
        frame = Frame(name, module, admission, self.mode_on, first, _sequence_number())
        self.frames.append(frame)
        self._switch(frame.looking and not holds_compiled(module))
        return frame

    def leave(self, module: nn.Module) -> bool:
        """Pops the module's frame; False when there is none (refused before, or healed)."""
        if not self.frames or self.frames[-1].module is not module:
            return False
        self._switch(self.frames.pop().mode_before)
        return True

    def heal(self) -> None:
        """Drops whatever an interrupted forward left behind on this thread."""
        self.frames.clear()
        if self.mode_on:
            take_out(self.mode)
            self.mode_on = False

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Sees nothing of what runs inside: a kernel whose call is read as a whole."""
        muted, on = self.muted, self.mode_on
        self._switch(False)
        self.muted = True
        try:
            yield
        finally:
            self.muted = muted
            if on and self.frames:
                self._switch(self.frames[-1].looking)

    @property
    def path(self) -> tuple[Frame, ...]:
        """The frames from the outermost to the innermost."""
        return tuple(self.frames)

    @property
    def current(self) -> Frame | None:
        """The innermost frame; None where there is none, and inside `quiet`."""
        return self.frames[-1] if self.frames and not self.muted else None

    def _switch(self, on: bool) -> None:
        if on and not self.mode_on:
            self.mode.__enter__()  # type: ignore[no-untyped-call]
            self.mode_on = True
        elif self.mode_on and not on:
            take_out(self.mode)
            self.mode_on = False


def holds_compiled(module: nn.Module) -> bool:
    """Whether the module or a part of it runs compiled.

    A mode that is on when a compiled part begins would be a part of what it is compiled for.
    """
    return any(m._compiled_call_impl is not None or "_orig_mod" in m._modules
               for m in module.modules())  # fmt: skip


def _sequence_number() -> int:
    """The number that autograd gives to its next node on this thread."""
    return int(torch._C._autograd._get_sequence_nr())
