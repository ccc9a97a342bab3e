"""How every plot looks: colours that colour-blind readers can tell apart, and quiet axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from stability_probe.records import Severity
from stability_probe.views.series import Curve, Steps

Colour: TypeAlias = str | tuple[float, float, float, float]

DPI = 100
LINE = 2 * 72 / DPI  # two pixels, in points
INK, GREY, FAINT = "#1a1a1a", "#6b6b6b", "#d9d9d9"

# Okabe and Ito's palette, https://jfly.uni-koeln.de/color/
BLUE, VERMILLION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
SKY, ORANGE = "#56B4E9", "#E69F00"
RUNS = (VERMILLION, BLUE, GREEN, PURPLE)
SEVERITY: Mapping[Severity, str] = MappingProxyType(
    {Severity.INFO: SKY, Severity.WARNING: ORANGE, Severity.CRITICAL: VERMILLION}
)
LABEL_GAP = 0.1  # between labels, in heights of a panel
_DEPTH = mpl.colormaps["viridis"]


def new_figure(*, width: int, height: int) -> Figure:
    """A figure of so many pixels that belongs to no pyplot state."""
    figure = Figure(
        figsize=(width / DPI, height / DPI), dpi=DPI, layout="constrained", facecolor="white"
    )
    FigureCanvasAgg(figure)
    return figure


def dress(axes: Axes, title: str) -> None:
    """A small title over the panel, a light grid, no box."""
    axes.set_title(title, loc="left", fontsize=10, color=INK, fontweight="bold")
    axes.set_facecolor("white")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(colors=GREY, labelsize=9, length=0, which="both")
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)


def step_axis(axes: Axes) -> None:
    """The label and the whole-number ticks of an axis of steps."""
    axes.set_xlabel("optimizer step", fontsize=9, color=GREY)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.xaxis.set_major_formatter("{x:,.0f}")


def depth_colour(place: int, count: int) -> Colour:
    """The colour of the layer at `place` of `count`: dark first, light last."""
    return _DEPTH(0.8 * place / max(count - 1, 1))


def draw(axes: Axes, curve: Curve, *, colour: Colour, name: str, width: float = LINE) -> None:
    """A line that breaks where a value is missing; points that stand alone are dots."""
    line = curve.line
    there = np.concatenate([[False], np.isfinite(line.values), [False]])
    alone = np.flatnonzero(there[1:-1] & ~there[:-2] & ~there[2:])
    axes.plot(
        line.steps,
        line.values,
        color=colour,
        linewidth=width,
        marker="o",
        markersize=4,
        markevery=alone.tolist(),
        label=name,
    )


def mark(axes: Axes, steps: Steps, *, text: str) -> None:
    """Crosses along the top of a panel where there is no number to draw, said in words once."""
    if not len(steps):
        return
    top = axes.get_xaxis_transform()
    crosses = {"linestyle": "none", "marker": "x", "markersize": 5, "color": VERMILLION}
    axes.plot(steps, np.full(len(steps), 0.96), transform=top, label=text, **crosses)
    axes.annotate(
        text,
        (float(steps[0]), 0.96),
        xycoords=top,
        xytext=(-7, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        fontsize=8,
        color=VERMILLION,
    )


def label_ends(axes: Axes, ends: Sequence[tuple[float, str, Colour]]) -> None:
    """Names at the right edge, each at the height of its line's end, moved apart where needed.

    Call it when the limits of the panel are final.

    Args:
        axes: The panel.
        ends: (value, name, colour) of each line.
    """
    to_axes = axes.transScale + axes.transLimits
    heights = [float(to_axes.transform((0.0, value))[1]) for value, _, _ in ends]
    order = sorted(range(len(ends)), key=heights.__getitem__)
    at = -np.inf
    placed = {}
    for place, i in enumerate(order):
        room_above = (len(order) - 1 - place) * LABEL_GAP
        at = max(at + LABEL_GAP, min(heights[i], 1.0 - room_above))
        placed[i] = at
    for i, (_, name, colour) in enumerate(ends):
        axes.annotate(
            name,
            (1.0, placed[i]),
            xycoords="axes fraction",
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=colour,
            annotation_clip=False,
        )
