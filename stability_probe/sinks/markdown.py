"""Alerts as a Markdown table that renders as the text that it was given, whatever is in it."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from stability_probe.records import Alert
from stability_probe.sinks.wording import head_list, plain

MAX_ROWS = 20  # of one table: an alert in each of 96 layers is still one readable page

_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+\-.!|])")
_COLUMNS = ("step", "state", "rule", "layer", "heads", "message", "cause", "remedies")


def cell(text: str) -> str:
    """Text for one table cell: HTML and Markdown in it show as typed, line breaks as breaks."""
    escaped = _SPECIAL.sub(r"\\\1", html.escape(plain(text), quote=False))
    return "<br>".join(line.strip() for line in escaped.splitlines())


def alert_table(alerts: Sequence[Alert]) -> str:
    """A table with a row per alert, oldest first, cut after `MAX_ROWS` with a note that says so."""
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|" + " --- |" * len(_COLUMNS)]
    lines += ["| " + " | ".join(map(cell, _row(alert))) + " |" for alert in alerts[:MAX_ROWS]]
    if len(alerts) > MAX_ROWS:
        lines += ["", f"and {len(alerts) - MAX_ROWS} more at this step"]
    return "\n".join(lines)


def _row(alert: Alert) -> tuple[str, ...]:
    layer = alert.layer or "the whole run"
    if alert.layer_index is not None:
        layer = f"{alert.layer_index}: {layer}"
    return (
        str(alert.step),
        str(alert.state),
        alert.rule,
        layer,
        head_list(alert.heads),
        alert.message,
        alert.cause,
        "\n".join(alert.remedies),
    )
