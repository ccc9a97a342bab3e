"""Records in memory as the long table that a run directory gives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from stability_probe.records import Observation, StepRecord
from stability_probe.runlog.schema import HISTOGRAM, in_order

if TYPE_CHECKING:
    from stability_probe.records import Float32


def observations_frame(records: Iterable[StepRecord]) -> pd.DataFrame:
    """One row a (step, layer, head), one float32 column a statistic; as `Run.frame`.

    Statistics that a record does not have are NaN; a statistic that none has, and the
    histogram, have no column.
    """
    seen = [(r.step, o) for r in records for o in r.observations]
    seen.sort(key=lambda pair: (pair[0], pair[1].layer_index))
    names = {n for _, o in seen for n, v in o.values.items() if not np.isnan(v).all()}
    layers = {o.layer: o.layer_index for _, o in seen}
    order = sorted(layers, key=lambda name: layers[name])
    columns = {
        "step": np.repeat([s for s, _ in seen], [o.heads for _, o in seen]).astype(np.int64),
        "layer": pd.Categorical(
            [o.layer for _, o in seen for _ in range(o.heads)],
            categories=pd.Index(order, dtype=object),
        ),
        "head": _joined([np.arange(o.heads, dtype=np.int16) for _, o in seen], np.int16),
    }
    for name in in_order(names - {HISTOGRAM}):
        columns[name] = _joined([_values(o, name) for _, o in seen], np.float32)
    return pd.DataFrame(columns)


def _values(observation: Observation, name: str) -> Float32:
    absent = np.full(observation.heads, np.nan, np.float32)
    return np.asarray(observation.values.get(name, absent))


def _joined(parts: list[np.ndarray[Any, Any]], dtype: type) -> np.ndarray[Any, Any]:
    return np.concatenate([np.empty(0, dtype), *parts], dtype=dtype)
