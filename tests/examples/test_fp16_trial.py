"""The float16 trial: where logits overflow, and that a length taken in float16 is a trap."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from stability_probe.records import AttentionCall
from stability_probe.stats.accumulate import accumulate
from stability_probe.stats.finish import finish
from stability_probe.stats.measure import measure

FINITE_INPUTS = [1, 2, 4, 16, 55, 56, 64, 256, 400, 1000, 4000, 16000, 16800]  # of float16


def load() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "fp16_trial.py"
    spec = importlib.util.spec_from_file_location("fp16_trial", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


trial = load()


def halves(scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    q, k = ((scale * x).half() for x in trial.vectors())
    return q, k


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    trial.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:9]] == [str(s) for s in trial.SCALES]
    of_400 = lines[6].split()
    assert of_400[:2] == ["400", "4.231e+05"]
    assert " 242 of 256 " in lines[6]
    assert lines[-2:] == [
        "plain float16 logits first overflow at weight scale 55.65",
        "plain float32 logits first overflow at weight scale 3.546e+18",
    ]


def test_float16_overflows_where_its_range_ends_and_float32_does_not() -> None:
    q, k = (x.numpy() for x in trial.vectors())
    largest = np.abs(q @ k.T).max()
    first = trial.first_overflow(torch.float16)
    assert first == pytest.approx(math.sqrt(65520 / largest), rel=2e-3)  # 65520 rounds to inf
    assert not torch.isfinite(trial.plain(400, torch.float16)).all()
    assert torch.isfinite(trial.plain(400, torch.float32)).all()
    first = trial.first_overflow(torch.float32)
    # a partial sum may be larger than the whole one, at most |q| |k|
    norms = np.linalg.norm(q, axis=1).max() * np.linalg.norm(k, axis=1).max()
    limit = torch.finfo(torch.float32).max
    assert math.sqrt(limit / norms) < first <= math.sqrt(limit / largest) * 1.001


@pytest.mark.parametrize("scale", [1, 40, 54, 57, 64, 400, 4000])
def test_the_headroom_knows_it_before(scale: float) -> None:
    overflowed = ~torch.isfinite(trial.plain(scale, torch.float16))
    q, k = halves(scale)
    for dtype in (torch.float16, torch.float32, torch.float64):
        values = measure(q.to(dtype), k.to(dtype))
        assert (values["fp16_headroom_log2"].item() < 0) == bool(overflowed.any())
        assert values["fp16_overflow_unscaled"].item() == overflowed.sum().item()
        assert values["nonfinite"].item() == 0


@pytest.mark.parametrize("scale", FINITE_INPUTS)
def test_normalised_float16_logits_are_those_of_float32_at_any_scale(scale: float) -> None:
    q, k = halves(scale)
    assert torch.isfinite(torch.stack((q, k))).all()
    exact_q, exact_k = (x / x.norm(dim=-1, keepdim=True) for x in trial.vectors())
    exact = measure(exact_q, exact_k, scale=trial.GAIN)
    assert exact["abs_max_logit"].item() == pytest.approx(3.302, abs=1e-3)
    logits = trial.normalised(scale, trial.unit_by_float32)
    assert logits.dtype == torch.float16
    got = finish(accumulate(as_scores(logits), full=True), full=True)
    assert got["abs_max_logit"].item() == pytest.approx(3.30, abs=0.01)
    assert got["abs_max_logit"].item() == pytest.approx(exact["abs_max_logit"].item(), abs=0.01)
    assert got["entropy"].item() == pytest.approx(exact["entropy"].item(), abs=2e-3)
    whole = trial.GAIN * (exact_q @ exact_k.T)
    assert (logits.double() - whole).abs().max() < 0.01
    assert got["nonfinite"].item() == 0


def as_scores(logits: torch.Tensor) -> AttentionCall:
    return AttentionCall(layer="a", scores_BHQK=logits[None, None], fused=False)


@pytest.mark.parametrize("scale", [64, 400, 16000])
def test_a_length_in_float16_overflows_and_attention_looks_everywhere(scale: float) -> None:
    logits = trial.normalised(scale, trial.unit_by_float16)
    assert torch.isfinite(logits).all()  # and yet nothing is left of them
    assert not logits.any()
    q, k = (trial.unit_by_float16(x) for x in halves(scale))
    for values in (
        measure(q, k, scale=trial.GAIN),
        finish(accumulate(as_scores(logits), full=True), full=True),
    ):
        assert values["nonfinite"].item() == 0
        assert values["abs_max_logit"].item() == 0
        assert values["entropy"].item() == pytest.approx(math.log(trial.TOKENS), abs=1e-5)
        assert values["entropy_ratio"].item() == pytest.approx(1, abs=1e-6)


def test_while_nothing_overflows_both_lengths_do() -> None:
    small = trial.normalised(4, trial.unit_by_float16)
    assert (small - trial.normalised(4, trial.unit_by_float32)).abs().max() < 0.02


def test_beyond_float16_the_inputs_themselves_are_lost() -> None:
    q, k = halves(20000)
    values = measure(q, k)
    assert values["nonfinite"].item() == values["nonfinite_q"].item() > 0
    assert values["fp16_overflow_unscaled"].item() > 0
