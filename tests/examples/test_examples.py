"""The examples run as they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_plain_loop(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "plain_loop.py"), "--logdir", str(tmp_path)]
    done = subprocess.run([*command, "--steps", "15"], capture_output=True, text=True, check=True)
    assert "encoder.layers.1.self_attn: 4 heads, verified against reissued" in done.stdout
    assert "0 alerts" in done.stdout
    assert list(tmp_path.glob("events.out.tfevents.*"))
    assert (tmp_path / "plugins" / "stability_probe" / "run.json").is_file()
