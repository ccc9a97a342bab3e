"""The documents say what the code says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import stability_probe as sp
from stability_probe.alerts.stock import stock_rules
from stability_probe.cli import _parser
from stability_probe.header import run_header
from stability_probe.stats.catalogue import CATALOGUE

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_statistics_table_is_the_catalogue() -> None:
    assert tables().statistics_table() in README, "run: python docs/tables.py"


def test_the_page_on_statistics_is_the_catalogue() -> None:
    page = (ROOT / "docs" / "statistics.md").read_text()
    assert page == tables().statistics_page(), "run: python docs/tables.py"
    rows = dict(re.findall(r"^\| \*{0,2}`(\w+)`\*{0,2} \|(.*)\|$", page, re.MULTILINE))
    assert list(rows) == list(CATALOGUE)
    for name, about in CATALOGUE.items():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", rows[name])]
        assert cells[0] == (about.unit or "-")
        assert cells[1] == about.pooling
        assert cells[4:] == [about.not_measured.replace("|", r"\|") or "-", about.source or "-"]
        assert cells[3].startswith(about.meaning.replace("|", r"\|"))
        assert f"| **`{name}`** |" in page or not about.default


def test_a_run_s_header_takes_its_statistics_from_the_catalogue() -> None:
    header = run_header((), sp.Plan(), created=0.0)
    assert {
        name: (s["unit"], s["pooling"], s["danger"]) for name, s in header.statistics.items()
    } == {s.name: (s.unit, s.pooling, s.danger) for s in CATALOGUE.values()}


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
