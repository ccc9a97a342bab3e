"""The pictures of a run: pure functions from recorded numbers to a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stability_probe.records import Severity
from stability_probe.views import style
from stability_probe.views.series import (
    Curve,
    Episode,
    Recorded,
    entropy_ratio,
    episodes,
    largest_logit,
    nonfinite_steps,
    scalar_curve,
    step_range,
    worst,
)

if TYPE_CHECKING:
    import pandas as pd

NOT_FINITE = "not finite"
_LOSS = "Loss"
_LOGIT = "Largest attention logit"
_ENTROPY = "Attention entropy / ln(visible keys)"
_NAMED_LAYERS = 6  # of more layers, only the three highest are named


def overview(run: Recorded, *, title: str | None = None) -> Figure:
    """Is attention on a way that ends badly, since when, and does the loss know of it yet?

    Four panels over the steps: the alerts, a bar from firing to resolved; the loss; the largest
    logit of each layer's worst head; the entropy ratio of the median and of the lowest head.
    Values that are not finite are crosses, missing ones are breaks in a line.

    Args:
        run: What `stability_probe.load` gives.
        title: Over the figure; by default it says what alerted first.

    Returns:
        A figure of 1000 x 800 pixels, for `figure.savefig(path)`.
    """
    frame, found = run.frame(), episodes(run.alerts)
    first, last = step_range(run.scalars, frame)
    figure = style.new_figure(width=1000, height=800, title=title or _what_alerted(found, last))
    lanes = max(len({episode.alert.severity for episode in found}), 1)
    panels = figure.subplots(4, 1, sharex=True, height_ratios=[0.2 + 0.25 * lanes, 2, 2, 2])
    _alerts_panel(panels[0], found, last=last)
    _loss_panel(panels[1], run.scalars)
    _logit_panel(panels[2], frame)
    _entropy_panel(panels[3], frame)
    for panel in panels[1:]:
        for step, severity in _worrying(found):
            panel.axvline(step, color=style.SEVERITY[severity], linewidth=1, zorder=1)
    style.step_axis(panels[-1], first, last)
    return figure


def collapse(
    runs: Mapping[str, Recorded],
    *,
    diverged: Mapping[str, int] | None = None,
    title: str | None = None,
) -> Figure:
    """Did attention give way before the loss did, and how many steps before?

    The loss, the largest logit of all heads (log scale) and the entropy ratio of the median head
    of each run, over each other. Where a run diverged, its first warning and the divergence are
    marked, and the steps between them are shaded: the time there was to act.

    Args:
        runs: Name to run, four at most; the one that fails first is best drawn first.
        diverged: Name to the step at which that run's loss diverged; a plot does not judge that.
        title: Over the figure; by default it says the lead of the first run that diverged.

    Returns:
        A figure of 1000 x 760 pixels.

    Raises:
        ValueError: No run, more than four, or a diverged name that is no run.
    """
    diverged = diverged or {}
    if not 1 <= len(runs) <= len(style.RUNS) or not diverged.keys() <= runs.keys():
        raise ValueError(
            f"got runs {list(runs)} and diverged {list(diverged)}: expected one to "
            f"{len(style.RUNS)} runs, and only their names in diverged. Leave the others out."
        )
    warned = {name: _first_warning(run) for name, run in runs.items()}
    leads = [(name, warned[name], step) for name, step in diverged.items()]
    frames = {name: run.frame() for name, run in runs.items()}
    figure = style.new_figure(width=1000, height=760, title=title or _what_came_first(leads))
    loss, logit, entropy = panels = figure.subplots(3, 1, sharex=True)
    for (name, run), colour in zip(runs.items(), style.RUNS, strict=False):
        frame = frames[name]
        _run_line(loss, scalar_curve(run.scalars, "loss"), name, colour)
        _run_line(logit, worst(largest_logit(frame).values()), name, colour)
        _run_line(entropy, entropy_ratio(frame).get("median"), name, colour)
    ...
