"""Which layers and heads there are on all ranks together: pure, the same on every rank."""

from __future__ import annotations

import itertools
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from stability_probe.handover import HeadBlock
from stability_probe.plan import Plan
from stability_probe.sentinel import KINDS
from stability_probe.stats.accumulators import MAXIMA, MINIMA, PEAK, SUMS

# What the packed arrays hold; ranks that run different versions must not merge them.
CONTENT = ",".join((*MAXIMA, "/", *MINIMA, "/", *PEAK, "/", *SUMS, "/", *KINDS))


class LayoutError(ValueError):
    """The ranks' records cannot be pooled; the message says why."""


@dataclass(frozen=True, slots=True)
class LocalLayer:
    """One layer as a rank sees it.

    Attributes:
        name: canonical name.
        heads: how many heads of it are on this rank.
        offset: number of the first of them; None where that is not known.
        all_heads: heads of the layer, over all ranks.
        seam: where it is seen.
        module: its class.
    """

    name: str
    heads: int
    offset: int | None
    all_heads: int
    seam: str = ""
    module: str = ""


@dataclass(frozen=True, slots=True)
class Hello:
    """What a rank says of itself before anything is pooled."""

    layers: tuple[LocalLayer, ...]
    plan: str  # what it would do differently is written differently
    phase_start: int
    content: str = CONTENT

    @classmethod
    def of(cls, layers: Sequence[LocalLayer], plan: Plan, phase_start: int) -> Hello:
        """For a rank that measures by this plan, in a phase that began at this step."""
        return cls(tuple(layers), repr(plan), phase_start)

    def encode(self) -> bytes:
        """As compressed JSON."""
        return zlib.compress(json.dumps(asdict(self)).encode())

    @classmethod
    def decode(cls, data: bytes) -> Hello:
        """The inverse of `encode`.

        Raises:
            LayoutError: another version of the package wrote it.
        """
        try:
            d = json.loads(zlib.decompress(data))
            layers = tuple(LocalLayer(**layer) for layer in d["layers"])
            return cls(layers, str(d["plan"]), int(d["phase_start"]), d["content"])
        except (zlib.error, ValueError, TypeError, KeyError) as error:
            raise LayoutError(f"a rank's layout cannot be read ({error!r})") from error


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer over all ranks; its heads are columns `start` to `start + heads`."""

    name: str
    heads: int
    start: int
    seam: str = ""
    module: str = ""


@dataclass(frozen=True)
class Layout:
    """The columns of a pooled record.

    Attributes:
        layers: in order.
        left_out: layers that some rank has and that cannot be pooled, and why.
        phase_start: the latest of the ranks.
    """

    layers: tuple[Layer, ...]
    left_out: tuple[tuple[str, str], ...] = ()
    phase_start: int = 1

    @cached_property
    def by_name(self) -> dict[str, Layer]:
        """The layers by name."""
        return {layer.name: layer for layer in self.layers}

    def place(self, block: HeadBlock) -> int | None:
        """The first column of a rank's heads of a layer; None where they have no place here."""
        layer = self.by_name.get(block.layer)
        if layer is None or block.offset is None or block.all_heads != layer.heads:
            return None
        return layer.start + block.offset

    @property
    def columns(self) -> int:
        """Heads of all layers."""
        return sum(layer.heads for layer in self.layers)


def unite(hellos: Sequence[Hello]) -> Layout:
    """The layout of ranks that said these things, in the order of their ranks.

    Layers are pooled by name: ranks that hold different layers (pipeline stages) add up.

    Raises:
        LayoutError: the ranks' plans or versions differ.
    """
    for what, seen in (
        ("plans", {h.plan for h in hellos}),
        ("versions of stability_probe", {h.content for h in hellos}),
    ):
        if len(seen) > 1:
            raise LayoutError(f"the ranks have different {what}; give all of them the same")
    by_name: dict[str, list[LocalLayer]] = {}
    for hello in hellos:
        for layer in hello.layers:
            by_name.setdefault(layer.name, []).append(layer)
    left_out = {name: why for name, seen in by_name.items() if (why := _objection(seen))}
    layers, start = [], 0
    for name in _ordered([[layer.name for layer in hello.layers] for hello in hellos]):
        if name not in left_out:
            one = by_name[name][0]
            layers.append(Layer(name, one.all_heads, start, one.seam, one.module))
            start += one.all_heads
    phase_start = max(hello.phase_start for hello in hellos)
    return Layout(tuple(layers), tuple(left_out.items()), phase_start)


def _objection(seen: Sequence[LocalLayer]) -> str:
    """Why the views of one layer do not fit together; empty where they do."""
    if any(layer.offset is None for layer in seen):
        one = next(layer for layer in seen if layer.offset is None)
        return (
            f"its module declares {one.all_heads} heads and a rank's calls show {one.heads}, "
            "and which ones these are is not known"
        )
    if len({layer.all_heads for layer in seen}) > 1:
        return f"ranks see {sorted({layer.all_heads for layer in seen})} heads"
    return ""


def _ordered(orders: Sequence[Sequence[str]]) -> list[str]:
    """All names: in the order of each rank where one order serves all, else rank after rank."""
    joined = list(dict.fromkeys(name for order in orders for name in order))
    by_number = sorted(joined, key=_natural)
    place = {name: i for i, name in enumerate(by_number)}
    serves = all(place[a] < place[b] for order in orders for a, b in itertools.pairwise(order))
    return by_number if serves else joined


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts layers.10 after layers.9."""
    return [(int(p), "") if p.isdigit() else (-1, p) for p in re.split(r"(\d+)", name)]
