"""Which layers a probe has: for the run's header, and for the other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stability_probe.capture import Attachment
from stability_probe.meter import Meter
from stability_probe.plan import Plan
from stability_probe.ranks.layout import Hello, Layout, LocalLayer
from stability_probe.records import LayerInfo

SETTLED = 5  # steps after which a rank tells the others what it has seen, even if it is nothing


def layers_here(attachment: Attachment, meter: Meter) -> tuple[LayerInfo, ...]:
    """The layers that this rank has measured, in the order of their first forward."""
    sites = attachment.sites
    return tuple(
        LayerInfo(name, index, site.seen_heads, site.seam, site.kind)
        for name, index in meter.layers.items()
        if (site := sites.get(name.split("#")[0])) is not None
    )


def layers_of(layout: Layout, here: Sequence[LayerInfo]) -> tuple[LayerInfo, ...]:
    """The layers of all ranks, and after them those of this one that are not pooled."""
    everywhere = [
        LayerInfo(layer.name, index, layer.heads, layer.seam, layer.module)
        for index, layer in enumerate(layout.layers)
    ]
    pooled = {layer.name for layer in layout.layers}
    own = [replace(i, index=len(pooled) + i.index) for i in here if i.name not in pooled]
    return (*everywhere, *own)


def hello(
    attachment: Attachment, meter: Meter, plan: Plan, *, steps: int, phase_start: int
) -> Hello | None:
    """What a rank says to the others after so many steps; None while it looks for its layers."""
    if attachment.discovering and steps < SETTLED:
        return None
    seen = {info.name: info for info in layers_here(attachment, meter)}
    layers = [
        LocalLayer(b.layer, b.heads, b.offset, b.all_heads, info.seam, info.module)
        for b in meter.blocks
        if (info := seen.get(b.layer)) is not None
    ]
    return Hello.of(layers, plan, phase_start)
