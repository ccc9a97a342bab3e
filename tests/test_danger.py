"""Which records call for more measuring."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stability_probe.danger import GROWTH, HIGH_LOGIT, Dangers
from stability_probe.records import FirstBad, Level, Observation, StepRecord, StepScalars

HEADS = 8


def record(
    step: int, level: Level = Level.DEFAULT, *, bad: Any = (), phase: str = "", **values: Any
) -> StepRecord:
    arrays = {n: np.broadcast_to(np.float32(v), HEADS).copy() for n, v in values.items()}
    seen = (Observation("layer", 0, arrays),) if arrays else ()
    return StepRecord(StepScalars(step=step, first_bad=bad, phase=phase), seen, level)


def one_head(value: float, others: float) -> np.ndarray:
    row = np.full(HEADS, others, np.float32)
    row[3] = value
    return row


def calm(dangers: Dangers, steps: int = 10, **values: Any) -> None:
    for step in range(steps):
        assert not dangers.judge(record(step, **{"qk_abs_max_logit": 30, **values}))


@pytest.mark.parametrize(
    ("level", "name"),
    [
        (Level.DEFAULT, "qk_abs_max_logit"),
        (Level.FULL, "abs_max_logit"),
        (Level.SEQUENCE, "qk_abs_max_logit"),
        (Level.BRACKET, "max_logit_low"),
        (Level.BRACKET, "rotating_max_logit"),
    ],
)
def test_one_head_that_grew_is_danger(level: Level, name: str) -> None:
    dangers = Dangers()
    calm(dangers)
    nearly = GROWTH * 30 * 0.99
    assert not dangers.judge(record(20, level, **{name: one_head(nearly, 1.0)}))
    assert dangers.judge(record(21, level, **{name: one_head(GROWTH * 30, 1.0)}))


def test_growth_of_small_logits_is_what_training_does() -> None:
    dangers = Dangers()
    calm(dangers, qk_abs_max_logit=1.0)
    assert not dangers.judge(record(20, qk_abs_max_logit=HIGH_LOGIT * 0.99))


def test_a_bound_from_below_is_no_sample_of_the_past() -> None:
    dangers = Dangers()
    calm(dangers)
    for step in range(10, 30):  # as loose as bounds are while logits are small
        assert not dangers.judge(record(step, Level.BRACKET, max_logit_low=5.0))
    assert not dangers.judge(record(30, qk_abs_max_logit=31.0))


def test_entropy_that_halves_in_one_head_is_danger() -> None:
    dangers = Dangers()
    calm(dangers, entropy_ratio=0.6)
    assert dangers.judge(record(11, qk_abs_max_logit=30, entropy_ratio=one_head(0.3, 0.6)))


def test_the_entropy_of_one_sequence_says_nothing_of_all():
    dangers = Dangers()
    calm(dangers, entropy_ratio=0.6)
    assert not dangers.judge(record(11, Level.SEQUENCE, qk_abs_max_logit=30, entropy_ratio=0.1))


def test_a_level_that_stays_is_calm_again() -> None:
    dangers = Dangers()
    calm(dangers)
    told = [dangers.judge(record(step, qk_abs_max_logit=60)) for step in range(11, 31)]
    assert told[:5] == [True] * 5
    assert not any(told[5:])


def test_a_first_bad_value_is_danger_once() -> None:
    dangers = Dangers()
    bad = (FirstBad("layer", 0, "q", 11),)
    explained = (FirstBad("layer", 0, "output", 10, explained=True),)
    assert not dangers.judge(record(10, Level.SENTINEL, bad=explained))
    assert dangers.judge(record(11, Level.SENTINEL, bad=bad))
    assert not dangers.judge(record(12, Level.SENTINEL, bad=bad))


def test_counts_of_bad_values_are_danger_when_they_begin() -> None:
    dangers = Dangers()
    calm(dangers, nonfinite=0)
    told = [dangers.judge(record(s, qk_abs_max_logit=30, nonfinite=4)) for s in range(11, 21)]
    assert told == [True] + [False] * 9


def test_headroom_counts_only_where_the_run_forms_float16_scores() -> None:
    for real in (0, 1):
        dangers = Dangers()
        calm(dangers, fp16_scores=real, fp16_headroom_log2=1.0)
        worse = record(11, qk_abs_max_logit=30, fp16_scores=real, fp16_headroom_log2=-0.1)
        assert dangers.judge(worse) == bool(real)


def test_a_phase_starts_without_a_past() -> None:
    dangers = Dangers()
    calm(dangers)
    assert not dangers.judge(record(20, phase="longer", qk_abs_max_logit=300))


def test_absent_values_are_no_danger() -> None:
    dangers = Dangers()
    calm(dangers, entropy_ratio=0.5)
    assert not dangers.judge(record(11, qk_abs_max_logit=np.nan, entropy_ratio=np.nan))
    assert not dangers.judge(record(12))


def test_another_number_of_heads_starts_anew() -> None:
    dangers = Dangers()
    calm(dangers)
    seen = (Observation("layer", 0, {"qk_abs_max_logit": np.full(2, 90, np.float32)}),)
    assert not dangers.judge(StepRecord(StepScalars(step=20), seen, Level.DEFAULT))
