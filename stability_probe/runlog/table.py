"""Record batches as one long pandas table.

Shape suffixes: R rows of a table or batch, N bins.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from stability_probe.runlog.schema import HISTOGRAM, in_order
from stability_probe.runlog.unpack import label, statistic

if TYPE_CHECKING:
    import pyarrow as pa

    from stability_probe.records import Float32
    from stability_probe.runlog.unpack import StreamHead


def long_table(
    batches: Iterable[tuple[pa.RecordBatch, StreamHead]], *, histograms: bool
) -> pd.DataFrame:
    """One row a (step, layer, head), one float32 column a statistic.

    Args:
        batches: in the order of their steps.
        histograms: whether `entropy_hist` is a column too, of arrays [16] or None.
    """
    labels: dict[str, list[Any]] = {"step": [], "layer": [], "head": []}
    chunks: dict[str, dict[int, Float32]] = {}  # statistic -> batch -> its rows
    codes: dict[tuple[int, str], int] = {}  # layer -> its number in this table
    sizes = []
    for number, (batch, head) in enumerate(batches):
        order_R = _order(batch)
        code_L = np.array([codes.setdefault(layer, len(codes)) for layer in head.layers])
        labels["step"].append(label(batch, "step")[order_R])
        labels["layer"].append(code_L[label(batch, "layer")[order_R]])
        labels["head"].append(label(batch, "head")[order_R])
        sizes.append(len(order_R))
        for name in head.statistics:
            column = batch.column(name)
            if column.null_count < len(column) and (histograms or name != HISTOGRAM):
                chunks.setdefault(name, {})[number] = statistic(batch, name)[order_R]
    columns: dict[str, Any] = {
        "step": _joined(labels["step"], np.int64),
        "layer": _categories(_joined(labels["layer"], np.int64), list(codes)),
        "head": _joined(labels["head"], np.int16),
    }
    for name in in_order(chunks):
        columns[name] = _filled(chunks.pop(name), sizes)
    return pd.DataFrame(columns, copy=False)


def _order(batch: pa.RecordBatch) -> np.ndarray[Any, np.dtype[np.intp]]:
    """The rows that have a head, by layer index; those of one layer stay together."""
    index_R = label(batch, "layer_index")
    order_R = np.argsort(index_R, kind="stable")
    return np.asarray(order_R[label(batch, "head")[order_R] >= 0])


def _joined(parts: list[Any], dtype: type[np.generic]) -> np.ndarray[Any, Any]:
    return np.concatenate([np.empty(0, dtype), *parts], dtype=dtype)


def _categories(code_R: np.ndarray[Any, Any], layers: list[tuple[int, str]]) -> pd.Categorical:
    names = list(dict.fromkeys(name for _, name in sorted(layers)))
    place = {name: i for i, name in enumerate(names)}
    to_place = np.array([place[name] for _, name in layers], dtype=np.int64)
    return pd.Categorical.from_codes(to_place[code_R], categories=pd.Index(names, dtype=object))


def _filled(chunks: dict[int, Float32], sizes: list[int]) -> Float32 | list[Float32 | None]:
    width = next(iter(chunks.values())).shape[1:]
    if width:
        return [row for i, n in enumerate(sizes) for row in chunks.get(i, [None] * n)]
    gap_R = np.full(max(sizes), np.nan, np.float32)
    return np.concatenate([chunks[i] if i in chunks else gap_R[:n] for i, n in enumerate(sizes)])
