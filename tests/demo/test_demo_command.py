"""The whole demo, as a newcomer runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stability_probe.cli import main
from stability_probe.records import Severity


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stability_probe.cli", "demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["text", "digits"])
def test_the_plain_run_is_announced_and_its_twin_stays_healthy(task: str, tmp_path: Path) -> None:
    done = demo("--task", task, "--logdir", str(tmp_path / "demo"), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["logdir"] == str(tmp_path / "demo")
    plain, twin = found["runs"]
    assert (plain["name"], twin["name"]) == ("plain", "qk_norm")
    assert set(plain) == {
        "name", "alerts", "first_alert_step", "divergence_step", "final_loss"
    }  # fmt: skip
    assert plain["divergence_step"] - plain["first_alert_step"] >= 10
    assert "entropy_collapse" in {a["rule"] for a in plain["alerts"]}
    assert all(
        set(a) == {"step", "rule", "severity", "state", "layer", "heads"} for a in plain["alerts"]
    )
    assert all(a["severity"] == Severity.INFO for a in twin["alerts"])
    assert twin["divergence_step"] is None
    assert twin["final_loss"] < plain["final_loss"] - 0.25
    assert (tmp_path / "demo" / "demo.png").stat().st_size > 10_000


def test_a_directory_with_an_earlier_demo(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    done = demo("--logdir", str(tmp_path))
    assert done.returncode == 2
    assert f"got {tmp_path}, which holds an earlier demo" in done.stderr
    assert "Choose another --logdir" in done.stderr


def test_digits_without_scikit_learn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo", "--task", "digits", "--logdir", str(tmp_path / "demo")]) == 2
    assert 'pip install "stability-probe[demo]"' in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize("arguments", [[], ["demo", "--task", "speech"], ["dance"]])
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
