"""A recorded run judged again: the same records, the same alerts.

Shape suffixes: H heads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt

from stability_probe.alerts.rule import Rule
from stability_probe.errors import FrameError
from stability_probe.monitor import Monitor
from stability_probe.records import Alert, Level, Observation, Origin, StepRecord, StepScalars
from stability_probe.stats.catalogue import BETWEEN_SET, CATALOGUE, MAX_LOGIT

if TYPE_CHECKING:
    import pandas as pd

KEYS = ("step", "layer", "head")
LOSSES = ("loss", "grad_norm", "eval_loss", "learning_rate")
SCALARS = (*LOSSES, "skipped", "phase")
LAYER_COLUMNS = ("layer_index", "sequences", "ranks", "query_rows")
READABLE = (*MAX_LOGIT, "nonfinite", "fp16_headroom_log2")

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


class Recorded(Protocol):
    """A recorded run, as `stability_probe.load` gives it."""

    @property
    def alerts(self) -> Sequence[Alert]:
        """The alerts that were raised while the run was live."""

    def records(self) -> Iterator[StepRecord]:
        """The surviving records, in step order."""


def replay(
    source: str | os.PathLike[str] | Recorded | pd.DataFrame,
    *,
    rules: Sequence[Rule] | None = None,
) -> tuple[Alert, ...]:
    """The alerts of a recorded run, in step order.

    Rule alerts are computed anew from the records; they equal those of the live run where the
    rules are the same. What only the live probe could know (operational alerts: blindness, a
    full disk, a fault) and alerts on superseded steps are copied from the run as they are.

    Args:
        source: a run directory, a run, or a DataFrame with a row per step, layer and head:
            columns `step`, `layer` (int or str), `head` and one per statistic. Per step, and
            repeated over its rows, may come `loss`, `grad_norm`, `eval_loss`, `learning_rate`,
            `skipped` and `phase`; per layer `layer_index`, `sequences`, `ranks` and `query_rows`.
            A row without layer and head gives the scalars of a step that was not measured. An
            empty statistic is absent. In a float column of losses NaN means not given; to say
            that a loss really was NaN, use a column that tells the two apart (dtype object,
            where None is not given).
        rules: the rules to judge by; None for the stock rules.

    Raises:
        FrameError: the DataFrame lacks columns, holds a row twice, or a column has a wrong type.
        RunNotFoundError: the directory holds no recorded run.
    """
    if _is_frame(source):
        return _rule_alerts(_frame_records(source), rules)
    if isinstance(source, str | os.PathLike):
        from stability_probe.runlog.read import load

        run: Recorded = load(Path(source))
    else:
        run = source  # type: ignore[assignment]
    if not (hasattr(run, "records") and hasattr(run, "alerts")):
        raise TypeError(
            f"replay got a {type(source).__name__}; it takes a run directory, a run from "
            "stability_probe.load(), or a pandas DataFrame. For records in memory, feed "
            "stability_probe.monitor.Monitor().observe(record) one by one."
        )
    copied = [a for a in run.alerts if a.origin is Origin.OPERATIONAL or a.superseded]
    judged = _rule_alerts(run.records(), rules)
    return tuple(sorted([*copied, *judged], key=lambda alert: alert.step))


def _rule_alerts(records: Iterable[StepRecord], rules: Sequence[Rule] | None) -> tuple[Alert, ...]:
    monitor = Monitor(rules)
    return tuple(alert for record in records for alert in monitor.observe(record))


def _is_frame(source: object) -> TypeGuard[pd.DataFrame]:
    """Whether this is a DataFrame, without importing pandas for those who have none."""
    return type(source).__module__.partition(".")[0] == "pandas" and hasattr(source, "columns")


def _frame_records(frame: pd.DataFrame) -> Iterator[StepRecord]:
    """The records that a long DataFrame holds, in step order."""
    names = _statistics(frame)
    scalars = _step_scalars(frame, _whole(frame, "step"))
    rows = frame[~(frame["layer"].isna() & frame["head"].isna()).to_numpy()]
    observations = _observations(rows, names)
    for step, given in scalars.items():
        seen = observations.get(step, ())
        yield StepRecord(StepScalars(step=step, **given), seen, _level(seen))


def _level(seen: Sequence[Observation]) -> Level:
    """What was measured, to judge by what has a value."""
    if not seen:
        return Level.SENTINEL
    judged = (v for o in seen for name, v in o.values.items() if name not in BETWEEN_SET)
    return Level.BRACKET if all(np.isnan(v).all() for v in judged) else Level.DEFAULT


def _statistics(frame: pd.DataFrame) -> list[str]:
    """The columns that are statistics; raises where the frame cannot be judged at all."""
    got = ", ".join(map(str, frame.columns)) or "no columns"
    missing = [name for name in KEYS if name not in frame.columns]
    if missing:
        raise FrameError(
            f"The frame lacks {', '.join(missing)}; it has {got}. replay needs a row per step, "
            f"layer and head, with columns {', '.join(KEYS)}: rename yours, or melt a wide frame."
        )
    if not any(name in frame.columns for name in READABLE):
        raise FrameError(
            f"The frame holds no statistic that a rule reads; it has {got}. Give at least one of "
            f"{', '.join(READABLE)}, and entropy_ratio where you have it."
        )
    others = [str(n) for n in frame.columns if n not in (*KEYS, *SCALARS, *LAYER_COLUMNS)]
    return [name for name in others if name in CATALOGUE and name != "entropy_hist"] + [
        name for name in others if name not in CATALOGUE and frame[name].dtype.kind in "fiu"
    ]


def _numbers(frame: pd.DataFrame, name: str) -> Float64:
    """A column as float64, [rows]; what is missing becomes NaN."""
    import pandas as pd

    column = frame[name]
    try:
        if column.dtype.kind == "M":
            raise TypeError("it holds dates")
        return pd.to_numeric(column).to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError) as error:
        raise FrameError(
            f"Column {name!r} has type {column.dtype} and is not made of numbers ({error}). "
            f"Convert it, as in frame[{name!r}] = pandas.to_numeric(frame[{name!r}])."
        ) from error


def _whole(frame: pd.DataFrame, name: str) -> Int64:
    """A column of whole numbers, none missing and none negative, [rows]."""
    values = _numbers(frame, name)
    wrong = ~np.isfinite(values) | (values < 0) | (values != np.floor(values))
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise FrameError(
            f"Column {name!r} holds {values[row]} in row {row}; it needs whole numbers from 0 on "
            f"({int(wrong.sum())} of {len(values)} rows are not). Drop those rows or number them."
        )
    return values.astype(np.int64)


def _layers(rows: pd.DataFrame) -> tuple[npt.NDArray[np.intp], list[str], list[int]]:
    """Each row's layer as a code, and the name and index by code."""
    import pandas as pd

    column = rows["layer"]
    if isinstance(column.dtype, pd.CategoricalDtype):  # its categories are in layer order
        codes, found = column.cat.codes.to_numpy(), column.cat.categories
    else:
        codes, found = pd.factorize(column)
    if (codes < 0).any():
        row = int(np.flatnonzero(codes < 0)[0])
        raise FrameError(
            f"Row {row} of the measured rows has a head but no layer. Name its layer, or leave "
            "the head empty too where the row only gives a step's loss."
        )
    names, indices = [], []
    for order, layer in enumerate(found):
        whole = isinstance(layer, int | float | np.integer | np.floating) and layer == int(layer)
        if not whole and not isinstance(layer, str):
            raise FrameError(
                f"Column 'layer' holds {layer!r} ({type(layer).__name__}); it needs names (str) "
                "or whole numbers."
            )
        names.append(str(int(layer)) if whole else str(layer))
        indices.append(int(layer) if whole else order)
    return codes.astype(np.intp), names, indices


def _observations(rows: pd.DataFrame, names: list[str]) -> dict[int, tuple[Observation, ...]]:
    """The layers of each measured step, in layer order."""
    if rows.empty:
        return {}
    codes, layers, indices = _layers(rows)
    steps, heads = _whole(rows, "step"), _whole(rows, "head")
    _refuse_duplicates(steps, codes, heads, layers)
    extra = {n: _whole(rows, n) if n in rows.columns else None for n in LAYER_COLUMNS}
    index = (
        np.array(indices, dtype=np.int64)[codes]
        if extra["layer_index"] is None
        else extra["layer_index"]
    )
    order = np.lexsort((heads, codes, index, steps))
    table = {name: _numbers(rows, name).astype(np.float32)[order] for name in names}
    starts = np.flatnonzero(np.diff(steps[order], prepend=-1) | np.diff(codes[order], prepend=-1))
    by_step: dict[int, list[Observation]] = {}
    for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
        first = order[start]
        observation = Observation(
            layer=layers[codes[first]],
            layer_index=int(index[first]),
            values=_by_head(table, heads[order[start:end]], slice(start, end)),
            sequences=0 if extra["sequences"] is None else int(extra["sequences"][first]),
            ranks=1 if extra["ranks"] is None else int(extra["ranks"][first]),
            rows=0 if extra["query_rows"] is None else int(extra["query_rows"][first]),
        )
        by_step.setdefault(int(steps[first]), []).append(observation)
    return {step: tuple(found) for step, found in by_step.items()}


def _by_head(table: dict[str, Float32], heads: Int64, rows: slice) -> dict[str, Float32]:
    """One layer's statistics, [H] each; a head without a row is absent."""
    if heads[-1] == len(heads) - 1:
        return {name: column[rows] for name, column in table.items()}
    values = {}
    for name, column in table.items():
        values[name] = np.full(int(heads[-1]) + 1, np.nan, dtype=np.float32)
        values[name][heads] = column[rows]
    return values


def _refuse_duplicates(
    steps: Int64, codes: npt.NDArray[np.intp], heads: Int64, layers: list[str]
) -> None:
    order = np.lexsort((heads, codes, steps))
    same = np.ones(max(len(order) - 1, 0), dtype=bool)
    for values in (steps, codes, heads):
        same &= np.diff(values[order]) == 0
    if same.any():
        row = order[int(np.flatnonzero(same)[0])]
        raise FrameError(
            f"Step {steps[row]}, layer {layers[codes[row]]!r}, head {heads[row]} stands in more "
            f"than one row ({int(same.sum())} rows too many). Keep one of each, as in "
            "frame.drop_duplicates(['step', 'layer', 'head'], keep='last')."
        )


def _step_scalars(frame: pd.DataFrame, steps: Int64) -> dict[int, dict[str, Any]]:
    """Per step, in step order, what the frame gives of `StepScalars`."""
    scalars: dict[int, dict[str, Any]] = {int(step): {} for step in np.unique(steps)}
    for name in SCALARS:
        if name not in frame.columns:
            continue
        once = np.ones(len(frame), dtype=bool)
        if frame[name].dtype != object:  # there None and NaN differ, and pandas equates them
            once = ~frame.duplicated(["step", name]).to_numpy()
        for step, value in zip(steps[once].tolist(), _given(frame[once], name), strict=True):
            if value is None:
                continue
            told = scalars[step].setdefault(name, value)
            if told != value and not (told != told and value != value):
                raise FrameError(
                    f"Step {step} has more than one {name}: {told} and {value}. It belongs to the "
                    "step, not to a head: repeat the same value over the step's rows."
                )
    return scalars


def _given(frame: pd.DataFrame, name: str) -> list[Any]:
    """A scalar column, None where it is not given."""
    import pandas as pd

    column = frame[name]
    if name == "phase":
        return [
            None if missing else str(v) for v, missing in zip(column, column.isna(), strict=True)
        ]
    values = _numbers(frame, name).tolist()
    if column.dtype == object:
        missing = [v is None or v is pd.NA for v in column]
    else:
        missing = column.isna().tolist()
    if name == "skipped":
        return [None if m else bool(v) for v, m in zip(values, missing, strict=True)]
    return [None if m else v for v, m in zip(values, missing, strict=True)]
