"""The modes of the current thread: torch's stacks of what sees or changes each operation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch.overrides import (  # type: ignore[attr-defined]
    TorchFunctionMode,
    _get_current_function_mode,
    _len_torch_function_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._python_dispatch import _disable_current_modes

_KEYS = torch._C._TorchDispatchModeKey
_TRACING = (_KEYS.FAKE, _KEYS.PROXY, _KEYS.FUNCTIONAL)


def unobserved() -> AbstractContextManager[None]:
    """Runs the probe's own operations outside the user's modes.

    A FLOP counter does not count them, a logging mode does not log them, and no mode changes
    them. Modes that are entered inside must be left inside. While a compiler traces, its modes
    are what makes a graph of the operations, and stay.
    """
    alone = _len_torch_function_stack() == 0 and torch._C._len_torch_dispatch_stack() == 0
    if alone or any(torch._C._get_dispatch_mode(key) is not None for key in _TRACING):
        return nullcontext()
    return _without_modes()


@contextmanager
def _without_modes() -> Iterator[None]:
    with ExitStack() as exits:
        functions = []
        while _len_torch_function_stack() > 0:
            functions.append(_pop_mode())  # type: ignore[no-untyped-call]
        for mode in functions:
            exits.callback(_push_mode, mode)
        if torch._C._len_torch_dispatch_stack() > 0:
            exits.enter_context(_disable_current_modes())
        yield


def take_out(mode: TorchFunctionMode) -> None:
    """Ends a torch-function mode wherever it is on the stack; the others stay, in order.

    A mode leaves the stack from its top, whatever lies there: a hook of the user that pushes a
    mode of its own, and pops it after ours, would otherwise lose it, or leave it on for good.
    """
    above = []
    while _len_torch_function_stack() > 0:
        top = _get_current_function_mode()  # type: ignore[no-untyped-call]
        _pop_mode()  # type: ignore[no-untyped-call]
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        _push_mode(other)  # type: ignore[no-untyped-call]
