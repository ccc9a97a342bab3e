"""The coverage table: what the probe sees of each attention layer, and what it does not."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from stability_probe.records import SiteReport


def is_covered(report: SiteReport) -> bool:
    """Whether the layer is seen and its numbers were compared with what the model computed."""
    return bool(report.seam) and report.verified != "no"


def coverage_text(reports: Sequence[SiteReport]) -> str:
    """The table as lines of plain text, one a layer."""
    return "\n".join(f"{r.layer} ({r.module}): {_seen(r)}; {_checked(r)}" for r in reports)


def coverage_table(reports: Sequence[SiteReport]) -> Table:
    """The table for a terminal, and how many layers are seen and verified in its caption."""
    covered = sum(map(is_covered, reports))
    table = Table(caption=f"{covered} of {len(reports)} attention layers are seen and verified.")
    for column in ("layer", "module", "seen at", "attends", "heads", "verified", "why not"):
        table.add_column(column, justify="right" if column == "heads" else "left")
    for r in reports:
        table.add_row(
            r.layer,
            r.module,
            f"{r.seam} ({r.sees})" if r.seam else "not seen",
            r.attends or "?",
            _heads(r),
            _verified(r),
            "" if is_covered(r) else r.reason,
            style="" if is_covered(r) else "yellow",
        )
    return table


def print_coverage(reports: Sequence[SiteReport], console: Console) -> None:
    """Shows the table, or says that there is none yet."""
    if not reports:
        console.print(
            "No attention layer is recorded yet: the table is written when the first training "
            "steps have shown where attention is called."
        )
        return
    console.print(coverage_table(reports))


def _heads(r: SiteReport) -> str:
    shared = r.seam and r.key_heads and r.key_heads != r.heads
    return f"{r.heads} (keys: {r.key_heads})" if shared else str(r.heads or "")


def _verified(r: SiteReport) -> str:
    if not is_covered(r):
        return "no"
    return r.verified if r.error is None else f"{r.verified}, error {r.error:.0e}"


def _seen(r: SiteReport) -> str:
    if not r.seam:
        return "NOT SEEN"
    kind = f"{r.attends}-attention, " if r.attends else ""
    return f"{r.seam}, {kind}heads {_heads(r)}, {r.sees}"


def _checked(r: SiteReport) -> str:
    if is_covered(r):
        return f"verified against {_verified(r)}"
    return f"not verified: {r.reason}" if r.seam else r.reason
