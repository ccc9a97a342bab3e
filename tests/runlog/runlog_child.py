"""A process of its own that writes a run and says on its standard output which steps are in.

Usage: runlog_child.py DIRECTORY SCENARIO
"""

from __future__ import annotations

import itertools
import os
import resource
import signal
import sys

from runlog_cases import HEADER, record

from stability_probe.records import StepRecord
from stability_probe.runlog import RunWriter


def say(word: object) -> None:
    os.write(1, f"{word}\n".encode())


def make(step: int) -> StepRecord:
    return record(step, layers=6, heads=8, measured=step % 3 != 0)


def endless(writer: RunWriter) -> None:
    say("start")
    for step in itertools.count(1):
        writer.emit(make(step))
        say(step)


def disk_full(writer: RunWriter) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for step in range(1, 181):
        # A file is full after some steps; then so full that no batch fits; then there is room.
        room = {0: 20_000, 1: 1_000, 2: resource.RLIM_INFINITY}[(step - 1) // 60]
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        try:
            writer.emit(make(step))
        except OSError:
            say(f"failed {step}")
        else:
            say(step)
    writer.close()


if __name__ == "__main__":
    {"endless": endless, "disk_full": disk_full}[sys.argv[2]](RunWriter(sys.argv[1], HEADER))
