"""Which modules of a model attend: the sites, by name, and what looks like one and is not seen."""

from __future__ import annotations

import sys
import threading

from torch import nn

from stability_probe.capture.scope import Frame, holds_compiled
from stability_probe.capture.site import Site
from stability_probe.capture.sites import ROOT, candidates, identity, named_modules
from stability_probe.records import SiteReport


class Registry:
    """The sites of one model, and the names of its modules while they are followed."""

    def __init__(self, model: nn.Module) -> None:
        self.sites: dict[str, Site] = {}
        self.names: dict[int, str] = {}  # of the modules that are followed, by identity
        self.candidates: frozenset[str] = frozenset()  # of the last `name_modules`
        self.ran: set[str] = set()  # modules whose forward began in training
        self.gates: set[str] = set()  # whose softmax was made of no q k^T
        self._model = model
        self._places: dict[str, int] = {}  # of the modules in the model, by name
        self._strangers: set[int] = set()  # modules outside the model, by identity
        self._graphs_before = _graphs_compiled()
        self._lock = threading.Lock()

    # Names

    def name_modules(self) -> None:
        """Names all modules, by their identity; one under two names has the first."""
        named = named_modules(self._model)
        self.names = {identity(module): name for name, module in reversed(named.items())}
        self._places = {name: place for place, name in enumerate(named)}
        self.candidates = frozenset(candidates(self._model))

    def name_of(self, module: nn.Module) -> str | None:
        """The name of a module that is followed."""
        return self.names.get(identity(module))

    def is_new_part(self, module: nn.Module) -> bool:
        """Whether a module without a name belongs to the model; asked once of each stranger."""
        key = identity(module)
        if key in self.names or key in self._strangers:
            return False
        self._strangers.add(key)
        return any(module is part for part in self._model.modules())

    # Sites

    def site_of(self, frame: Frame) -> Site:
        """The site at a frame's module, made where there is none yet."""
        site = self.sites.get(frame.name)
        if site is None:
            with self._lock:
                site = Site(frame.name, self._places.get(frame.name, len(self._places)))
                site = self.sites.setdefault(frame.name, site)
        if site.identity != identity(frame.module):
            site.adopt(self._original(frame))
        return site

    def _original(self, frame: Frame) -> nn.Module:
        """The model's own module, where a replica of it ran, which dies with its forward."""
        if not getattr(frame.module, "_is_replica", False):
            return frame.module
        return named_modules(self._model).get(frame.name, frame.module)

    # What is seen, and what is not

    def replaced(self) -> dict[str, tuple[str, str]]:
        """Sites whose module the model does not hold any more: {name: (old, new class)}.

        The new class is empty where nothing has taken the place.
        """
        now = named_modules(self._model)
        held = {id(module) for module in self._model.modules()}  # one module under two names
        return {
            site.name: (site.kind, type(now[site.name]).__name__ if site.name in now else "")
            for site in self.sites.values()
            if id(site.module()) not in held
        }

    def unseen(self) -> dict[str, str]:
        """Modules that look like attention, ran, and gave nothing: {name: class}.

        One whose forward never began is no blindness, except where a compiler hides forwards.
        """
        hidden = _graphs_compiled() > self._graphs_before or holds_compiled(self._model)
        return {name: kind for name, kind in self.silent().items() if hidden or name in self.ran}

    def silent(self) -> dict[str, str]:
        """Modules that look like attention and gave nothing: {name: class}."""
        sites = list(self.sites)
        return {
            name: type(module).__name__
            for name, module in candidates(self._model).items()
            if not any(same_branch(name, site) for site in sites)
        }

    def is_unseen_candidate(self, name: str) -> bool:
        """Whether a module looks like attention, and no site is at it, above it or below it."""
        return name in self.candidates and not any(same_branch(name, s) for s in self.sites)

    @property
    def may_be_compiled(self) -> bool:
        """Whether a compiled graph could hide forwards of the model."""
        return _graphs_compiled() > 0 or holds_compiled(self._model)

    def report(self, *, ran_at_all: bool) -> tuple[SiteReport, ...]:
        """The coverage table: every site, then every candidate that gave nothing."""
        seen = [site.report() for site in sorted(self.sites.values(), key=lambda s: s.index)]
        return (
            *seen,
            *(
                SiteReport(name, kind, reason=self._why_silent(name, ran_at_all=ran_at_all))
                for name, kind in self.silent().items()
            ),
        )

    def _why_silent(self, name: str, *, ran_at_all: bool) -> str:
        if name in self.gates:
            return "its softmax is of no product of queries and keys"
        if name in self.ran:
            return "gave no attention call"
        if self.may_be_compiled:
            return "no call seen: it may run in a graph that was compiled before watch()"
        return "its forward never ran" if ran_at_all else "no forward in training yet"


def same_branch(one: str, two: str) -> bool:
    """Whether one module lies inside the other, or they are the same."""
    if ROOT in (one, two):
        return True
    return one == two or one.startswith(f"{two}.") or two.startswith(f"{one}.")


def _graphs_compiled() -> int:
    """How many graphs torch.compile has made in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])
