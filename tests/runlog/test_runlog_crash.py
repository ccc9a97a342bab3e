from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import runlog_child
from runlog_cases import HEADER, assert_same, same

from stability_probe.runlog import RunWriter, load
from stability_probe.runlog import scan as scan_module
from stability_probe.runlog.schema import FileName

CHILD = Path(runlog_child.__file__)


def start(path: Path, scenario: str) -> subprocess.Popen[bytes]:
    where = os.pathsep.join([str(CHILD.parent), *sys.path])
    return subprocess.Popen(
        [sys.executable, str(CHILD), str(path), scenario],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": where, "OMP_NUM_THREADS": "1"},
    )


def kill_after(path: Path, seconds: float) -> int:
    """The last step that the child said is in, before it was killed."""
    child = start(path, "endless")
    assert child.stdout is not None
    assert child.stdout.readline() == b"start\n"
    time.sleep(seconds)
    child.kill()
    said = child.stdout.read().split(b"\n")
    child.wait()
    child.stdout.close()
    assert child.returncode == -9
    return int(said[-2]) if len(said) > 1 else 0


def check_killed(path: Path, rng: random.Random) -> int:
    last = kill_after(path, rng.uniform(0.0, 0.15))
    got = list(load(path).records())
    assert_same(got[:last], [runlog_child.make(step) for step in range(1, last + 1)])
    assert len(got) <= last + 1  # the step that was in, but not yet said to be
    assert all(same(r, runlog_child.make(r.step)) for r in got[last:])
    return last


def test_what_was_acknowledged_survives_a_kill(tmp_path: Path) -> None:
    rng = random.Random(1)
    assert sum(check_killed(tmp_path / str(i), rng) for i in range(4)) > 4


@pytest.mark.slow
def test_what_was_acknowledged_survives_a_hundred_kills(tmp_path: Path) -> None:
    rng = random.Random(2)
    assert sum(check_killed(tmp_path / str(i), rng) for i in range(100)) > 100


def test_a_run_that_is_being_written_reads_as_a_whole_beginning(tmp_path: Path) -> None:
    child = start(tmp_path, "endless")
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"start\n"
        seen, most = 0, 0
        until = time.monotonic() + 1.0
        while time.monotonic() < until or seen < 3:
            got = list(load(tmp_path).records())
            assert_same(got, [runlog_child.make(step) for step in range(1, len(got) + 1)])
            assert len(got) >= most
            seen, most = seen + (len(got) > most), len(got)
    finally:
        child.kill()
        child.stdout.close()
        child.wait()


@pytest.mark.parametrize("kind", ["events", "observations"])
def test_files_that_come_into_being_while_the_run_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A reader that lists the directory just before a file is made still tells no half step."""
    writer = RunWriter(tmp_path, HEADER)
    for step in (1, 2, 4):
        writer.emit(runlog_child.make(step))
    list_all, listings = scan_module.run_files, itertools.count()

    def late(folder: Path) -> list[FileName]:
        first = next(listings) == 0
        return [name for name in list_all(folder) if not (first and name.kind == kind)]

    monkeypatch.setattr(scan_module, "run_files", late)
    assert_same(list(load(tmp_path).records()), [runlog_child.make(step) for step in (1, 2, 4)])
    writer.close()


def test_a_full_disk_raises_and_loses_only_what_raised(tmp_path: Path) -> None:
    child = start(tmp_path, "disk_full")
    said, _ = child.communicate(timeout=60)
    assert child.returncode == 0
    words = said.decode().split("\n")[:-1]
    failed = {int(word.split()[1]) for word in words if word.startswith("failed")}
    written = [int(word) for word in words if not word.startswith("failed")]
    assert any(step <= 60 for step in failed)
    assert failed >= {step for step in range(61, 121) if step % 3}  # no batch fits 1000 bytes
    assert max(failed) <= 120
    run = load(tmp_path)
    got = {r.step: r for r in run.records()}
    assert_same([got[step] for step in written], [runlog_child.make(step) for step in written])
    assert set(got) == set(written)
    folder = tmp_path / "plugins" / "stability_probe"
    assert all(path.stat().st_size for path in folder.iterdir())
    assert len(list(folder.iterdir())) < 2 * len(failed)


def test_importing_and_reading_need_no_torch() -> None:
    code = "import sys, stability_probe.runlog as r; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True)
