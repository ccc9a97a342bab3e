"""Watches kernels that a torch-function mode cannot read, at the functions that call them.

While at least one attachment is open, each known entry point that is imported is replaced by a
wrapper, under every name that holds it. The wrapper is shared by all attachments: it calls the
original with the mode off, then tells the attachment in whose forward the call was made. When the
last attachment closes, every name holds its original again.

What holds a function elsewhere, in a list, a closure or a partial, keeps calling the original.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from stability_probe.capture.adapters import (
    flash_attn,
    flex,
    huggingface,
    transformer_engine,
    varlen,
    xformers,
)
from stability_probe.capture.adapters.entry_point import EntryPoint
from stability_probe.capture.functions import AttentionMode, Listener, Seen
from stability_probe.capture.rebinding import (
    Held,
    Holder,
    defined,
    in_model,
    in_modules,
    original_of,
)
from stability_probe.capture.segments import UnsupportedCallError

ENTRY_POINTS: tuple[EntryPoint, ...] = (
    *flex.ENTRY_POINTS,
    *varlen.ENTRY_POINTS,
    *flash_attn.ENTRY_POINTS,
    *xformers.ENTRY_POINTS,
    *huggingface.ENTRY_POINTS,
    *transformer_engine.ENTRY_POINTS,
)


@dataclass(frozen=True, slots=True, eq=False)
class _Watcher:
    """One open attachment."""

    mode: AttentionMode
    listener: Listener


@dataclass(frozen=True, slots=True, eq=False)
class _Replaced:
    """A function, and what stands in its place."""

    original: Callable[..., Any]
    wrapper: Callable[..., Any]
    entry: EntryPoint


@dataclass(slots=True, eq=False)
class _Board:
    """Who watches and what is replaced; there is one for the whole process."""

    watchers: list[_Watcher] = field(default_factory=list)
    replaced: dict[int, _Replaced] = field(default_factory=dict)  # by the original's id
    found: set[EntryPoint] = field(default_factory=set)
    holders: list[Holder] = field(default_factory=list)  # which hold a wrapper now
    lock: Any = field(default_factory=threading.RLock)


_BOARD = _Board()


def watch_entries(mode: AttentionMode, listener: Listener, model: nn.Module) -> None:
    """Reports calls of known kernels to `listener`, made in forwards in which `mode` looks."""
    with _BOARD.lock:
        _BOARD.watchers.append(_Watcher(mode, listener))
        _take_in()
        _replace(in_model(model))


def look_for_entries() -> None:
    """Takes in what was imported since; costs a few look-ups where nothing was."""
    imported = (e for e in ENTRY_POINTS if e.module in sys.modules and e not in _BOARD.found)
    if any(defined(e.module, e.name) for e in imported):
        with _BOARD.lock:
            _take_in()


def unwatch_entries(mode: AttentionMode) -> None:
    """Ends `watch_entries`; the last one to end puts the originals back. Safe to call twice."""
    with _BOARD.lock:
        _BOARD.watchers[:] = [w for w in _BOARD.watchers if w.mode is not mode]
        if not _BOARD.watchers and _BOARD.replaced:
            _restore()


def entries_are_replaced() -> bool:
    """Whether wrappers are in place."""
    return bool(_BOARD.replaced)


def _take_in() -> None:
    """Replaces entry points that were not imported before."""
    new = False
    for entry in ENTRY_POINTS:
        holder = None if entry in _BOARD.found else defined(entry.module, entry.name)
        if holder is None:
            continue
        _BOARD.found.add(entry)
        function = holder.get()
        if not _is_wrapper(function):
            _wrap(function, entry)
            _replace([(holder, function)])
            new = True
    if new:
        _replace(in_modules())


def _replace(held: Iterable[Held]) -> None:
    """Puts wrappers in place of the known functions among `held`, and of forms of them."""
    for holder, function in held:
        known = _BOARD.replaced.get(id(function))
        if known is None:
            known = _BOARD.replaced.get(id(original_of(function)))
            if known is None or _is_wrapper(function):
                continue
            known = _wrap(function, known.entry)
        holder.put(known.wrapper)
        _BOARD.holders.append(holder)


def _restore() -> None:
    originals = {id(r.wrapper): r.original for r in _BOARD.replaced.values()}
    held = [(holder, holder.get()) for holder in _BOARD.holders]
    for holder, function in (*held, *in_modules()):  # names that were bound meanwhile too
        if id(function) in originals:
            holder.put(originals[id(function)])
    _BOARD.replaced.clear()
    _BOARD.found.clear()
    _BOARD.holders.clear()


def _is_wrapper(function: Any) -> bool:
    return any(r.wrapper is function for r in _BOARD.replaced.values())


def _wrap(original: Callable[..., Any], entry: EntryPoint) -> _Replaced:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        watcher = None if _is_traced() else _looking()
        if watcher is None:
            return original(*args, **kwargs)
        with watcher.mode.scope.quiet():
            result = original(*args, **kwargs)
            _report(watcher, entry, signature, (args, kwargs), result)
        return result

    replaced = _Replaced(original, watched, entry)
    _BOARD.replaced[id(original)] = replaced
    return replaced


def _is_traced() -> bool:
    """Whether a compiler or a functorch transform runs the call; it then gets the original."""
    if torch.compiler.is_compiling():
        return True
    return torch._C._functorch.peek_interpreter_stack() is not None


def _looking() -> _Watcher | None:
    """The attachment in whose forward this thread is, if it records there."""
    for watcher in _BOARD.watchers:
        frame = watcher.mode.scope.current
        if frame is not None and frame.looking:
            return watcher
    return None


def _report(
    watcher: _Watcher,
    entry: EntryPoint,
    signature: inspect.Signature,
    call: tuple[tuple[Any, ...], Mapping[str, Any]],
    result: Any,
) -> None:
    path = watcher.mode.scope.path
    try:
        with torch.no_grad(), torch.autocast(_device_type(result), enabled=False):
            try:
                seen = entry.read(_arguments(signature, *call), result)
            except UnsupportedCallError as unsupported:
                seen = Seen(seam=entry.name, path=path, unreadable=str(unsupported))
            watcher.listener.attention(replace(seen, path=path))
    except Exception as error:
        watcher.listener.fault(path[-1] if path else None, error)


def _arguments(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Every argument by name, with defaults; what went into **kwargs is among them."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            given |= given.pop(parameter.name)
    return given


def _device_type(result: Any) -> str:
    first = result if isinstance(result, Tensor) else result[0]
    return str(first.device.type)
