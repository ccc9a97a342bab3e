"""The pictures of a run: pure functions from recorded numbers to a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stability_probe.records import Alert, Origin, Severity
from stability_probe.views import panels, style
from stability_probe.views.series import (
    Curve,
    Episode,
    Recorded,
    entropy_ratio,
    episodes,
    evaluation_curve,
    largest,
    largest_logit,
    loss_curve,
    measured,
    nonfinite_steps,
    step_range,
)


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
    frame, found = measured(run.frame(bounds=False)), episodes(run.alerts)
    layers = largest_logit(frame)
    losses = _given({"train": loss_curve(run), "evaluation": evaluation_curve(run)})
    first, last = step_range([run], [frame])
    figure = style.new_figure(width=1000, height=800, title=title or _what_alerted(found, last))
    lanes = max(len({episode.alert.severity for episode in found}), 1)
    axes = figure.subplots(4, 1, sharex=True, height_ratios=[0.25 * lanes, 2, 2, 2])
    style.step_axis(axes[-1], first, last)
    panels.alerts_panel(axes[0], found, last=last)
    colours = panels.TWO_LOSSES if "evaluation" in losses else panels.LOSSES
    panels.loss_panel(axes[1], losses, colours=colours)
    panels.logit_panel(axes[2], layers, colours=style.depth_colours(layers))
    style.cross(axes[2], nonfinite_steps(frame), text=panels.NOT_FINITE)
    panels.entropy_panel(axes[3], entropy_ratio(frame), colours=panels.HEADS)
    for panel in axes[1:]:
        panels.alert_lines(panel, found)
    return figure


def collapse(
    runs: Mapping[str, Recorded],
    *,
    diverged: Mapping[str, int] | None = None,
    title: str | None = None,
) -> Figure:
    """Did attention give way before the loss did, and how many steps before?

    The loss (on the evaluation batch, where every run has it), the largest logit of all heads
    (log scale) and the entropy ratio of the median head of each run, over each other. Where a
    run diverged, that is marked, and with it the first warning that had not resolved by then;
    the steps between are shaded: the time there was to act.

    Args:
        runs: Name to run, four at most, drawn in this order; the one that fails comes first.
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
            f"got the runs {list(runs)} and diverged {list(diverged)}: expected one to "
            f"{len(style.RUNS)} runs, and only their names in diverged. Leave the others out."
        )
    warned = {
        name: _first_warning(_lasting(episodes(runs[name].alerts), until=step))
        for name, step in diverged.items()
    }
    figure = style.new_figure(width=1000, height=760, title=title or _lead(warned, diverged))
    axes = figure.subplots(3, 1, sharex=True)
    _draw_runs(axes, runs)
    for name, step in diverged.items():
        panels.lead_marks(axes, warned=warned[name], diverged=step)
    return figure


def _draw_runs(axes: Sequence[Axes], runs: Mapping[str, Recorded]) -> None:
    frames = {name: measured(run.frame(bounds=False)) for name, run in runs.items()}
    colours = dict(zip(runs, style.RUNS, strict=False))
    losses = _given({name: evaluation_curve(run) for name, run in runs.items()})
    title = "Loss on the evaluation batch"
    if len(losses) < len(runs):
        losses = _given({name: loss_curve(run) for name, run in runs.items()})
        title = "Loss"
    logits = _given({name: largest(largest_logit(f).values()) for name, f in frames.items()})
    ratios = _given({name: entropy_ratio(f).get("median head") for name, f in frames.items()})
    style.step_axis(axes[-1], *step_range(runs.values(), frames.values()))
    panels.loss_panel(axes[0], losses, colours=colours, title=title, headroom=0.4)
    panels.logit_panel(axes[1], logits, colours=colours, title=panels.ALL_LOGITS)
    panels.entropy_panel(axes[2], ratios, colours=colours, title=panels.MEDIAN_ENTROPY)
    for frame in frames.values():
        style.cross(axes[1], nonfinite_steps(frame), text=panels.NOT_FINITE)


def _given(curves: Mapping[str, Curve | None]) -> dict[str, Curve]:
    return {name: curve for name, curve in curves.items() if curve is not None}


def _first_warning(found: Sequence[Episode]) -> Alert | None:
    """The first alert that is no info, and is about the run rather than the probe's own work."""
    alerts = (episode.alert for episode in found)
    return next(
        (a for a in alerts if a.severity is not Severity.INFO and a.origin is Origin.RULE), None
    )


def _lasting(found: Sequence[Episode], *, until: int) -> list[Episode]:
    """Without the alerts that had resolved before a step: by then they warned of nothing."""
    return [episode for episode in found if episode.end is None or episode.end >= until]


def _what_alerted(found: Sequence[Episode], last: int) -> str:
    steps = "1 step" if last == 1 else f"{last:,} steps"
    if not found:
        return f"No alerts in {steps}"
    first = _first_warning(found) or found[0].alert
    count = "1 alert" if len(found) == 1 else f"{len(found)} alerts"
    return f"{count} in {steps}; first {first.severity}: {first.rule} at step {first.step:,}"


def _lead(warned: Mapping[str, Alert | None], diverged: Mapping[str, int]) -> str:
    if not diverged:
        return "No run diverged"
    name, step = next(iter(diverged.items()))
    warning = warned[name]
    if warning is None:
        return f"{name}: the loss diverged at step {step:,} without a warning"
    lead = step - warning.step
    if lead > 0:
        return f"{name}: the first warning came {lead:,} steps before the loss diverged"
    return f"{name}: the first warning came {-lead:,} steps after the loss had diverged"
