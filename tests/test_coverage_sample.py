"""A few types of the coverage sweep: the probe sees what the oracle counts, and changes no bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
pytest.importorskip("transformers")  # a development dependency; the sweep is nothing without it

from coverage_models import entries, trial
from coverage_models.case import Case
from coverage_models.oracle import Oracle
from coverage_models.shrink import Shrinker

pytestmark = pytest.mark.filterwarnings("default")  # the models' own warnings are not the probe's

FEW = ["hf:gpt2", "hf:t5", "torch:TransformerEncoder, padding"]
DOZEN = [
    "hf:bert", "hf:llama", "hf:gemma2", "hf:mixtral", "hf:deepseek_v3", "hf:vit", "hf:swin",
    "hf:clip", "hf:whisper", "hf:bloom", "hf:qwen2_vl", "hf:gpt_oss",
]  # fmt: skip


def assert_right(entry: str) -> None:
    for result in entries.results(entry):
        assert not result["problem"], result
        assert result["identical"], result["differs"]
        assert result["seen"] == result["attention"] > 0, result["notes"]
        assert result["calls_seen"] == result["calls"]
        assert result["verified"] == result["sites"], result["notes"]
        assert result["worst_error"] <= 1e-5
        assert result["entropy_error"] <= 1e-4, result["notes"]
        assert not result["alerts"]


@pytest.mark.parametrize("entry", FEW)
def test_the_probe_agrees_with_the_oracle(entry: str) -> None:
    assert_right(entry)


@pytest.mark.slow
@pytest.mark.parametrize("entry", DOZEN)
def test_the_probe_agrees_with_the_oracle_on_a_dozen_types(entry: str) -> None:
    assert_right(entry)


class Mixed(nn.Module):
    """Attention, a router and a classifier: only the first is attention."""

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(x @ x.mT, -1)
        y = weights @ x
        chosen, _ = torch.softmax(y, -1).topk(2)
        return y.softmax(-1).sum() + chosen.sum()


def test_the_oracle_counts_attention_and_no_router() -> None:
    model, x = Mixed(), torch.randn(2, 5, 8)
    oracle = Oracle(model)
    with oracle.watching():
        model(x)
    (call,) = oracle.calls
    p = torch.softmax(x.double() @ x.double().mT, -1)
    assert call.module == "(root)"
    assert call.entropy_sum == pytest.approx(float(-(p * p.log()).sum()), rel=1e-5)
    assert call.largest == pytest.approx(float((x @ x.mT).abs().max()), rel=1e-5)


def test_a_changed_bit_and_a_changed_random_state_are_told() -> None:
    def make(_: bool) -> nn.Module:
        return nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)

    case = Case("layer", "torch", "", make, {"src": torch.randn(2, 4, 16)}, "")
    one, two = (trial._unwatched(case, oracle=False)[0] for _ in range(2))
    assert trial.differences(one, two) == ""
    two.losses[1] += 1e-6
    two.state["linear1.weight"][0, 0] += 1e-6
    torch.rand(1)
    three: dict[str, Any] = {"losses": two.losses, "state": two.state}
    changed = trial.Trace(**three, randomness=(torch.get_rng_state(), *two.randomness[1:]))
    told = trial.differences(one, changed)
    assert "loss from step 2" in told
    assert "linear1.weight" in told
    assert "random state of torch" in told


def test_shrinking_keeps_ratios_tokens_and_kinds_of_layers() -> None:
    config = {
        "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096,
        "vocab_size": 9999, "eos_token_id": 9000, "num_hidden_layers": 6,
        "layer_types": ["a", "a", "b", "a", "a", "b"],
        "inner_config": {"model_type": "x", "hidden_size": 1024, "image_token_id": 9000},
    }  # fmt: skip
    small = Shrinker(divisor=16).config(config)
    assert (small["hidden_size"], small["intermediate_size"]) == (64, 256)
    assert small["num_attention_heads"] == 16
    assert small["layer_types"] == ["a", "b"]
    assert small["num_hidden_layers"] == 2
    assert small["eos_token_id"] == small["inner_config"]["image_token_id"] < small["vocab_size"]
