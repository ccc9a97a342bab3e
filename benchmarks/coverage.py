"""Sweeps tiny models of every type: what the probe sees of each, and whether it changes a bit.

    python benchmarks/coverage.py [--only REGEX] [--sample N] [--json FILE] [--no-run] [--write]

Every model is trained for three steps on the CPU, unwatched and watched, from the same seeds,
with dropout as its configuration has it. An oracle that works below the probe counts the
attention that really ran (`coverage_models/oracle.py` states the rule). One worker process does
the work; it is started again after a crash or a time-out, so that one model cannot end the
sweep. With `--json` finished entries are kept, and a later call goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

LIMIT = 900  # seconds for one entry; the worker itself gives up after a minute of CPU time


class Worker:
    """A process that runs entries, one after the other."""

    def __init__(self) -> None:
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), "--worker"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                stderr=subprocess.DEVNULL, text=True, env=environment)  # fmt: skip

    def run(self, entry: str) -> list[dict[str, Any]]:
        """The entry's results; a crash or a time-out is a result too."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(entry + "\n")
        self._process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            ready = selector.select(LIMIT)
        line = self._process.stdout.readline() if ready else ""
        if line:
            found: list[dict[str, Any]] = json.loads(line)
            return found
        what = f"more than {LIMIT} s" if not ready else f"the process died ({self.stop()})"
        self.stop()
        self._process = self._start()
        return [{"entry": entry, "name": entry.partition(":")[2], "problem": what}]

    def stop(self) -> int:
        """Ends the process."""
        self._process.kill()
        return self._process.wait()


def work() -> None:
    """The worker's side: an entry a line in, its results as a line of JSON out."""
    from coverage_models.entries import results  # heavy imports belong to the worker

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what models print must not mix with the answers
    for line in sys.stdin:
        answers.write(json.dumps(results(line.strip())) + "\n")
        answers.flush()


def sweep(entries: list[str], file: Path | None) -> Iterator[dict[str, Any]]:
    """Every entry's results; the ones that `file` already has are not run again."""
    done: dict[str, list[dict[str, Any]]] = {}
    for result in held(file):
        done.setdefault(result["entry"], []).append(result)
    worker = Worker()
    spread = [e for first in range(8) for e in entries[first::8]]  # so that half a sweep is fair
    for number, entry in enumerate(spread, 1):
        if entry not in done:
            start = time.monotonic()
            done[entry] = worker.run(entry)
            print(f"{number}/{len(entries)} {entry}: {time.monotonic() - start:.1f} s",
                  *map(in_short, done[entry]), sep="\n    ", flush=True)  # fmt: skip
            if file is not None:
                with file.open("a") as out:
                    out.writelines(json.dumps(r) + "\n" for r in done[entry])
        yield from done[entry]
    worker.stop()


def held(file: Path | None) -> list[dict[str, Any]]:
    """The results that an earlier call left in the file."""
    if file is None or not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def in_short(r: dict[str, Any]) -> str:
    """One result as a line."""
    if r["problem"]:
        return f"not run: {r['problem']}"
    bits = "bit-identical" if r["identical"] else f"DIFFERS: {r['differs']}"
    return (
        f"{r['implementation']} {r['model_class']}: {r['seen']}/{r['attention']} modules, "
        f"{r['verified']}/{r['sites']} verified ({r['worst_error']:.0e}), {bits}; "
        + "; ".join([*r["notes"], *r["alerts"]])[:300]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="a regular expression; entries are like hf:bert")
    parser.add_argument("--sample", type=int, default=0, help="only N entries, evenly spread")
    parser.add_argument("--json", type=Path, help="keep results here, and go on from them")
    parser.add_argument("--write", action="store_true", help="write docs/coverage.md")
    parser.add_argument("--no-run", action="store_true", help="report what --json holds")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work()
        return
    from coverage_models.entries import entries

    chosen = [e for e in entries() if re.search(arguments.only, e)]
    if arguments.sample:
        chosen = chosen[:: max(1, len(chosen) // arguments.sample)][: arguments.sample]
    found = held(arguments.json) if arguments.no_run else list(sweep(chosen, arguments.json))
    found = [r for r in found if r["entry"] in set(chosen)]
    from coverage_models.report import document

    text = document(found, chosen)
    if arguments.write:
        (ROOT / "docs" / "coverage.md").write_text(text)
    print("## Summary" + text.split("## Summary")[1].split("\n## ")[0])


if __name__ == "__main__":
    main()
