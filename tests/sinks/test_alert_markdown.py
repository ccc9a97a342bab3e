"""The alert table, as TensorBoard's own Markdown renders it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from html.parser import HTMLParser
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from stability_probe.records import Alert, Severity
from stability_probe.sinks.markdown import MAX_ROWS, alert_table
from stability_probe.sinks.wording import plain

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of the html5lib in TensorBoard
    from tensorboard.plugin_util import markdown_to_safe_html


class Cells(HTMLParser):
    """The text of every body cell, and every element that was met."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.open = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self.open = True
        elif tag == "br":
            self.rows[-1][-1] += "\n"

    def handle_endtag(self, tag: str) -> None:
        self.open &= tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.open:
            self.rows[-1][-1] += data


def render(alerts: Sequence[Alert]) -> Cells:
    cells = Cells()
    cells.feed(markdown_to_safe_html(alert_table(alerts)))
    return cells


def alert(**fields: Any) -> Alert:
    return Alert(step=7, rule="logit_growth", severity=Severity.WARNING, **fields)


def test_every_field_has_its_column() -> None:
    shown = render(
        [
            alert(
                layer="model.layers.3.self_attn",
                layer_index=3,
                heads=(0, 1, 2, 7),
                message="Largest logit 20 -> 60.",
                cause="|q| grew 3x",
                remedies=("add QK-norm", "lower the rate"),
            )
        ]
    )
    assert shown.rows == [
        ["step", "state", "rule", "layer", "heads", "message", "cause", "remedies"],
        [
            "7",
            "firing",
            "logit_growth",
            "3: model.layers.3.self_attn",
            "heads 0-2, 7",
            "Largest logit 20 -> 60.",
            "|q| grew 3x",
            "add QK-norm\nlower the rate",
        ],
    ]


def test_an_alert_without_a_layer_is_about_the_whole_run() -> None:
    assert render([alert()]).rows[1][3] == "the whole run"


HOSTILE = [
    "<script>alert(1)</script>",
    "a | b || c",
    "**bold** _it_ `code` [x](javascript:alert(1)) ![y](z)",
    "&lt;b&gt; &amp; &#124;",
    "1. one",
    "# head",
    "<img src=x onerror=alert(1)>",
    "ends in a backslash \\",
    "`unclosed",
    "\x02klzzwxh:0000\x03",  # the Markdown library's own placeholders
    "https://a.b/c_d_e?f=1&g=2",
]


@settings(deadline=None, max_examples=150)
@given(st.text(max_size=60))
@example("\n".join(HOSTILE))
def test_any_text_renders_as_itself(text: str) -> None:
    shown = render([alert(message=text, cause=text)])
    expected = [line.split() for line in plain(text).splitlines() or [""]]
    for column in (5, 6):
        assert [line.split() for line in shown.rows[1][column].split("\n")] == expected
    assert shown.tags <= {"table", "thead", "tbody", "tr", "th", "td", "br"}


def test_hostile_text_one_by_one() -> None:
    for text in HOSTILE:
        shown = render([alert(message=text, layer=text, remedies=(text,))])
        assert shown.rows[1][5].split() == plain(text).split(), text
        assert len(shown.rows[1]) == 8


def test_a_long_table_is_cut_and_says_so() -> None:
    table = alert_table([alert()] * (MAX_ROWS + 4))
    assert len(render([alert()] * (MAX_ROWS + 4)).rows) == MAX_ROWS + 1
    assert "and 4 more at this step" in table
    assert "more at this step" not in alert_table([alert()] * MAX_ROWS)
