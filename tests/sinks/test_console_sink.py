"""What a person reads while training runs."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest
from tqdm import tqdm

from stability_probe.records import (
    Alert,
    LayerInfo,
    RunHeader,
    Severity,
    State,
    StepRecord,
    StepScalars,
)
from stability_probe.sinks import Event, Sink
from stability_probe.sinks.console import MAX_PER_STEP, ConsoleSink
from stability_probe.sinks.wording import head_list

GROWTH = Alert(
    step=412,
    rule="logit_growth",
    severity=Severity.WARNING,
    layer="decoder.3.attn",
    layer_index=3,
    heads=(4, 1, 5, 6),
    message="the largest logit went from 21 to 64 in 40 steps",
    cause="|q| grew 2.1x, |k| 1.4x",
    remedies=("add QK-norm", "lower the learning rate of W_q and W_k"),
)
OVER = Alert(
    step=500,
    rule="logit_growth",
    severity=Severity.WARNING,
    state=State.RESOLVED,
    layer="decoder.3.attn",
    layer_index=3,
    heads=(1, 4, 5, 6),
)


def step(number: int) -> StepRecord:
    return StepRecord(StepScalars(step=number))


Lines = Callable[[], list[tuple[str, str]]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    caplog.set_level(logging.DEBUG, logger="stability_probe")
    return lambda: [(record.levelname, record.getMessage()) for record in caplog.records]


def emitted(*events: Event, close: bool = False) -> None:
    sink = ConsoleSink()
    for event in events:
        sink.emit(event)
    if close:
        sink.close()


def test_it_is_a_sink() -> None:
    assert isinstance(ConsoleSink(), Sink)


def test_an_alert_says_what_where_why_and_what_to_do(lines: Lines) -> None:
    emitted(GROWTH)
    text = textwrap.dedent(
        """\
        WARNING at step 412: the largest logit went from 21 to 64 in 40 steps
          where: layer 3 (decoder.3.attn), heads 1, 4-6 (rule logit_growth)
          cause: |q| grew 2.1x, |k| 1.4x
          to do: add QK-norm
                 lower the learning rate of W_q and W_k"""
    )
    assert lines() == [("WARNING", text)]


def test_an_alert_about_the_whole_run_without_advice(lines: Lines) -> None:
    emitted(Alert(step=3, rule="disk_full", severity=Severity.INFO))
    text = "INFO at step 3: disk_full\n  where: the whole run (rule disk_full)"
    assert lines() == [("INFO", text)]


@pytest.mark.parametrize(
    ("severity", "level"),
    [(Severity.INFO, "INFO"), (Severity.WARNING, "WARNING"), (Severity.CRITICAL, "ERROR")],
)
def test_levels(lines: Lines, severity: Severity, level: str) -> None:
    emitted(Alert(step=1, rule="r", severity=severity))
    assert [name for name, _ in lines()] == [level]


def test_a_resolved_alert_is_one_quiet_line(lines: Lines) -> None:
    emitted(OVER)
    where = "layer 3 (decoder.3.attn), heads 1, 4-6"
    assert lines() == [("INFO", f"resolved at step 500: logit_growth, {where}")]


def test_steps_say_nothing_and_the_header_one_line(lines: Lines) -> None:
    layers = tuple(LayerInfo(f"b.{i}", i, heads=8) for i in range(12))
    emitted(RunHeader(layers=layers), step(1), step(2))
    assert lines() == [("INFO", "watching 12 attention layers, 96 heads")]


def test_the_summary_counts_every_alert(lines: Lines) -> None:
    bad = Alert(step=480, rule="nonfinite", severity=Severity.CRITICAL, layer="decoder.0.attn")
    emitted(step(1), GROWTH, bad, bad, OVER, step(600), close=True)
    summary = (
        "3 alerts in 600 steps: 2 critical (first at step 480: nonfinite), "
        "1 warning (first at step 412: logit_growth); 1 not resolved"
    )
    assert lines()[-1] == ("WARNING", summary)


def test_the_summary_of_a_calm_run_is_quiet(lines: Lines) -> None:
    sink = ConsoleSink()
    sink.emit(step(30))
    sink.close()
    sink.close()
    assert lines() == [("INFO", "no alerts in 30 steps")]


def test_only_info_alerts_make_a_quiet_summary(lines: Lines) -> None:
    emitted(Alert(step=2, rule="fp16", severity=Severity.INFO), step(9), close=True)
    text = "1 alert in 9 steps: 1 info (first at step 2: fp16); 1 not resolved"
    assert lines()[-1] == ("INFO", text)


def test_a_fault_in_every_layer_does_not_flood_the_log(lines: Lines) -> None:
    everywhere = [
        Alert(step=5, rule="nonfinite", severity=Severity.CRITICAL, layer=f"b.{i}")
        for i in range(48)
    ]
    emitted(*everywhere, step(6), close=True)
    shown = lines()
    assert len(shown) == MAX_PER_STEP + 2
    assert shown[-2] == ("ERROR", f"and {48 - MAX_PER_STEP} more critical alerts at step 5")
    assert "48 critical" in shown[-1][1]


def test_control_characters_cannot_reach_the_terminal(lines: Lines) -> None:
    emitted(Alert(step=1, rule="r", severity=Severity.WARNING, message="\x1b[2Jgone\r\n\u202egnp"))
    [(_, text)] = lines()
    assert text.startswith("WARNING at step 1: \ufffd[2Jgone\ufffd\n\ufffdgnp")


def test_percent_signs_are_text(lines: Lines) -> None:
    emitted(Alert(step=1, rule="r", severity=Severity.WARNING, message="grew 50 % %s %d"))
    assert "grew 50 % %s %d" in lines()[0][1]


def test_without_logging_set_up_warnings_reach_stderr_and_info_does_not() -> None:
    source = """
        import logging, sys
        from stability_probe.records import *
        from stability_probe.sinks.console import ConsoleSink
        sink = ConsoleSink()
        for severity in Severity:
            sink.emit(Alert(step=4, rule="r", severity=severity, message="seen"))
        sink.close()
        assert not {"torch", "tqdm", "numpy"} & set(sys.modules)
    """
    command = [sys.executable, "-c", textwrap.dedent(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    heads = [line for line in done.stderr.splitlines() if not line.startswith(" ")]
    assert heads == [
        "WARNING at step 4: seen",
        "CRITICAL at step 4: seen",
        "3 alerts in 4 steps: 1 critical (first at step 4: r), 1 warning (first at step 4: r), "
        "1 info (first at step 4: r); 1 not resolved",
    ]
    assert done.stdout == ""


def test_a_tqdm_bar_makes_way_and_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    handler = logging.StreamHandler(terminal)
    logger = logging.getLogger("stability_probe")
    logger.addHandler(handler)
    try:
        with tqdm(total=10, file=terminal, ncols=40, mininterval=0, ascii=True) as bar:
            bar.update(3)
            terminal.truncate(0)
            terminal.seek(0)
            emitted(GROWTH)
            drawn = terminal.getvalue()
    finally:
        logger.removeHandler(handler)
    before, after = drawn.split("WARNING at step 412", maxsplit=1)
    assert before == f"\r{' ' * 40}\r"  # the bar is wiped
    assert "3/10" in after.rsplit("\n", maxsplit=1)[1]  # and comes back on a line of its own


@pytest.mark.parametrize(
    ("heads", "text"),
    [
        ((), ""),
        ((3,), "head 3"),
        ((3, 3), "head 3"),
        ((2, 0, 1), "heads 0-2"),
        ((0, 2, 4, 5), "heads 0, 2, 4-5"),
    ],
)
def test_heads_are_listed_as_runs(heads: tuple[int, ...], text: str) -> None:
    assert head_list(heads) == text
