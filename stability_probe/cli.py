"""The `stability-probe` command. Exit status: 0 fine, 1 not as it should be, 2 wrong usage."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stability-probe",
        description="Watches attention while a transformer trains, and warns before it diverges.",
    )
    version = f"%(prog)s {metadata.version('stability-probe')}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="train a small model into divergence, and its QK-norm twin, on real data",
        description=(
            "Trains a small transformer on real data until attention matters, then raises the "
            "learning rate of W_q and W_k until it diverges, and beside it the same model with "
            "QK-norm. Shows when the probe warned and when the loss diverged."
        ),
    )
    demo.add_argument(
        "--logdir", type=Path, metavar="DIR", help="where the runs go (default: runs/demo-<time>)"
    )
    demo.add_argument(
        "--task",
        choices=("text", "digits"),
        default="text",
        help="a byte-level language model on the standard library's sources, or a ViT on "
        "scikit-learn's digits (default: text)",
    )
    demo.add_argument("--json", action="store_true", help="print the result as JSON, and only it")
    demo.set_defaults(run=_demo)
    coverage = commands.add_parser(
        "coverage",
        help="which attention layers of a run are seen and verified, and why not",
        description=(
            "Prints the coverage table of a recorded run: each attention layer, where its calls "
            "are seen, whether its numbers agree with what the model computed. Exit status 1 "
            "where a layer is not seen or not verified."
        ),
    )
    coverage.add_argument("run_dir", type=Path, metavar="DIR", help="the run directory")
    coverage.add_argument("--json", action="store_true", help="print the table as JSON")
    coverage.set_defaults(run=_coverage)
    return parser


def _demo(arguments: argparse.Namespace) -> int:
    from stability_probe.demo.command import run_demo

    return run_demo(logdir=arguments.logdir, task=arguments.task, as_json=arguments.json)


def _coverage(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from rich.console import Console

    from stability_probe.runlog.read import load
    from stability_probe.views.coverage import is_covered, print_coverage

    reports = load(arguments.run_dir).header.coverage
    if arguments.json:
        print(json.dumps([asdict(report) for report in reports]))
    else:
        print_coverage(reports, Console())
    return 0 if reports and all(map(is_covered, reports)) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; the exit status."""
    arguments = _parser().parse_args(argv)
    from stability_probe.errors import StabilityProbeError

    try:
        status: int = arguments.run(arguments)
        return status
    except StabilityProbeError as error:
        print(f"stability-probe: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
