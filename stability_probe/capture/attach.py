"""Attaches to a model: finds its attention sites, reports their calls, and says what it misses.

Until the first training forwards have shown where attention is called, every module is
followed through PyTorch's global module hooks. After that only the sites are hooked. A site
inside an `nn.TransformerEncoderLayer` stays on a global hook: a hook on the module itself
would switch off that layer's fast path in evaluation, and with it change numbers.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_forward_pre_hooks,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from stability_probe.capture.chunks import Calls
from stability_probe.capture.entries import look_for_entries, unwatch_entries, watch_entries
from stability_probe.capture.functions import AttentionMode, Seen
from stability_probe.capture.gradients import Gradients
from stability_probe.capture.graph import read_graph
from stability_probe.capture.hooks import BeginHook, EndHook, EnterHook, LeaveHook, is_live
from stability_probe.capture.layout import UnsupportedCallError
from stability_probe.capture.scope import Admission, Frame, holds_compiled
from stability_probe.capture.shards import local_part, localized
from stability_probe.capture.site import Site, call_of
from stability_probe.capture.sites import (
    ROOT,
    attention_is_possible,
    candidates,
    identity,
    named_modules,
)
from stability_probe.errors import AlreadyWatchedError, EvalModeError, NoAttentionError
from stability_probe.modes import unobserved
from stability_probe.records import AttentionCall, SiteReport

if TYPE_CHECKING:
    from stability_probe.capture.observer import CompiledSeam


class Receiver(Protocol):
    """What takes the calls in: the meter."""

    @property
    def measuring(self) -> bool:
        """Whether exact statistics are wanted at this step, and not only the sentinel."""

    def call(self, call: AttentionCall) -> None:
        """One attention call. Its tensors must not be kept."""

    def values(self, call: AttentionCall, v: Tensor, output: Tensor) -> None:
        """The product of the attention weights of a call, given without its tensors, with v."""

    def gradient(self, layer: str, call_index: int, kind: str, gradient: Tensor) -> None:
        """A gradient of one of a call's tensors, in backward, on any thread; not to be kept."""


class Attachment:
    """The live connection to one model. `close` removes every trace of it."""

    def __init__(
        self, model: nn.Module, receiver: Receiver, *, strict: bool = False, compiled: bool = True
    ) -> None:
        self.sites: dict[str, Site] = {}
        self.faults: list[tuple[str, str]] = []  # (layer, what happened), for the probe to drain
        self.step = 1
        self.forwards = 0  # of the watched model or its parts, admitted ones only
        self.forwards_in_eval = 0  # those of them whose modules are in eval mode
        self.refused_in_eval = 0
        self._model = model
        self._receiver = receiver
        self._strict = strict
        self._mode = AttentionMode(self)
        self._gradients = Gradients(receiver, self.fault)
        self._handles: list[RemovableHandle] = []
        self._names: dict[int, str] = {}
        self._places: dict[str, int] = {}  # of the modules in the model, by name
        self._strangers: set[int] = set()  # modules outside the model, by identity
        self._ran: set[str] = set()  # modules whose forward began in training
        self._candidates: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._discovering = False
        self._forward = _Forward()
        self.compiled = compiled
        self._seam: CompiledSeam | None = None
        if compiled:
            from stability_probe.capture import compiled as seam  # imports the compiler: slow

            self._seam = seam.open_seam(self, model)
        self.discover()
        watch_entries(self._mode, self, model)

    # Hooks

    def discover(self) -> None:
        """Follows every module until `settle`, to find the sites."""
        self._unhook()
        self._name_modules()
        self._candidates = frozenset(candidates(self._model))
        self._discovering = True
        self._hook_globally()

    def settle(self) -> None:
        """Hooks the sites found so far, and only those."""
        self._unhook()
        self._discovering = False
        self._names = {}
        self._hook_sites()

    def pause(self) -> None:
        """Takes the hooks off while a compiler traces: it would compile again when they change."""
        self._unhook()

    def resume(self) -> None:
        """Puts them on again."""
        if self._discovering:
            self._hook_globally()
        else:
            self._hook_sites()

    def _hook_sites(self) -> None:
        eager = [site for site in self.sites.values() if not site.compiled]
        for site in eager:
            module = site.module()
            if module is None or site.disabled:
                continue
            if self._is_shy(module):
                self._names[identity(module)] = site.name
                continue
            enter, leave = EnterHook(self, site.name), LeaveHook(self, site.name)
            self._handles += [
                module.register_forward_pre_hook(enter, with_kwargs=True),
                # before the user's hooks, as ours is the innermost scope
                module.register_forward_hook(leave, prepend=True, always_call=True),
            ]
        if self.sites and not eager and ROOT not in self._ran:
            return  # the whole model is compiled: its graphs tell all
        if self._names or self._is_shy(self._model):
            self._hook_globally()
        else:
            self._handles += [
                self._model.register_forward_pre_hook(BeginHook(self), prepend=True),
                self._model.register_forward_hook(EndHook(self), always_call=True),
            ]

    def refresh(self) -> None:
        """Call it between steps."""
        if self._seam is not None:
            from stability_probe.capture import compiled as seam

            self._seam.refresh()
            seam.renew()

    def _name_modules(self) -> None:
        """The names of all modules, by their identity; one under two names has the first."""
        named = named_modules(self._model)
        self._names = {identity(module): name for name, module in reversed(named.items())}
        self._places = {name: place for place, name in enumerate(named)}

    @property
    def discovering(self) -> bool:
        """Whether every module is followed."""
        return self._discovering

    @property
    def followed(self) -> frozenset[int]:
        """The `id`s of the modules followed through global hooks, the model's own among them."""
        return frozenset(self._names) | {identity(self._model)}

    def close(self) -> None:
        """Removes all hooks and modes. Safe to call twice."""
        self._unhook()
        if self._seam is not None:
            from stability_probe.capture import compiled as seam

            seam.close_seam(self._seam)
            self._seam = None
        unwatch_entries(self._mode)
        self._gradients.close()
        self._mode.scope.heal()
        self._mode.clear()

    def heal(self) -> None:
        """Drops what an interrupted forward left behind; call it between steps."""
        if self._mode.scope.frames or self._mode.scope.mode_on:
            self._mode.scope.heal()
            self._mode.clear()

    def _hook_globally(self) -> None:
        self._handles += [
            register_module_forward_pre_hook(self._global_enter),
            register_module_forward_hook(self._global_leave, always_call=True),
        ]

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _is_part(self, module: nn.Module) -> bool:
        """Whether a module without a name belongs to the model; asked once of each stranger."""
        if identity(module) in self._strangers or not self._forward.open:
            return False
        self._strangers.add(identity(module))
        return any(module is part for part in self._model.modules())

    def _is_shy(self, module: nn.Module) -> bool:
        """Whether a hook on the module would switch off a fast path of nn.TransformerEncoder."""
        return any(
            module is part
            for layer in self._model.modules()
            if isinstance(layer, nn.TransformerEncoderLayer)
            for part in layer.modules()
        )

    # Boundary: what the hooks tell

    def _global_enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        if identity(module) == identity(self._model):
            self.begin()
        if self._discovering and identity(module) not in self._names and self._is_part(module):
            self._name_modules()  # it was put in place during this forward
        if (name := self._names.get(identity(module))) is not None:
            self.enter(name, module, args, {})

    def _global_leave(self, module: nn.Module, args: object, output: object) -> None:
        if torch.compiler.is_compiling():
            return
        if name := self._names.get(identity(module)):
            self.leave(name, module, output)
        if identity(module) == identity(self._model):
            self.end()

    def begin(self) -> None:
        """The watched model's forward begins: nothing can be open on this thread."""
        self.heal()
        look_for_entries()
        self._forward.calls.forget()
        self._forward.open = True

    def end(self) -> None:
        """The watched model's forward ended: later calls of its parts are calls of their own."""
        self._forward.open = False

    def enter(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """A hooked module's forward begins."""
        try:
            frame = self._mode.scope.enter(name, module, args, kwargs)
            site = self.sites.get(name)
            if frame.looking:
                self.forwards += 1
                self.forwards_in_eval += frame.admission is Admission.EVAL_GRAD
                self._ran.add(name)
            elif not module.training:
                self.refused_in_eval += 1
            if not self._forward.open:
                self._forward.calls.forget(name)
            if site is not None and not site.attends and frame.looking:
                with unobserved():
                    self._mode.label(frame, args, kwargs)
        except Exception as error:
            self.fault(None, error)

    def leave(self, name: str, module: nn.Module, output: object = None) -> None:
        """A hooked module's forward ended."""
        frame = self._mode.scope.current
        if frame is not None and frame.module is module and frame.looking and self._opaque(name):
            self._read_graph(frame, output)
        self._mode.scope.leave(module)
        self._mode.unlabel(module)
        if not self._mode.scope.frames:
            self._mode.clear()

    def _opaque(self, name: str) -> bool:
        """Whether a module should call attention, and none of its calls can be seen."""
        if (site := self.sites.get(name)) is not None:
            return site.seam == "graph" and not site.disabled
        unseen = self._discovering and name in self._candidates
        return unseen and not any(_same_branch(name, other) for other in self.sites)

    def _read_graph(self, frame: Frame, output: object) -> None:
        path = self._mode.scope.path
        try:
            with self._mode.scope.quiet(), unobserved(), torch.no_grad():
                for seen in read_graph(output, frame.since):
                    self.attention(dataclasses.replace(seen, seam="graph", path=path))
        except Exception as error:
            self.fault(frame, error)

    # What compiled graphs tell

    @property
    def frame(self) -> Frame | None:
        """The innermost eager forward that is followed on this thread."""
        return self._mode.scope.current

    def compiled_call(self, seen: Seen, *, first: bool) -> None:
        """A compiled graph made a call, the first of its module in this run of the graph or not.

        `seen.path` holds the frame of the module.
        """
        (frame,) = seen.path
        if not frame.looking:
            self.refused_in_eval += not frame.module.training
            return
        self.forwards += 1
        self.forwards_in_eval += frame.admission is Admission.EVAL_GRAD
        if first and not self._forward.open:
            self._forward.calls.forget(frame.name)
        self.attention(seen)
        if (site := self.sites.get(frame.name)) is not None:
            site.compiled = True  # no hook is needed there

    # Listener: what the mode tells

    def attention(self, seen: Seen) -> AttentionCall | None:
        """Records a call at its site; None when it is no attention, or not to be recorded."""
        if not seen.path:
            return None
        frame = seen.path[-1]
        site = self.sites.get(frame.name)
        if site is None:
            if not seen.descends:
                return None  # may be a router; `values` decides
            site = self._new_site(frame)
        if site.identity != identity(frame.module):
            site.adopt(self._original(frame))
        if site.disabled or not (seen.descends or site.plain_softmax):
            return None
        try:
            call = self._placed(site, frame, localized(seen))
        except UnsupportedCallError as unsupported:
            site.unreadable = site.unreadable or str(unsupported)
            return None  # the next call of the site may be another kind of call
        site.note(call, seen, step=self.step)
        if site.verification is None and self._receiver.measuring:
            site.verify(call, seen)
        self._receiver.call(call)
        graph = {**seen.graph, "grad_input": frame.input}
        self._gradients.watch(call.layer, call.call_index, graph)
        return dataclasses.replace(
            call, q_BHQD=None, k_BGKD=None, scores_BHQK=None, input_rms=None, input=None,
            masks=(), v_BGKE=None, output_BHQE=None, score_mod=None, mask_mod=None,
            sink_BHQ1=None, lse_BHQ=None,
        )  # fmt: skip

    def _placed(self, site: Site, frame: Frame, seen: Seen) -> AttentionCall:
        """The call with its index among those of this forward; a chunk has that of the first."""
        matrix = seen.q if seen.q is not None else seen.scores
        queries = 0 if matrix is None or matrix.is_nested else matrix.shape[-2]
        index, counted = self._forward.calls.place(site.name, seen.chunk, queries=queries)
        call = call_of(site, frame, seen, index=index, with_input=self._receiver.measuring)
        return dataclasses.replace(call, sequences=0) if counted else call

    def values(
        self, token: object | None, path: tuple[Frame, ...], v: Tensor, output: Tensor
    ) -> None:
        """Attention weights met their values."""
        if isinstance(token, AttentionCall):
            here, there = local_part(v), local_part(output)
            if here is not None and there is not None:
                self._receiver.values(token, here.detach(), there.detach())
            graph = {"grad_v": v, "grad_output": output}
            self._gradients.watch(token.layer, token.call_index, graph)
        elif path and path[-1].looking:
            self._site_of(path[-1]).plain_softmax = True  # from its next forward on

    def fault(self, frame: Frame | None, error: Exception) -> None:
        """Fails open: the site records nothing any more, and training goes on."""
        if self._strict:
            raise error
        what = f"{type(error).__name__}: {error}"
        site = self.sites.get(frame.name) if frame is not None else None
        if site is None:
            self.faults.append(("", what))
        elif not site.disabled:
            self._disable(site, what)

    # Sites

    def _site_of(self, frame: Frame) -> Site:
        return self.sites.get(frame.name) or self._new_site(frame)

    def _new_site(self, frame: Frame) -> Site:
        with self._lock:
            site = Site(frame.name, self._places.get(frame.name, len(self._places)))
            site.adopt(self._original(frame))
            return self.sites.setdefault(frame.name, site)

    def _original(self, frame: Frame) -> nn.Module:
        """The model's own module, where a replica of it ran, which dies with its forward."""
        if not getattr(frame.module, "_is_replica", False):
            return frame.module
        return named_modules(self._model).get(frame.name, frame.module)

    def _disable(self, site: Site, why: str) -> None:
        site.disabled = why
        self.faults.append((site.name, why))

    # What is seen, and what is not

    def replaced(self) -> dict[str, tuple[str, str]]:
        """Sites whose module the model does not hold any more: {name: (old, new class)}.

        The new class is empty where nothing has taken the place.
        """
        now = named_modules(self._model)
        twins = {id(module) for module in self._model.modules()}  # one module under two names
        return {
            site.name: (site.kind, type(now[site.name]).__name__ if site.name in now else "")
            for site in self.sites.values()
            if id(site.module()) not in twins
        }

    def unseen(self) -> dict[str, str]:
        """Modules that look like attention, ran, and gave nothing: {name: class}.

        One whose forward never began is no blindness, except where a compiler hides forwards.
        """
        return {
            name: kind
            for name, kind in self._silent().items()
            if name in self._ran or self.may_be_compiled
        }

    def _silent(self) -> dict[str, str]:
        """Modules that look like attention and gave nothing: {name: class}."""
        sites = list(self.sites)
        return {
            name: type(module).__name__
            for name, module in candidates(self._model).items()
            if not any(_same_branch(name, site) for site in sites)
        }

    def report(self) -> tuple[SiteReport, ...]:
        """The coverage table: every site, then every candidate that gave nothing."""
        seen = [site.report() for site in sorted(self.sites.values(), key=lambda s: s.index)]
        silent = self._silent().items()
        return (*seen, *(SiteReport(n, kind, reason=self._why_silent(n)) for n, kind in silent))

    @property
    def may_be_compiled(self) -> bool:
        """Whether a compiled graph could hide forwards of the model."""
        return _compiler_is_used() or holds_compiled(self._model)

    def _why_silent(self, name: str) -> str:
        if name in self._ran:
            return "gave no attention call"
        if self.may_be_compiled:
            return "no call seen: it may run in a graph that was compiled before watch()"
        return "its forward never ran" if self.forwards else "no forward in training yet"


class _Forward(threading.local):
    """One thread's forward of the watched model: whether it is open, and its calls so far."""

    def __init__(self) -> None:
        self.open = False
        self.calls = Calls()


def _compiler_is_used() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and dynamo.counters["stats"]["unique_graphs"] > 0


def _same_branch(one: str, two: str) -> bool:
    if ROOT in (one, two):
        return True
    return one == two or one.startswith(f"{two}.") or two.startswith(f"{one}.")


def _watched_at(model: nn.Module) -> str | None:
    """The name of a module of `model` that a live probe has hooked."""
    everywhere = _global_forward_pre_hooks.values()
    owners = [getattr(hook, "__self__", None) for hook in everywhere]
    followed = {i for o in owners if isinstance(o, Attachment) for i in o.followed}
    for name, module in named_modules(model).items():
        if identity(module) in followed or any(map(is_live, module._forward_pre_hooks.values())):
            return name
    return None


def attach(
    model: nn.Module,
    receiver: Receiver,
    *,
    strict: bool = False,
    allow_eval: bool = False,
    compiled: bool = True,
) -> Attachment:
    """Starts to report a model's attention calls to `receiver`.

    Args:
        model: the model that is trained, before or after DDP or FSDP wrapped it.
        receiver: takes the calls.
        strict: a fault while reading raises instead of disabling the site; for tests.
        allow_eval: accept a model whose attention is all in eval mode, as LoRA and DPO loops
            use it; calls are recorded there while gradients flow.
        compiled: also see attention in what torch.compile makes of the model from now on.

    Raises:
        AlreadyWatchedError: the model or a part of it is watched already.
        NoAttentionError: nothing in the model can be attention.
        EvalModeError: every attention layer is in eval mode.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"got {type(model).__name__}; expected a torch.nn.Module. "
            "Pass the model itself, not its output or its optimizer."
        )
    if (where := _watched_at(model)) is not None:
        raise AlreadyWatchedError(
            f"got a {type(model).__name__} that is watched already (at {where!r}); expected one "
            "probe a model. Close the first with probe.close(), or use it."
        )
    if not attention_is_possible(model):
        raise NoAttentionError(
            f"got a {type(model).__name__} in which no module is or calls attention "
            f"({sum(1 for _ in model.modules())} modules looked at); expected a model with at "
            "least one attention layer. Watch the part of your model that holds the transformer."
        )
    found = candidates(model)
    if found and not allow_eval and not any(m.training for m in found.values()):
        raise EvalModeError(
            f"got a {type(model).__name__} whose {len(found)} attention layers are all in eval "
            f"mode (first: {next(iter(found))!r}); expected train mode, because evaluation is not "
            "recorded. Call model.train() before watch(), or pass allow_eval=True if you train "
            "in eval mode."
        )
    return Attachment(model, receiver, strict=strict, compiled=compiled)
