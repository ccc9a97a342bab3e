"""The live connection to a model: finds its attention sites and reports their calls.

Until the first training forwards have shown where attention is called, every module is
followed through PyTorch's global module hooks. After that only the sites are hooked. A site
inside an `nn.TransformerEncoderLayer` stays on a global hook: a hook on the module itself
would switch off that layer's fast path in evaluation, and with it change numbers.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from stability_probe.capture.chunks import Calls
from stability_probe.capture.entries import look_for_entries, unwatch_entries, watch_entries
from stability_probe.capture.functions import AttentionMode
from stability_probe.capture.gradients import Gradients
from stability_probe.capture.graph import read_graph
from stability_probe.capture.hooks import BeginHook, EndHook, EnterHook, LeaveHook
from stability_probe.capture.late import WhenImported
from stability_probe.capture.layout import UnsupportedCallError
from stability_probe.capture.registry import Registry
from stability_probe.capture.scope import Admission, Frame
from stability_probe.capture.seen import Seen
from stability_probe.capture.shards import local_part, localized
from stability_probe.capture.site import Site, call_of
from stability_probe.capture.sites import (
    ROOT,
    identity,
)
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
        self.faults: list[tuple[str, str]] = []  # (layer, what happened), for the probe to drain
        self.step = 1
        self.forwards = 0  # of the watched model or its parts, admitted ones only
        self.forwards_in_eval = 0  # those of them whose modules are in eval mode
        self.refused_in_eval = 0
        self._model = model
        self._registry = Registry(model)
        self._receiver = receiver
        self._strict = strict
        self._mode = AttentionMode(self)
        self._gradients = Gradients(receiver, self.fault)
        self._handles: list[RemovableHandle] = []
        self._discovering = False
        self._forward = _Forward()
        self.compiled = compiled
        self._seam: CompiledSeam | None = None
        self._compiler = WhenImported("torch._dynamo", self._open_seam) if compiled else None
        self.discover()
        watch_entries(self._mode, self, model)

    # Hooks

    def discover(self) -> None:
        """Follows every module until `settle`, to find the sites."""
        self._unhook()
        self._registry.name_modules()
        self._discovering = True
        self._hook_globally()

    def settle(self) -> None:
        """Hooks the sites found so far, and only those."""
        self._unhook()
        self._discovering = False
        self._registry.names = {}
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
                self._registry.names[identity(module)] = site.name
                continue
            enter, leave = EnterHook(self, site.name), LeaveHook(self, site.name)
            self._handles += [
                module.register_forward_pre_hook(enter, with_kwargs=True),
                # before the user's hooks, as ours is the innermost scope
                module.register_forward_hook(leave, prepend=True, always_call=True),
            ]
        if self.sites and not eager and ROOT not in self._registry.ran:
            return  # the whole model is compiled: its graphs tell all
        if self._registry.names or self._is_shy(self._model):
            self._hook_globally()
        else:
            self._handles += [
                self._model.register_forward_pre_hook(BeginHook(self), prepend=True),
                self._model.register_forward_hook(EndHook(self), always_call=True),
            ]

    def _open_seam(self) -> None:
        """Gets ready for compiled graphs."""
        try:
            from stability_probe.capture import compiled as seam

            self._seam = seam.open_seam(self, self._model)
        except Exception as error:
            self.fault(None, error)

    def refresh(self) -> None:
        """Call it between steps."""
        if self._seam is not None:
            from stability_probe.capture import compiled as seam

            self._seam.refresh()
            seam.renew()

    @property
    def discovering(self) -> bool:
        """Whether every module is followed."""
        return self._discovering

    @property
    def followed(self) -> frozenset[int]:
        """The `id`s of the modules followed through global hooks, the model's own among them."""
        return frozenset(self._registry.names) | {identity(self._model)}

    def close(self) -> None:
        """Removes all hooks and modes. Safe to call twice."""
        self._unhook()
        if self._compiler is not None:
            self._compiler.cancel()
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
        if self._discovering and self._forward.open and self._registry.is_new_part(module):
            self._registry.name_modules()  # it was put in place during this forward
        if (name := self._registry.name_of(module)) is not None:
            self.enter(name, module, args, {})

    def _global_leave(self, module: nn.Module, args: object, output: object) -> None:
        if torch.compiler.is_compiling():
            return
        if name := self._registry.name_of(module):
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
                self._registry.ran.add(name)
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
        return self._discovering and self._registry.is_unseen_candidate(name)

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
        if frame.name not in self.sites and not seen.descends:
            self._registry.gates.add(frame.name)
            return None  # may be a router; `values` decides
        site = self._registry.site_of(frame)
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
            self._registry.site_of(path[-1]).plain_softmax = True  # from its next forward on

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

    def _disable(self, site: Site, why: str) -> None:
        site.disabled = why
        self.faults.append((site.name, why))

    # What is seen, and what is not

    @property
    def sites(self) -> dict[str, Site]:
        """The sites found so far, by name."""
        return self._registry.sites

    def replaced(self) -> dict[str, tuple[str, str]]:
        """Sites whose module the model does not hold any more: {name: (old, new class)}."""
        return self._registry.replaced()

    def unseen(self) -> dict[str, str]:
        """Modules that look like attention, ran, and gave nothing: {name: class}."""
        return self._registry.unseen()

    @property
    def gates(self) -> frozenset[str]:
        """Modules that made a softmax of something else than q k^T: routers, samplers, gates."""
        return frozenset(self._registry.gates)

    @property
    def may_be_compiled(self) -> bool:
        """Whether a compiled graph could hide forwards of the model."""
        return self._registry.may_be_compiled

    def report(self) -> tuple[SiteReport, ...]:
        """The coverage table: every site, then every candidate that gave nothing."""
        return self._registry.report(ran_at_all=self.forwards > 0)


class _Forward(threading.local):
    """One thread's forward of the watched model: whether it is open, and its calls so far."""

    def __init__(self) -> None:
        self.open = False
        self.calls = Calls()
