"""What the figures show is what the run holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from drawn_runs import MadeUpRun, alert, drawn, line, lines, make_run, resolved, steps_of, words

import stability_probe as sp
from stability_probe.records import (
    LayerInfo,
    Observation,
    Origin,
    RunHeader,
    Severity,
    StepRecord,
    StepScalars,
)
from stability_probe.runlog.write import RunWriter
from stability_probe.views import style
from stability_probe.views.plots import collapse, overview

NAN, INF = float("nan"), float("inf")
STEPS = range(1, 101)


def growing(*alerts, rate: float = 0.05) -> MadeUpRun:
    """Two layers of two heads whose logits grow; the loss turns up at step 70."""
    logits = {s: [[1.0, 2.0 * np.exp(rate * s)], [3.0, 0.5]] for s in STEPS}
    ratios = {s: [[0.9, 1 - s / 110], [0.8, 0.7]] for s in STEPS}
    losses = {s: 3.0 - s / 50 if s < 70 else 1.6 + (s - 70) / 10 for s in STEPS}
    return make_run(losses, {"qk_abs_max_logit": logits, "entropy_ratio": ratios}, alerts)


ALERTS = (
    alert(2, "fp16_readiness", "info"),
    alert(40, "logit_growth", "warning", layer="blocks.0.attn"),
    resolved(45, "logit_growth", "warning", layer="blocks.0.attn"),
    alert(52, "logit_growth", "warning", layer="blocks.0.attn"),
    alert(60, "nonfinite", "critical", layer="blocks.0.attn"),
)


def test_the_overview_draws_the_run_s_numbers(tmp_path: Path) -> None:
    run = growing(*ALERTS)
    figure = overview(run)
    _, loss, logit, entropy = figure.axes
    np.testing.assert_allclose(line(loss, "train"), run.scalars[["step", "loss"]].to_numpy())
    first = [(s, np.float32(max(1.0, 2.0 * np.exp(0.05 * s)))) for s in STEPS]
    np.testing.assert_allclose(line(logit, "blocks.0.attn"), first, rtol=1e-6)
    np.testing.assert_allclose(line(logit, "blocks.1.attn"), [(s, 3.0) for s in STEPS])
    heads = [[0.9, 1 - s / 110, 0.8, 0.7] for s in STEPS]
    medians = [(s, np.median(h)) for s, h in zip(STEPS, heads, strict=True)]
    lowest = [(s, min(h)) for s, h in zip(STEPS, heads, strict=True)]
    np.testing.assert_allclose(line(entropy, "median head"), medians, rtol=1e-6)
    np.testing.assert_allclose(line(entropy, "lowest head"), lowest, rtol=1e-6)
    assert logit.get_yscale() == "log"
    drawn(figure, tmp_path)


def test_alerts_stand_at_their_steps_in_their_severity() -> None:
    figure = overview(growing(*ALERTS))
    lanes, *panels = figure.axes
    assert [t.get_text() for t in lanes.get_yticklabels()] == ["info", "warning", "critical"]
    assert steps_of(lanes, "info") == [2]
    assert steps_of(lanes, "warning") == [40, 52]
    assert steps_of(lanes, "critical") == [60]
    bars = [segment[:, 0].tolist() for c in lanes.collections for segment in c.get_segments()]
    assert bars == [[2, 100], [40, 45], [52, 100], [60, 100]]
    for panel in panels:
        assert steps_of(panel, "alert") == [40, 52, 60]
        colours = {
            x.get_xdata()[0]: x.get_color() for x in panel.get_lines() if x.get_label() == "alert"
        }
        assert colours[40] == style.SEVERITY[Severity.WARNING]
        assert colours[60] == style.SEVERITY[Severity.CRITICAL]
    assert "logit_growth" in words(figure)


def test_the_title_says_what_alerted_first() -> None:
    title = "4 alerts in 100 steps; first warning: logit_growth at step 40"
    assert overview(growing(*ALERTS)).get_suptitle() == title
    assert overview(growing()).get_suptitle() == "No alerts in 100 steps"
    only_info = growing(alert(2, "fp16_readiness", "info"))
    title = "1 alert in 100 steps; first info: fp16_readiness at step 2"
    assert overview(only_info).get_suptitle() == title
    assert overview(growing(), title="mine").get_suptitle() == "mine"


def test_a_run_without_alerts_says_so(tmp_path: Path) -> None:
    figure = overview(growing())
    assert [t.get_text() for t in figure.axes[0].texts] == ["none"]
    assert all(not lines(axes, "alert") for axes in figure.axes)
    drawn(figure, tmp_path)


def test_a_run_without_a_loss_says_so(tmp_path: Path) -> None:
    run = make_run({1: None, 2: None}, {"max_logit": {1: [[1.0]], 2: [[2.0]]}})
    figure = overview(run)
    assert [t.get_text() for t in figure.axes[1].texts] == ["not recorded"]
    assert line(figure.axes[2], "blocks.0.attn") == [(1, 1), (2, 2)]
    assert [t.get_text() for t in figure.axes[3].texts] == ["not recorded"]
    drawn(figure, tmp_path)


def test_a_run_of_one_step_is_dots(tmp_path: Path) -> None:
    run = make_run({1: 2.0}, {"max_logit": {1: [[4.0]]}, "entropy_ratio": {1: [[0.5]]}})
    figure = overview(run)
    [dot] = [x for x in figure.axes[1].get_lines() if x.get_label() == "train"]
    assert dot.get_marker() == "o"
    assert dot.get_markevery() == [0]
    assert figure.get_suptitle() == "No alerts in 1 step"
    drawn(figure, tmp_path)


def test_an_empty_run_is_drawn(tmp_path: Path) -> None:
    run = make_run({}, {"max_logit": {}, "entropy_ratio": {}})
    figure = overview(run)
    assert words(figure).count("not recorded") == 3
    drawn(figure, tmp_path)


def test_a_loss_that_is_not_finite_is_a_cross_and_never_a_number(tmp_path: Path) -> None:
    losses = {1: 2.0, 2: INF, 3: 1.9, 4: 1.8, 5: 1.7, 6: NAN, 7: NAN}
    figure = overview(make_run(losses, {"max_logit": {1: [[1.0]]}}))
    panel = figure.axes[1]
    numbers = [2.0, None, 1.9, 1.8, 1.7, None, None]
    assert line(panel, "train") == list(zip(range(1, 8), numbers, strict=True))
    assert steps_of(panel, "no finite loss") == [2, 6, 7]
    assert "no finite loss" in [t.get_text() for t in panel.texts]
    drawn(figure, tmp_path)


def test_a_statistic_that_is_absent_is_a_tick_and_a_break(tmp_path: Path) -> None:
    logits = {s: [[NAN if s == 30 else 5.0]] for s in range(10, 60, 10)}
    run = make_run(dict.fromkeys(range(1, 51), 1.0), {"max_logit": logits, "entropy_ratio": logits})
    figure = overview(run)
    broken = [(10, 5), (20, 5), (30, None), (40, 5), (50, 5)]
    assert line(figure.axes[2], "blocks.0.attn") == broken
    assert steps_of(figure.axes[2], "missing") == [30]
    assert steps_of(figure.axes[3], "missing") == [30]
    assert steps_of(figure.axes[1], "no finite loss") == []
    drawn(figure, tmp_path)


def test_nonfinite_attention_is_marked_with_the_logits(tmp_path: Path) -> None:
    logits = {s: [[5.0], [6.0]] for s in (1, 2, 3)}
    counts = {1: [[0.0], [0.0]], 2: [[0.0], [7.0]], 3: [[0.0], [0.0]]}
    run = make_run({1: 1.0}, {"qk_abs_max_logit": logits, "nonfinite": counts})
    figure = overview(run)
    assert steps_of(figure.axes[2], "not finite") == [2]
    drawn(figure, tmp_path)


def test_an_evaluation_loss_is_drawn_where_it_was_given() -> None:
    losses = dict.fromkeys(range(1, 31), 2.0)
    run = make_run(losses, {}, eval_loss={5: 2.5, 10: 2.4, 15: 2.3})
    panel = overview(run).axes[1]
    assert line(panel, "evaluation") == [(5, 2.5), (10, 2.4), (15, 2.3)]
    assert not lines(panel, "no finite loss")
    assert len(line(panel, "train")) == 30


@pytest.mark.parametrize("values", [[0.0, 2.0], [-5.0, -1.0]])
def test_logits_that_have_no_logarithm_are_drawn_all_the_same(
    values: list[float], tmp_path: Path
) -> None:
    run = make_run({}, {"max_logit": {1: [[values[0]]], 2: [[values[1]]]}})
    figure = overview(run)
    panel = figure.axes[2]
    assert panel.get_yscale() == "symlog"
    assert line(panel, "blocks.0.attn") == [(1, values[0]), (2, values[1])]
    low, high = panel.get_ylim()
    assert low <= values[0]
    assert high >= values[1]
    drawn(figure, tmp_path)


def test_of_many_layers_the_highest_three_are_named() -> None:
    logits = {s: [[float(layer)] for layer in range(1, 49)] for s in (1, 2)}
    panel = overview(make_run({}, {"max_logit": logits})).axes[2]
    assert [t.get_text() for t in panel.texts] == [f"blocks.{i}.attn" for i in (45, 46, 47)]
    assert len(panel.get_lines()) == 48


def test_names_at_the_end_of_lines_do_not_overlap() -> None:
    logits = {s: [[5.0], [5.01], [5.02], [9.0], [9.001]] for s in (1, 2)}
    panel = overview(make_run({}, {"max_logit": logits})).axes[2]
    heights = [t.xy[1] for t in panel.texts]
    assert len(heights) == 5
    assert min(np.diff(sorted(heights))) > style.LABEL_GAP - 1e-9
    assert max(heights) <= 1.0 + 1e-9


def test_a_name_stands_at_the_end_of_its_line() -> None:
    logits = {s: [[float(s)], [30.0 * s], [900.0]] for s in range(1, 11)}
    figure = overview(make_run({}, {"max_logit": logits}))
    figure.draw_without_rendering()
    panel = figure.axes[2]
    for text in panel.texts:
        [points] = lines(panel, text.get_text())
        _, height = panel.transAxes.inverted().transform(panel.transData.transform(points[-1]))
        assert text.xy[1] == pytest.approx(height)


def test_the_first_fall_of_the_loss_does_not_flatten_the_rest() -> None:
    losses = {s: (10.0 - s if s < 8 else 2.0 + 0.3 * (s > 80)) for s in STEPS}
    panel = overview(make_run(losses, {})).axes[1]
    low, high = panel.get_ylim()
    assert 1.9 < low < 2.0
    assert 2.3 < high < 2.5
    assert max(y for _, y in line(panel, "train")) == 9.0  # drawn, and leaves at the top


DIVERGED = {"plain": 75}


def plain() -> MadeUpRun:
    return growing(*ALERTS)


def twin() -> MadeUpRun:
    return growing(rate=0.0)


def test_the_collapse_figure_draws_each_run_s_numbers(tmp_path: Path) -> None:
    runs = {"plain": plain(), "qk_norm": twin()}
    figure = collapse(runs, diverged=DIVERGED)
    loss, logit, entropy = figure.axes
    for name, run in runs.items():
        np.testing.assert_allclose(line(loss, name), run.scalars[["step", "loss"]].to_numpy())
        heads = run.frame().groupby("step")
        largest = [(s, g["qk_abs_max_logit"].max()) for s, g in heads]
        middle = [(s, g["entropy_ratio"].median()) for s, g in heads]
        np.testing.assert_allclose(line(logit, name), largest)
        np.testing.assert_allclose(line(entropy, name), middle)
    drawn(figure, tmp_path)


def test_the_collapse_figure_shows_the_lead() -> None:
    figure = collapse({"plain": plain(), "qk_norm": twin()}, diverged=DIVERGED)
    for panel in figure.axes:
        assert steps_of(panel, "warned") == [52]  # the warning of step 40 had resolved
        assert steps_of(panel, "diverged") == [75]
        [band] = panel.patches
        assert (band.get_x(), band.get_x() + band.get_width()) == (52, 75)
    assert (
        figure.get_suptitle() == "plain: the first warning came 23 steps before the loss diverged"
    )
    said = words(figure)
    assert "first warning\nstep 52" in said
    assert "loss diverges\nstep 75" in said
    assert "\n23 steps\n" in said


def test_a_divergence_without_a_warning_is_said() -> None:
    early = growing(
        alert(10, "logit_growth", "warning"),
        resolved(20, "logit_growth", "warning"),
        alert(50, "fp16_readiness", "info"),
        alert(51, "blind", "warning", origin=Origin.OPERATIONAL),
    )
    figure = collapse({"plain": early}, diverged=DIVERGED)
    assert figure.get_suptitle() == "plain: the loss diverged at step 75 without a warning"
    assert steps_of(figure.axes[0], "warned") == []
    assert steps_of(figure.axes[0], "diverged") == [75]


def test_a_late_warning_is_not_a_lead() -> None:
    figure = collapse({"plain": growing(alert(90, "r", "critical"))}, diverged=DIVERGED)
    title = "plain: the first warning came 15 steps after the loss had diverged"
    assert figure.get_suptitle() == title
    assert all(not panel.patches for panel in figure.axes)


def test_runs_that_did_not_diverge_are_not_marked() -> None:
    figure = collapse({"plain": plain(), "qk_norm": twin()})
    assert figure.get_suptitle() == "No run diverged"
    assert all(not steps_of(panel, "diverged") for panel in figure.axes)
    assert all(not steps_of(panel, "warned") for panel in figure.axes)


def test_the_evaluation_loss_is_preferred_where_every_run_has_it() -> None:
    losses = dict.fromkeys(range(1, 11), 2.0)
    with_eval = make_run(losses, {}, eval_loss={5: 2.5, 10: 2.4})
    both = collapse({"a": with_eval, "b": with_eval}).axes[0]
    assert line(both, "a") == [(5, 2.5), (10, 2.4)]
    assert both.get_title(loc="left") == "Loss on the evaluation batch"
    mixed = collapse({"a": with_eval, "b": make_run(losses, {})}).axes[0]
    assert len(line(mixed, "a")) == 10
    assert mixed.get_title(loc="left") == "Loss"


@pytest.mark.parametrize(
    ("names", "diverged"), [([], {}), (list("abcde"), {}), (["plain"], {"plane": 7})]
)
def test_collapse_says_what_it_expects(names: list[str], diverged: dict[str, int]) -> None:
    runs = {name: growing() for name in names}
    with pytest.raises(ValueError, match=r"expected one to 4 runs, and only their names"):
        collapse(runs, diverged=diverged)


def test_a_recorded_run_is_drawn_as_it_was_emitted(tmp_path: Path) -> None:
    layers = tuple(LayerInfo(f"h.{i}", i, 2) for i in range(12))
    writer = RunWriter(tmp_path, RunHeader(layers=layers))
    rng = np.random.default_rng(3)
    emitted = {}
    for step in range(1, 41):
        seen = []
        for info in layers if step % 4 == 0 else ():
            values = {
                "qk_abs_max_logit": rng.uniform(1, 50, 2).astype(np.float32),
                "entropy_ratio": rng.uniform(0, 1, 2).astype(np.float32),
            }
            emitted[step, info.name] = values
            seen.append(Observation(info.name, info.index, values))
        writer.emit(StepRecord(StepScalars(step=step, loss=1.0 / step), tuple(seen)))
    writer.emit(alert(24, "logit_growth", "warning", layer="h.3", layer_index=3))
    writer.close()
    figure = sp.load(tmp_path).plot(tmp_path / "overview.png")
    lanes, loss, logit, entropy = figure.axes
    np.testing.assert_allclose(line(loss, "train"), [(s, 1.0 / s) for s in range(1, 41)])
    for info in layers:
        expected = [
            (s, v["qk_abs_max_logit"].max()) for (s, n), v in emitted.items() if n == info.name
        ]
        np.testing.assert_allclose(line(logit, info.name), expected)
    ratios = [
        (s, min(v["entropy_ratio"].min() for (t, _), v in emitted.items() if t == s))
        for s in range(4, 41, 4)
    ]
    np.testing.assert_allclose(line(entropy, "lowest head"), ratios)
    assert steps_of(lanes, "warning") == [24]
    assert (tmp_path / "overview.png").stat().st_size > 5_000


def test_plotting_leaves_pyplot_alone() -> None:
    code = (
        "import sys; import stability_probe.views.plots; "
        "assert 'matplotlib.pyplot' not in sys.modules; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
