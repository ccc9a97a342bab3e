"""The operator that a compiled graph calls at each attention, and the seam it reports to.

The operator takes tensors and gives nothing back, so no gradient and no result depends on it.
What it does is decided when it runs and not when it is compiled: it looks for a live seam whose
model owns the call, and does nothing where there is none. So a plan may toggle, and a probe may
close, without a recompilation.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.fx import has_side_effect

from stability_probe.capture.functions import Seen
from stability_probe.capture.recompute import Recomputations
from stability_probe.capture.scope import Admission, Frame
from stability_probe.capture.sites import ROOT, named_modules


@dataclasses.dataclass(frozen=True, slots=True)
class Sighting:
    """What is known of an attention call when its graph is compiled; it travels as a string.

    Module and parameter names are relative to the module that was compiled: one graph serves
    every block of its kind, and `owner`, a parameter that the call depends on, tells which block
    runs it.
    """

    module: str  # the module that calls attention; "" is the compiled one itself
    parameter: str  # the owner's name; "" without an owner: a function was compiled
    roles: tuple[str, ...]  # of the tensors: owner, scale, mask (any number), or a field of Seen
    views: tuple[list[Any], ...]  # of each tensor: what to look at it through; name, arguments
    first: bool  # of the module's calls in one run of the graph
    seam: str
    gradients: bool  # were enabled where the call is made
    requires_grad: bool  # of the call's result
    causal: bool
    softcap: float | None
    dropout: float
    dtype: str
    heads: int | None
    pre_scaled: bool
    exact: bool


def written(sighting: Sighting) -> str:
    """The sighting as the operator takes it."""
    return json.dumps(dataclasses.asdict(sighting))


@functools.lru_cache(maxsize=4096)
def _read(text: str) -> Sighting:
    fields = json.loads(text)
    return Sighting(**{**fields, "roles": tuple(fields["roles"]), "views": tuple(fields["views"])})


class Taker(Protocol):
    """What takes the calls of compiled graphs in: the attachment."""

    @property
    def frame(self) -> Frame | None:
        """The innermost eager forward that is followed on this thread, if there is one."""

    def compiled_call(self, seen: Seen, *, first: bool) -> None:
        """A compiled graph made an attention call; `seen.path` holds the frame of its module."""

    def fault(self, frame: Frame | None, error: Exception) -> None:
        """Reading a call failed."""

    def pause(self) -> None:
        """A compiler begins to trace."""

    def resume(self) -> None:
        """It has ended."""


class ModelIndex:
    """Finds the module of a watched model that a compiled graph belongs to, by a parameter."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: dict[tuple[str, ...], nn.Module] = {}
        self._names: dict[int, str] = {}  # of the modules, by id
        self._owners: dict[int, list[tuple[str, weakref.ref[Tensor]]]] = {}  # by address
        self._strangers: set[int] = set()  # addresses that are no parameter of the model

    def refresh(self) -> None:
        """Looks again at the model at the next miss: modules and parameters may have moved."""
        self._strangers.clear()

    def find(self, owner: Tensor, parameter: str, module: str) -> tuple[str, nn.Module] | None:
        """(canonical name, module), or None when the owner is no parameter of this model."""
        address = owner.data_ptr()
        if address in self._strangers:
            return None
        for last_try in (False, True):
            for name, reference in self._owners.get(address, ()):
                tensor = reference()
                if tensor is None or tensor.data_ptr() != address:
                    continue
                if (root := _without_end(name, _parts(parameter))) is not None:
                    return self._module([*root, *_parts(module)])
            if not last_try:
                self._look()
        self._strangers.add(address)
        return None

    def _module(self, parts: list[str]) -> tuple[str, nn.Module]:
        """The module of that name, or the innermost one around it that exists."""
        for length in range(len(parts), -1, -1):
            if (found := self._modules.get(tuple(parts[:length]))) is not None:
                return self._names.get(id(found), ROOT), found
        return ROOT, self._model

    def _look(self) -> None:
        every = self._model.named_modules(remove_duplicate=False)
        self._modules = {tuple(_parts(name)): m for name, m in every}  # the wrapped comes last
        named = reversed(named_modules(self._model).items())
        self._names = {id(module): name for name, module in named}
        self._owners = {}
        for tensors in (self._model.named_parameters, self._model.named_buffers):
            for name, tensor in tensors(remove_duplicate=False):
                if tensor.device.type != "meta":
                    found = self._owners.setdefault(tensor.data_ptr(), [])
                    found.append((name, weakref.ref(tensor)))


_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "")


def _parts(name: str) -> list[str]:
    return [p for p in name.split(".") if p not in _WRAPPERS]


def _without_end(name: str, end: list[str]) -> list[str] | None:
    parts = _parts(name)
    return parts[: -len(end)] if end and parts[-len(end) :] == end else None


class CompiledSeam:
    """One watched model's side of the operator."""

    def __init__(self, taker: Taker, model: nn.Module) -> None:
        self.taker = taker
        self._index = ModelIndex(model)
        self._recomputations = Recomputations()

    def refresh(self) -> None:
        """Call it between steps."""
        self._index.refresh()

    def take(self, text: str, tensors: Sequence[Tensor], scale: float) -> None:
        """Reports a call if a module of this model made it."""
        frame = None
        try:
            sighting = _read(text)
            frame = self._frame(sighting, tensors)
            if frame is not None:
                looked = map(_through, tensors, sighting.views)
                roles = list(zip(sighting.roles, looked, strict=True))
                seen = _seen(sighting, frame, roles, scale)
                self.taker.compiled_call(seen, first=sighting.first)
        except Exception as error:
            self.taker.fault(frame, error)

    def _frame(self, sighting: Sighting, tensors: Sequence[Tensor]) -> Frame | None:
        if not sighting.parameter:
            return self.taker.frame  # a compiled function, called by an eager module
        owner = tensors[sighting.roles.index("owner")]
        found = self._index.find(owner, sighting.parameter, sighting.module)
        return None if found is None else Frame(*found, self._admit(sighting, found[1]), False)

    def _admit(self, sighting: Sighting, module: nn.Module) -> Admission:
        """As `scope.admit` decides for an eager forward; the graph knows of the gradients."""
        if not sighting.gradients:
            return Admission.REFUSED
        if torch._C._current_graph_task_id() != -1 and not self._recomputations.recorded():
            return Admission.REFUSED
        if module.training:
            return Admission.TRAIN
        return Admission.EVAL_GRAD if sighting.requires_grad else Admission.REFUSED


def _through(tensor: Tensor, views: list[Any]) -> Tensor:
    """A tensor looked at through views; a copy that lay between them may have to be made."""
    for name, args, kwargs in views:
        method = "reshape" if name == "view" else name
        tensor = tensor.mT if name == "mT" else getattr(tensor, method)(*args, **kwargs)
    return tensor


def _seen(sighting: Sighting, frame: Frame, roles: list[tuple[str, Tensor]], scale: float) -> Seen:
    masks = tuple(tensor.detach() for role, tensor in roles if role == "mask")
    one: dict[str, Any] = {r: t.detach() for r, t in roles if r not in ("mask", "owner")}
    if "k^T" in one:
        one["k"] = one.pop("k^T").mT
    if sighting.seam == "sdpa":  # under autocast the kernel ran in its output's dtype
        one |= {name: one[name].to(getattr(torch, sighting.dtype)) for name in "qkv"}
    return Seen(
        seam=sighting.seam,
        path=(frame,),
        masks=masks,
        causal=sighting.causal,
        softcap=sighting.softcap,
        dropout=sighting.dropout,
        dtype=getattr(torch, sighting.dtype),
        heads=sighting.heads,
        pre_scaled=sighting.pre_scaled,
        exact=sighting.exact,
        **{"scale": scale, **one},
    )


_LIVE: list[weakref.ref[CompiledSeam]] = []


def live() -> list[CompiledSeam]:
    """The seams of the probes that watch now."""
    return [seam for reference in _LIVE if (seam := reference()) is not None]


def connect(seam: CompiledSeam) -> None:
    """From now on the operator reports to the seam, too."""
    _LIVE[:] = [weakref.ref(s) for s in (*live(), seam)]


def disconnect(seam: CompiledSeam) -> None:
    """The operator does nothing for the seam any more, in whatever graph it is compiled."""
    _LIVE[:] = [weakref.ref(s) for s in live() if s is not seam]


def _observe(text: str, tensors: Sequence[Tensor], scale: float) -> None:
    seams = live()
    if seams and tensors:
        with torch.no_grad(), torch.autocast(tensors[0].device.type, enabled=False):
            for seam in seams:
                seam.take(text, tensors, scale)


def _define() -> Any:
    """Registers the operator; `flexible_layout`: it must not make a compiler copy its inputs."""
    library: Any = torch.library.Library("stability_probe", "DEF")  # type: ignore[no-untyped-call]
    tags = (torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe)
    library.define("attention(str sighting, Tensor[] tensors, float scale) -> ()", tags=tags)
    library.impl("attention", _observe, "CompositeExplicitAutograd")
    library.impl("attention", torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake("stability_probe::attention", lambda *_: None, lib=library)
    has_side_effect(torch.ops.stability_probe.attention.default)
    return library


_LIBRARY = _define()
OPERATOR = torch.ops.stability_probe.attention.default
