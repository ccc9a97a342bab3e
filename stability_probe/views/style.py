"""How every plot looks: colours that colour-blind readers can tell apart, and quiet axes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, TypeAlias

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from stability_probe.records import Severity
from stability_probe.views.series import Curve, Steps

Colour: TypeAlias = str | tuple[float, ...]

DPI = 100
LINE = 2 * 72 / DPI  # two pixels, in points
THIN = LINE / 2
LABEL_GAP = 0.1  # between two labels, in heights of a panel
INK, GREY, LIGHT, FAINT = "#1a1a1a", "#6b6b6b", "#a8a8a8", "#e3e3e3"

# Okabe and Ito, https://jfly.uni-koeln.de/color/
BLUE, VERMILLION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
SKY, ORANGE = "#56B4E9", "#E69F00"
RUNS = (VERMILLION, BLUE, GREEN, PURPLE)
SEVERITY: Mapping[Severity, str] = MappingProxyType(
    {Severity.INFO: SKY, Severity.WARNING: ORANGE, Severity.CRITICAL: VERMILLION}
)


def new_figure(*, width: int, height: int, title: str) -> Figure:
    """A figure of so many pixels that belongs to no pyplot state, with its title at the left."""
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor="white")
    figure.set_layout_engine(ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08))
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.012, ha="left", fontsize=14, fontweight="bold", color=INK)
    return figure


def dress(axes: Axes, title: str) -> None:
    """A small title over the panel, a light grid, no box."""
    axes.set_title(title, loc="left", fontsize=10, color=GREY, pad=8)
    axes.set_facecolor("white")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(colors=GREY, labelsize=9, length=0, which="both")
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)


def step_axis(axes: Axes, first: int, last: int) -> None:
    """The limits, the label and the whole-number ticks of an axis of steps."""
    pad = max((last - first) * 0.01, 0.5)
    axes.set_xlim(first - pad, last + pad)
    axes.set_xlabel("optimizer step", fontsize=9, color=GREY)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.xaxis.set_major_formatter("{x:,.0f}")


def depth_colours(layers: Iterable[str]) -> dict[str, Colour]:
    """A colour for each layer, given in the order of the model: the first dark, the last light."""
    names = list(layers)
    colours = mpl.colormaps["viridis"](np.linspace(0.0, 0.85, len(names)))
    return {name: tuple(colour) for name, colour in zip(names, colours.tolist(), strict=True)}


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
        zorder=2 + width,  # thinner lines lie below
    )


def cross(axes: Axes, steps: Steps, *, text: str) -> None:
    """Crosses along the top of a panel where a number is not finite, said in words once."""
    _mark(axes, steps, text, height=0.95, marker="x", colour=VERMILLION)


def tick(axes: Axes, steps: Steps, *, text: str) -> None:
    """Grey ticks along the bottom of a panel where a number is missing, said in words once."""
    _mark(axes, steps, text, height=0.04, marker="|", colour=GREY)


def flag(axes: Axes, step: int, text: str, *, side: Literal["left", "right"]) -> None:
    """Words beside a step's line, in the upper part of the panel."""
    _words(axes, step, text, height=0.86, side=side, colour=INK)


def span(axes: Axes, first: int, last: int, text: str) -> None:
    """Words over the panel, centred between two steps."""
    axes.annotate(
        text,
        ((first + last) / 2, 1.0),
        xycoords=axes.get_xaxis_transform(),
        xytext=(0, 4),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=10,
        fontweight="bold",
        color=INK,
        annotation_clip=False,
    )


def settle(axes: Axes, curves: Iterable[Curve], *, headroom: float) -> None:
    """Limits the panel to what lines do after the first tenth of the steps, and some headroom.

    The first fall of a loss would flatten all that follows; the lines stay whole and leave the
    panel at the top. Where they span more than half of the height later on, all of it is shown.
    """
    known = [curve.finite for curve in curves]
    steps = np.concatenate([curve.steps for curve in known])
    values = np.concatenate([curve.values for curve in known])
    if not len(values) or np.ptp(values) == 0.0:
        return
    later = values[steps > steps.min() + np.ptp(steps) / 10]
    shown = later if len(later) and np.ptp(later) < np.ptp(values) / 2 else values
    low, high = shown.min(), max(shown.max(), shown.min() + 1e-9)
    axes.set_ylim(low - 0.08 * (high - low), high + headroom * (high - low))


def beside(axes: Axes, step: float, height: float, text: str) -> None:
    """Small words left of a mark, or right of it where the left has no room; data units."""
    low, high = axes.get_xlim()
    left = step > (low + high) / 2
    axes.annotate(
        text,
        (step, height),
        xytext=(-9 if left else 9, 0),
        textcoords="offset points",
        ha="right" if left else "left",
        va="center",
        fontsize=8,
        color=INK,
        zorder=5,
    )


def label_ends(axes: Axes, ends: Sequence[tuple[float, str, Colour]]) -> None:
    """Names at the right edge, each at the height of its line's end, apart from each other.

    Call it when all lines are drawn.

    Args:
        axes: The panel.
        ends: (value, name, colour) of each line.
    """
    axes.autoscale_view()  # matplotlib puts the limits off until something asks
    to_axes = axes.transScale + axes.transLimits
    heights = [float(to_axes.transform((1.0, value))[1]) for value, _, _ in ends]
    order = sorted(range(len(ends)), key=heights.__getitem__)
    height = -np.inf
    for place, i in enumerate(order):
        room = 1.0 - LABEL_GAP * (len(order) - 1 - place)  # for those above
        height = max(height + LABEL_GAP, min(heights[i], room))
        _, name, colour = ends[i]
        axes.annotate(
            name,
            (1.0, height),
            xycoords="axes fraction",
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=colour,
            annotation_clip=False,
        )


def nothing(axes: Axes, text: str) -> None:
    """Words in place of lines, where there is nothing to draw."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY)
    axes.set_yticks([])


def _mark(axes: Axes, steps: Steps, text: str, *, height: float, marker: str, colour: str) -> None:
    if not len(steps):
        return
    axes.plot(
        steps,
        np.full(len(steps), height),
        transform=axes.get_xaxis_transform(),
        linestyle="none",
        marker=marker,
        markersize=5,
        color=colour,
        label=text,
        zorder=5,
    )
    _words(axes, int(steps[0]), text, height=height, side="left", colour=colour)


def _words(
    axes: Axes, step: int, text: str, *, height: float, side: Literal["left", "right"], colour: str
) -> None:
    left = side == "left"
    axes.annotate(
        text,
        (step, height),
        xycoords=axes.get_xaxis_transform(),
        xytext=(-7 if left else 7, 0),
        textcoords="offset points",
        ha="right" if left else "left",
        va="center",
        fontsize=9,
        color=colour,
        zorder=5,
    )
