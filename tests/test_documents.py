"""The documents say what the code says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import stability_probe as sp
from stability_probe.alerts.stock import stock_rules
from stability_probe.cli import _parser

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_statistics_table_is_the_catalogue() -> None:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    assert tables.statistics_table() in README, "run: python docs/tables.py"


def test_every_rule_is_in_the_readme() -> None:
    missing = [rule.name for rule in stock_rules() if f"`{rule.name}`" not in README]
    assert not missing


def test_every_command_is_in_the_readme() -> None:
    (commands,) = (a.choices for a in _parser()._actions if a.choices and a.dest == "command")
    assert all(f"stability-probe {name}" in README for name in commands)


def test_every_public_name_resolves_and_has_a_docstring() -> None:
    assert set(sp.__all__) == set(sp._HOMES)
    for name in sp.__all__:
        assert getattr(sp, name).__doc__, name
    assert dir(sp) == sorted(sp.__all__)


def test_links_and_pictures_of_the_readme_exist() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README) + re.findall(
        r"`((?:docs|examples)/[^`]+)`", README
    )
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert not missing


def test_nothing_speaks_of_this_machine() -> None:
    """Paths of whoever built it do not belong into the repository."""
    rooms = ("stability_probe", "tests", "docs", "examples", "benchmarks", ".ci")
    files = [p for room in rooms for p in (ROOT / room).rglob("*") if p.is_file()]
    files = [p for p in files if p.suffix in {".py", ".md", ""}]
    home = re.compile(r"/(work|home|root)/\w")
    assert not [str(p) for p in files if home.search(p.read_text(errors="replace"))]
