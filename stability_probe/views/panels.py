"""One panel each: the alerts, the loss, the largest logit, the entropy ratio."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogFormatter

from stability_probe.records import Alert, Severity
from stability_probe.views import style
from stability_probe.views.series import Curve, Episode

NOT_FINITE = "not finite"
NO_LOSS = "no finite loss"
MISSING = "missing"
LAYER_LOGITS = "Largest attention logit, worst head of each layer (log scale)"
ALL_LOGITS = "Largest attention logit of all heads (log scale)"
HEAD_ENTROPY = "Attention entropy / ln(visible keys): 1 looks everywhere, 0 at a single key"
MEDIAN_ENTROPY = "Attention entropy / ln(visible keys), median head: 0 is collapse"
MAX_NAMED = 6  # lines; of more, only the three that end highest are named

LOSSES: Mapping[str, style.Colour] = MappingProxyType({"train": style.INK})
TWO_LOSSES: Mapping[str, style.Colour] = MappingProxyType(
    {"train": style.LIGHT, "evaluation": style.INK}
)
HEADS: Mapping[str, style.Colour] = MappingProxyType(
    {"median head": style.BLUE, "lowest head": style.PURPLE}
)


def alerts_panel(axes: Axes, found: Sequence[Episode], *, last: int) -> None:
    """A lane per severity: a triangle where an alert fired, a bar until it resolved.

    Args:
        axes: The panel.
        found: The alerts.
        last: The run's last step, to which the bars of unresolved alerts go.
    """
    style.dress(axes, "Alerts")
    axes.grid(visible=False)
    if not found:
        style.nothing(axes, "none")
        return
    lanes = [s for s in Severity if any(e.alert.severity is s for e in found)]
    for lane, severity in enumerate(lanes):
        here = [e for e in found if e.alert.severity is severity]
        colour = style.SEVERITY[severity]
        starts = [e.alert.step for e in here]
        ends = [last if e.end is None else e.end for e in here]
        axes.hlines([lane] * len(here), starts, ends, color=colour, linewidth=5, alpha=0.3)
        axes.plot(starts, [lane] * len(here), ">", color=colour, markersize=8, label=severity)
        rules = list(dict.fromkeys(e.alert.rule for e in here))
        style.beside(axes, min(starts), lane, ", ".join(rules[:3]) + " ..." * (len(rules) > 3))
    axes.set_ylim(-0.6, len(lanes) - 0.4)
    axes.set_yticks(range(len(lanes)), lanes)


def alert_lines(axes: Axes, found: Sequence[Episode]) -> None:
    """A thin line through a panel at each step where a warning or worse fired."""
    worst: dict[int, Severity] = {}
    for episode in sorted(found, key=lambda e: e.alert.severity.rank):
        if episode.alert.severity is not Severity.INFO:
            worst[episode.alert.step] = episode.alert.severity
    for step, severity in worst.items():
        axes.axvline(step, color=style.SEVERITY[severity], linewidth=1, label="alert", zorder=1)


def lead_marks(axes: Sequence[Axes], *, warned: Alert | None, diverged: int) -> None:
    """The first warning and the divergence of a run through all panels, the lead shaded."""
    for panel in axes:
        panel.axvline(diverged, color=style.INK, linewidth=1.2, label="diverged", zorder=2)
        if warned is not None:
            panel.axvline(warned.step, color=style.ORANGE, label="warned", zorder=2)
            if warned.step < diverged:
                panel.axvspan(warned.step, diverged, color=style.ORANGE, alpha=0.18, linewidth=0)
    style.flag(axes[0], diverged, f"loss diverges\nstep {diverged:,}", side="right")
    if warned is not None:
        style.flag(axes[0], warned.step, f"first warning\nstep {warned.step:,}", side="left")
        if (lead := diverged - warned.step) > 0:
            style.span(axes[0], warned.step, diverged, f"{lead:,} steps")


def loss_panel(
    axes: Axes,
    curves: Mapping[str, Curve],
    *,
    colours: Mapping[str, style.Colour],
    title: str = "Loss",
    headroom: float = 0.1,
) -> None:
    """Losses by name; crosses where one was due and is not there, is NaN or infinite.

    The panel is as high as the losses after the first tenth of the steps, and that much headroom.
    """
    if _dressed(axes, title, curves):
        style.settle(axes, curves.values(), headroom=headroom)
        _lines(axes, curves, colours)
        for curve in curves.values():
            style.cross(axes, curve.gaps, text=NO_LOSS)


def logit_panel(
    axes: Axes,
    curves: Mapping[str, Curve],
    *,
    colours: Mapping[str, style.Colour],
    title: str = LAYER_LOGITS,
) -> None:
    """Largest logits by name, on a log scale."""
    if _dressed(axes, title, curves):
        axes.margins(y=0.12)
        _log_scale(axes, curves.values())
        highest = sorted(curves, key=lambda name: curves[name].end, reverse=True)
        _lines(axes, curves, colours, named=highest[: 3 if len(highest) > MAX_NAMED else None])
        _missing(axes, curves.values())


def entropy_panel(
    axes: Axes,
    curves: Mapping[str, Curve],
    *,
    colours: Mapping[str, style.Colour],
    title: str = HEAD_ENTROPY,
) -> None:
    """Entropy ratios by name, between 0 (one key) and 1 (all keys alike)."""
    if _dressed(axes, title, curves):
        axes.set_ylim(-0.03, 1.03)
        _lines(axes, curves, colours)
        _missing(axes, curves.values())


def _dressed(axes: Axes, title: str, curves: Mapping[str, Curve]) -> bool:
    """Whether there is anything to draw; else the panel says that there is not."""
    style.dress(axes, title)
    anything = any(len(curve.finite.steps) or len(curve.gaps) for curve in curves.values())
    if not anything:
        style.nothing(axes, "not recorded")
    return anything


def _log_scale(axes: Axes, curves: Iterable[Curve]) -> None:
    """A log axis where all values are positive; else linear around zero and log beyond."""
    if all((curve.finite.values > 0).all() for curve in curves):
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.0, 0.5)))
    else:
        axes.set_yscale("symlog", linthresh=1.0)
    axes.yaxis.set_major_formatter("{x:,g}")


def _lines(
    axes: Axes,
    curves: Mapping[str, Curve],
    colours: Mapping[str, style.Colour],
    *,
    named: Iterable[str] | None = None,
) -> None:
    """Draws every line; those to be named (all by default) get their name, the others are thin."""
    names = tuple(curves if named is None else named)
    for name, curve in curves.items():
        width = style.LINE if name in names else style.THIN
        style.draw(axes, curve, colour=colours[name], name=name, width=width)
    ends = [(curves[n].end, n, colours[n]) for n in names if len(curves[n].finite.steps)]
    style.label_ends(axes, ends)


def _missing(axes: Axes, curves: Iterable[Curve]) -> None:
    steps = np.unique(np.concatenate([curve.gaps for curve in curves]))
    style.tick(axes, steps, text=MISSING)
