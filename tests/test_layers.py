"""Imports go downward only, and what must work without torch does."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "stability_probe"

# Each room may import itself and the rooms named here; nothing else of the package.
MAY_IMPORT: dict[str, set[str]] = {
    "records": set(),
    "errors": set(),
    "plan": {"records"},
    "danger": {"records"},
    "budget": {"plan"},
    "stopwatch": set(),
    "course": {"records", "plan", "danger", "budget", "stopwatch"},
    "positions": set(),
    "transfer": set(),
    "modes": set(),
    "finite": set(),
    "sentinel": {"records", "finite"},
    "stats": {"records", "errors", "positions", "finite"},
    "capture": {"records", "errors", "positions", "modes"},
    "handover": {"stats", "transfer"},
    "meter": {"records", "finite", "stats", "sentinel", "transfer", "handover", "stopwatch"},
    "ranks": {
        "records", "plan", "danger", "stats", "sentinel", "transfer", "handover", "meter",
    },
    "runlog": {"records", "errors", "stats.catalogue", "views"},
    "detect": set(),
    "alerts": {"records", "detect", "stats.catalogue"},
    "sinks": {"records", "errors", "stats.catalogue"},
    "views": {"records", "errors", "stats.catalogue", "runlog"},
    "monitor": {"records", "alerts", "detect"},
    "replaying": {"records", "errors", "alerts", "monitor", "runlog", "stats.catalogue"},
    "lookout": {"records", "capture"},
    "header": {"records", "plan", "stats.catalogue"},
    "updates": {"transfer"},
    "outputs": {"records", "runlog", "sinks"},
    "roster": {"records", "plan", "meter", "capture", "ranks"},
    "waiting": {"records", "meter", "transfer", "ranks", "updates"},
    "probe": {
        "modes", "stats",
        "records", "errors", "plan", "header", "waiting", "meter", "capture", "lookout",
        "course", "updates", "monitor", "alerts", "runlog", "sinks",
        "views", "outputs", "ranks", "roster",
    },
    "remedies": {"errors"},
    "demo": {"__init__", "records", "errors", "remedies", "runlog", "probe", "plan", "views",
             "stats.catalogue"},
    "cli": {"demo", "errors", "runlog", "views"},
    "__init__": {
        "records", "errors", "plan", "probe", "replaying", "runlog", "stats",
    },
}  # fmt: skip

WITHOUT_TORCH = [
    "stability_probe",
    "stability_probe.cli",
    "stability_probe.detect",
    "stability_probe.alerts",
    "stability_probe.runlog.read",
    "stability_probe.runlog.write",
    "stability_probe.monitor",
    "stability_probe.plan",
    "stability_probe.danger",
    "stability_probe.replaying",
    "stability_probe.sinks.tensorboard",
    "stability_probe.stats.catalogue",
    "stability_probe.views.coverage",
    "stability_probe.views.plots",
]


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room(dotted: str) -> str:
    return dotted.split(".")[1] if "." in dotted else "__init__"


def imports(path: Path) -> set[str]:
    """Dotted names of the package's own modules that a file imports when it runs."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stability_probe"):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names if node.module == "stability_probe" else {node.module or ""}
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name.startswith("stability_probe")}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_downward(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for dotted in imports(path):
        inside = dotted.removeprefix("stability_probe").lstrip(".")
        target = inside.split(".")[0] or "__init__"
        allowed = MAY_IMPORT[own]
        assert target == own or target in allowed or any(inside.startswith(a) for a in allowed), (
            f"{own} must not import {dotted}"
        )


def test_every_room_is_named() -> None:
    rooms = {p.relative_to(PACKAGE).parts[0].removesuffix(".py") for p in modules()}
    assert rooms == set(MAY_IMPORT)


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_works_without_torch(module: str) -> None:
    code = f"import sys; sys.modules['torch'] = None; import {module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
