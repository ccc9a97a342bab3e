"""Records to write, and what it means that two are the same."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import fields

import numpy as np
from hypothesis import strategies as st

from stability_probe.records import (
    Alert,
    FirstBad,
    LayerInfo,
    Level,
    Observation,
    Origin,
    RunHeader,
    Severity,
    State,
    StepRecord,
    StepScalars,
)
from stability_probe.stats.catalogue import CATALOGUE, DEFAULT_SET

SPECIAL = np.array(
    [np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-45, -1e-45, 3.4028235e38, 65504.0], np.float32
)
WRITTEN = ("qk_abs_max_logit", "logit_gap", "entropy", "entropy_ratio")
HEADER = RunHeader(
    created=1.5,
    layers=(LayerInfo("blocks.0.attn", 0, 4, "sdpa", "Attention"), LayerInfo("b.1", 1, 2)),
    statistics={"entropy": {"unit": "nats"}},
    versions={"numpy": "2"},
    plan="every 10 steps",
)


def record(step: int, *, layers: int = 2, heads: int = 3, measured: bool = True) -> StepRecord:
    """The record of a step: the same in every process, different for every step."""
    rng = np.random.default_rng(step)
    observations = [
        Observation(
            f"blocks.{i}.attn",
            i,
            {name: rng.normal(size=heads).astype(np.float32) for name in WRITTEN},
            sequences=8,
        )
        for i in range(layers)
    ]
    scalars = StepScalars(step, loss=1 / step, grad_norm=float(step), wall_time=1e9 + step)
    kept = tuple(observations) if measured else ()
    return StepRecord(scalars, kept, Level.DEFAULT if measured else Level.SENTINEL)


def same_float(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))


def same_scalars(a: StepScalars, b: StepScalars) -> bool:
    pairs = [(getattr(a, f.name), getattr(b, f.name)) for f in fields(StepScalars)]
    return all(
        same_float(x, y) if isinstance(x, float) and isinstance(y, float) else x == y
        for x, y in pairs
    )


def same_values(a: np.ndarray, b: np.ndarray) -> bool:
    """Bit by bit, apart from the many ways to write NaN."""
    if a.dtype != np.float32 or b.dtype != np.float32 or a.shape != b.shape:
        return False
    bits = np.ascontiguousarray(a).view(np.uint32) == np.ascontiguousarray(b).view(np.uint32)
    return bool(np.all(bits | (np.isnan(a) & np.isnan(b))))


def same_observation(a: Observation, b: Observation) -> bool:
    labels = ("layer", "layer_index", "sequences", "ranks", "heads")
    return (
        all(getattr(a, name) == getattr(b, name) for name in labels)
        and set(a.values) == set(b.values)
        and all(same_values(a.values[name], b.values[name]) for name in a.values)
    )


def same(a: StepRecord, b: StepRecord) -> bool:
    return (
        same_scalars(a.scalars, b.scalars)
        and a.level is b.level
        and len(a.observations) == len(b.observations)
        and all(map(same_observation, a.observations, b.observations))
    )


def assert_same(got: Sequence[StepRecord], expected: Sequence[StepRecord]) -> None:
    assert [r.step for r in got] == [r.step for r in expected]
    for a, b in zip(got, expected, strict=True):
        assert same(a, b), f"step {a.step}:\n{a}\n{b}"


floats = st.floats() | st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 5e-324])
texts = st.text(st.characters(), max_size=8) | st.sampled_from(["nan", "\ud800", "模型.層.0", ""])
names = st.sampled_from([*CATALOGUE, "one_of_my_own"])


@st.composite
def observations(draw: st.DrawFn, layer: str, index: int) -> Observation:
    heads = draw(st.integers(0, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = {}
    for name in draw(
        st.sampled_from([DEFAULT_SET, tuple(CATALOGUE)]) | st.lists(names, max_size=6)
    ):
        shape = (heads, 16) if name == "entropy_hist" else (heads,)
        any_bits = rng.integers(0, 2**32, shape, np.uint32).view(np.float32)
        special = SPECIAL[rng.integers(0, len(SPECIAL), shape)]
        values[name] = np.where(rng.random(shape) < rng.random(), special, any_bits)
    if draw(st.booleans()) and values:
        name = draw(st.sampled_from(sorted(values)))
        values[name] = np.full_like(values[name], np.nan)
    return Observation(
        layer, index, values, draw(st.integers(0, 2**31 - 1)), draw(st.integers(0, 2**31 - 1))
    )


@st.composite
def scalars(draw: st.DrawFn, step: int) -> StepScalars:
    optional = st.none() | floats
    bad = st.builds(
        FirstBad, texts, st.integers(0, 99), texts, st.integers(0, 2**40), st.booleans()
    )
    return StepScalars(
        step,
        loss=draw(optional),
        grad_norm=draw(optional),
        eval_loss=draw(optional),
        learning_rate=draw(optional),
        skipped=draw(st.booleans()),
        phase=draw(texts),
        first_bad=tuple(draw(st.lists(bad, max_size=2))),
        wall_time=draw(floats),
    )


@st.composite
def runs(draw: st.DrawFn) -> list[StepRecord]:
    """Records with rising steps; layers may share an index, come and go, and change their heads."""
    layers = draw(st.lists(st.tuples(texts, st.integers(0, 3)), max_size=4))
    steps = draw(st.lists(st.integers(0, 2**62), max_size=6, unique=True))
    records = []
    for step in sorted(steps):
        here = draw(st.just(layers) | st.lists(st.sampled_from(layers or [("x", 0)]), max_size=3))
        found = tuple(draw(observations(name, index)) for name, index in here)
        kept = found if draw(st.integers(0, 3)) else ()
        records.append(StepRecord(draw(scalars(step)), kept, draw(st.sampled_from(Level))))
    return records


alerts = st.builds(
    Alert,
    step=st.integers(0, 2**62),
    rule=texts,
    severity=st.sampled_from(Severity),
    state=st.sampled_from(State),
    layer=st.none() | texts,
    layer_index=st.none() | st.integers(0, 99),
    heads=st.lists(st.integers(0, 99), max_size=3).map(tuple),
    statistic=st.none() | texts,
    value=st.none() | floats,
    limit=st.none() | floats,
    window=st.none() | st.tuples(st.integers(0, 99), st.integers(0, 99)),
    cause=texts,
    remedies=st.lists(texts, max_size=2).map(tuple),
    message=texts,
    origin=st.sampled_from(Origin),
    superseded=st.booleans(),
)
