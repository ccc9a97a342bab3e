"""The pure pieces of the demo."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stability_probe.demo.model import ByteModel, DigitModel
from stability_probe.demo.schedule import Schedule
from stability_probe.demo.tasks import LENGTH, corpus, load_task
from stability_probe.demo.verdict import divergence_step

STEPS = np.arange(5, 505, 5)


def curve(*parts: tuple[float, int]) -> np.ndarray:
    """A loss of 100 evaluations: falls from 5 to 1, then the given (value, count) parts."""
    tail = np.concatenate([np.full(n, value) for value, n in parts])
    return np.concatenate([np.linspace(5, 1, 100 - len(tail)), tail])


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        (curve((1.0, 40)), None),
        (curve((1.39, 40)), None),  # within 10 % of initial - best
        (curve((1.41, 40)), 305),
        (curve((1.41, 20), (1.0, 20)), None),  # came back
        (curve((1.0, 20), (2.0, 10), (1.0, 1), (2.0, 9)), 460),  # only what lasts to the end
        (curve((1.0, 34), (3.0, 6)), None),  # 25 steps: too short to tell
        (curve((1.0, 33), (3.0, 7)), 470),
        (curve((np.nan, 40)), 305),
        (curve((1.0, 20), (np.inf, 1), (1.0, 19)), None),
        (np.full(100, np.nan), None),
        (np.linspace(5, 1, 100), None),
    ],
)
def test_a_divergence_lasts_to_the_end(losses: np.ndarray, expected: int | None) -> None:
    assert divergence_step(STEPS, losses) == expected


def test_a_small_loss_has_an_absolute_margin() -> None:
    losses = np.concatenate([np.linspace(0.5, 0.1, 60), np.full(40, 0.34)])
    assert divergence_step(STEPS, losses) is None
    losses[60:] = 0.36
    assert divergence_step(STEPS, losses) == 305


def test_the_ramp_is_geometric_and_spares_everything_else() -> None:
    schedule = Schedule(start=100, ramp=50, hold=10, learning_rate=0.01, factor=100.0, warmup=20)
    assert schedule.steps == 160
    assert schedule.rates(10) == (0.005, 0.005)
    assert schedule.rates(100) == (0.01, 0.01)
    assert schedule.rates(125) == pytest.approx((0.1, 0.01))
    assert schedule.rates(150) == schedule.rates(160) == pytest.approx((1.0, 0.01))


def test_the_text_is_the_standard_library_and_its_evaluation_is_held_out() -> None:
    text = corpus()
    assert len(text) > 1_000_000
    assert torch.equal(text, corpus())
    assert bytes(text[:400].tolist()).isascii()
    task = load_task("text")
    inputs, targets = task.evaluation
    assert inputs.shape == targets.shape == (32, LENGTH)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(task.evaluation[0], load_task("text").evaluation[0])
    drawn = task.draw(torch.Generator().manual_seed(0))
    assert drawn[0].shape == (16, LENGTH)


def test_the_digits_are_whole_images() -> None:
    task = load_task("digits")
    images, labels = task.evaluation
    assert images.shape == (200, 8, 8)
    assert images.min() == -1
    assert images.max() == 1
    assert set(labels.tolist()) == set(range(10))


@pytest.mark.parametrize("qk_norm", [False, True])
def test_both_models_start_at_chance(qk_norm: bool) -> None:
    torch.manual_seed(0)
    for name, chance in (("text", 256), ("digits", 10)):
        task = load_task(name)
        model = task.model(qk_norm)
        assert isinstance(model, ByteModel | DigitModel)
        inputs, targets = task.evaluation
        loss = float(task.loss(model(inputs), targets).detach())
        assert loss == pytest.approx(np.log(chance), abs=1.0)


def test_patches_are_squares_of_the_image() -> None:
    """Changing one 2 x 2 square changes one patch embedding and no other."""
    model = DigitModel(qk_norm=False)
    seen = []
    model.embedding.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    image = torch.zeros(1, 8, 8)
    changed = image.clone()
    changed[0, 2:4, 6:8] = 1.0
    model(image), model(changed)
    assert (seen[0] != seen[1]).any(-1).nonzero().tolist() == [[0, 7]]
