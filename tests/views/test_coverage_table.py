"""The coverage table of a run: live, on the disk, and at the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_models import Attention, Model, loss_of, tokens
from torch import Tensor, nn

import stability_probe as sp
from stability_probe.cli import main
from stability_probe.records import SiteReport
from stability_probe.views.coverage import coverage_text, is_covered


class OwnKernelAttention(nn.Module):
    """Looks like attention; nothing in it can be recognised."""

    def forward(self, x: Tensor) -> Tensor:
        scores = (x @ x.mT / 8).exp2()
        return scores / scores.sum(-1, keepdim=True) @ x

    def unused(self, x: Tensor) -> Tensor:
        return torch.softmax(x, -1)


def run(logdir: Path, *attentions: nn.Module) -> tuple[SiteReport, ...]:
    model = Model(*attentions)
    with sp.watch(model, logdir, strict=True) as probe:
        for _ in range(4):
            loss_of(model, tokens()).backward()
            probe.step()
        return probe.coverage


def test_the_header_holds_the_table_as_it_was_at_the_end(tmp_path: Path) -> None:
    live = run(tmp_path, Attention(), Attention("torch.softmax"))
    assert sp.load(tmp_path).header.coverage == live
    assert [r.seam for r in live] == ["sdpa", "softmax"]
    assert all(map(is_covered, live))


def test_the_command_says_which_layers_are_not_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    run(tmp_path / "good", Attention())
    run(tmp_path / "half", Attention(), OwnKernelAttention())
    capsys.readouterr()
    assert main(["coverage", str(tmp_path / "good")]) == 0
    assert "1 of 1 attention layers are seen and verified" in capsys.readouterr().out
    assert main(["coverage", str(tmp_path / "half")]) == 1
    shown = capsys.readouterr().out
    assert "not seen" in shown
    assert "gave no attention call" in shown
    assert main(["coverage", str(tmp_path / "half"), "--json"]) == 1
    table = json.loads(capsys.readouterr().out)
    assert [row["seam"] for row in table] == ["sdpa", ""]
    assert table[0]["verified"] == "output"
    assert table[0]["error"] < 1e-6


def test_a_run_without_a_table_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Model(Attention())
    with sp.watch(model, tmp_path, strict=True) as probe:
        probe.step()
    assert main(["coverage", str(tmp_path)]) == 1
    assert "not seen" in capsys.readouterr().out
    assert main(["coverage", str(tmp_path / "nothing")]) == 2


def test_the_text_gives_kind_heads_and_error() -> None:
    site = SiteReport("h.0.attn", "GPT", "sdpa", 8, "qk", 3, "cross", 2, "output", 3e-8)
    assert coverage_text([site]) == (
        "h.0.attn (GPT): sdpa, cross-attention, heads 8 (keys: 2), qk; "
        "verified against output, error 3e-08"
    )
