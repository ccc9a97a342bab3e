"""The `stability-probe` command. Exit status: 0 fine, 1 not as it should be, 2 wrong usage."""

from __future__ import annotations

import argparse
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
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; the exit status."""
    arguments = _parser().parse_args(argv)
    from stability_probe.demo.command import run_demo
    from stability_probe.errors import StabilityProbeError

    try:
        return run_demo(logdir=arguments.logdir, task=arguments.task, as_json=arguments.json)
    except StabilityProbeError as error:
        print(f"stability-probe: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
