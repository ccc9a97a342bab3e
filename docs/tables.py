"""Writes what documents take from the code: run it after changing the catalogue.

python docs/tables.py
"""

from __future__ import annotations

import re
from pathlib import Path

from stability_probe.stats import catalogue
from stability_probe.stats.catalogue import CATALOGUE, Statistic

README = Path(__file__).parents[1] / "README.md"
STATISTICS = Path(__file__).parent / "statistics.md"
DANGER = {"up": "up", "down": "down", "both": "both ways", "positive": "above 0", "": "-"}


def statistics_table() -> str:
    """Every statistic: name (bold where stored at each measured step), unit, danger, meaning."""
    rows = ["| statistic | unit | danger | meaning |", "|---|---|---|---|"]
    return "\n".join([*rows, *(_row(s) for s in CATALOGUE.values())])


def _row(s: Statistic) -> str:
    return _line(_name(s), s.unit or "-", DANGER[s.danger], s.meaning)


def statistics_page() -> str:
    """The whole page on the statistics: all that the catalogue says of each."""
    head = ("statistic", "unit", "pooled by", "danger", "meaning", "does not measure", "source")
    rows = [_line(*head), _line(*["---"] * len(head)), *(_full_row(s) for s in CATALOGUE.values())]
    _, _, conventions = (catalogue.__doc__ or "").rpartition("\n\n")
    return "\n".join(["# Statistics", "", INTRODUCTION, conventions.strip(), "", *rows, ""])


INTRODUCTION = """\
Written by `python docs/tables.py` from `stability_probe/stats/catalogue.py`, which also gives
TensorBoard its descriptions and the run's header its units. There is one value per head, or one per
layer where that is said. Statistics in bold are stored at every measured step, the others every 100
steps and after an alert. Micro-batches and ranks merge by the third column; "mean" is weighted by
rows or entries, and the values pooled by "peak" stay together, those of the largest absolute
`peak_logit`.
"""


def _full_row(s: Statistic) -> str:
    meaning = s.meaning if s.scope == "head" else f"{s.meaning} One value per {s.scope}."
    named = (_name(s), s.unit or "-", s.pooling, DANGER[s.danger])
    return _line(*named, meaning, s.not_measured or "-", s.source or "-")


def _name(s: Statistic) -> str:
    return f"**`{s.name}`**" if s.default else f"`{s.name}`"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def with_table(text: str, name: str, table: str) -> str:
    """The document with the table between its two markers replaced."""
    start, end = f"<!-- table:{name} -->", f"<!-- end:{name} -->"
    pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"got a document without {start} ... {end}; expected both. Add them.")
    return pattern.sub(lambda _: f"{start}\n{table}\n{end}", text)


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(), "statistics", statistics_table()))
    STATISTICS.write_text(statistics_page())
