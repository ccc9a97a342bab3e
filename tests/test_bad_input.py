"""Every error says what was got, what is expected, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import Attention, Encoder, Model, loss_of, tokens
from torch import nn

import stability_probe as sp


def says(error: pytest.ExceptionInfo[BaseException], *parts: str) -> None:
    text = str(error.value)
    assert all(part in text for part in parts), text


def test_a_model_without_attention() -> None:
    with pytest.raises(sp.NoAttentionError) as error:
        sp.watch(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    says(error, "got a Sequential", "expected a model with at least one attention layer", "Watch")


def test_not_a_model() -> None:
    with pytest.raises(TypeError) as error:
        sp.watch(torch.zeros(3))  # type: ignore[arg-type]
    says(error, "got Tensor", "expected a torch.nn.Module", "Pass the model itself")


def test_attention_all_in_eval_mode() -> None:
    with pytest.raises(sp.EvalModeError) as error:
        sp.watch(Model(Attention()).eval())
    says(error, "all in eval mode", "'blocks.0.attention'", "model.train()", "allow_eval=True")


@pytest.mark.parametrize("make", [lambda: Model(Attention()), Encoder])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_second_watch(make: type[nn.Module], steps: int) -> None:
    model = make()
    with sp.watch(model) as probe:
        for _ in range(steps):
            loss_of(model, tokens()).backward()
            probe.step()
        for part in (model, next(model.children()), nn.ModuleList([model])):
            if part is not model and not any(m.training for m in part.modules()):
                continue
            with pytest.raises((sp.AlreadyWatchedError, sp.NoAttentionError)) as error:
                sp.watch(part)
            if part is model:
                says(error, "is watched already", "expected one probe a model", "probe.close()")
    sp.watch(model).close()  # once it is closed, the model can be watched again


def test_a_closed_probe() -> None:
    probe = sp.watch(Model(Attention()))
    probe.close()
    with pytest.raises(sp.ProbeClosedError) as error:
        probe.step()
    says(error, "a probe that is closed", "expected one that watches", "watch(model, ...) again")


def test_a_log_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    model = Model(Attention())
    with pytest.raises(sp.LogDirectoryError) as error:
        sp.watch(model, tmp_path / "file" / "run")
    says(error, str(tmp_path / "file" / "run"), "expected a directory", "Choose another one")
    sp.watch(model).close()  # the failed watch left nothing on the model


def test_a_loss_that_is_no_number_loses_nothing() -> None:
    model = Model(Attention())
    with sp.watch(model) as probe:
        loss_of(model, tokens()).backward()
        probe.step(loss=torch.zeros(3))
        (fault,) = probe.alerts
        assert fault.rule == "probe_fault"
        assert "got a tensor of shape (3,), expected one number" in fault.message
        assert "loss.mean()" in fault.message
        loss_of(model, tokens()).backward()
        probe.step(loss=1.0)
        assert list(probe._kept)[-1].scalars.loss == 1.0
        assert len(probe._kept) == 2


def test_an_unknown_statistic() -> None:
    with sp.watch(Model(Attention())) as probe, pytest.raises(KeyError) as error:
        probe.latest("entropie")
    says(error, "'entropie'", "no measured step has ended")


def test_a_plan_that_cannot_be() -> None:
    with pytest.raises(
        ValueError, match="got dense=-1, every=10, full_every=100, escalation=10; exp"
    ):
        sp.Plan(dense=-1)
    with pytest.raises(ValueError, match="every=0"):
        sp.every(0)


def test_a_name_that_the_package_does_not_have() -> None:
    with pytest.raises(AttributeError, match="no attribute 'wach'"):
        sp.wach  # noqa: B018
