"""Writes the tables that documents take from the code: run it after changing the catalogue.

python docs/tables.py
"""

from __future__ import annotations

import re
from pathlib import Path

from stability_probe.stats.catalogue import CATALOGUE, Statistic

README = Path(__file__).parents[1] / "README.md"
DANGER = {"up": "up", "down": "down", "both": "both ways", "positive": "above 0", "": "-"}


def statistics_table() -> str:
    """Every statistic: name (bold where stored at each measured step), unit, danger, meaning."""
    rows = ["| statistic | unit | danger | meaning |", "|---|---|---|---|"]
    return "\n".join([*rows, *(_row(s) for s in CATALOGUE.values())])


def _row(s: Statistic) -> str:
    name = f"**`{s.name}`**" if s.default else f"`{s.name}`"
    meaning = s.meaning.replace("|", "\\|")
    return f"| {name} | {s.unit or '-'} | {DANGER[s.danger]} | {meaning} |"


def with_table(text: str, name: str, table: str) -> str:
    """The document with the table between its two markers replaced."""
    start, end = f"<!-- table:{name} -->", f"<!-- end:{name} -->"
    pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"got a document without {start} ... {end}; expected both. Add them.")
    return pattern.sub(lambda _: f"{start}\n{table}\n{end}", text)


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(), "statistics", statistics_table()))
