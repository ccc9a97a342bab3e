"""Recorded runs on disk, thinned and slowed down, as records that `replay` takes.

A folder holds `runs.csv`, a row per run with its label, and NAME.npz per run: `cfg` (JSON),
`glob` [steps, 7] with the training loss and the gradient norm first, `stats` [steps, 12,
layers * heads] and, in long runs, `stat_steps`, `extra` [n, 2, layers * heads] (largest logit
before any soft-cap, largest raw |q.k|) and `eval` [m, 2] (step index, loss on a fixed batch).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from stability_probe.records import Alert, Level, Observation, StepRecord, StepScalars

COLUMNS = {1: "entropy", 2: "entropy_ratio", 3: "softmax_slope", 4: "jacobian_trace"}
FP16_MAX = 65504.0
DENSE = 200  # steps that the default plan measures one by one


@dataclass(frozen=True, eq=False)
class Recording:
    """One recorded run and its label.

    Attributes:
        name: of its file.
        set: what kind of run it is: "attention" and "softcap" diverge by attention.
        split: "tune" or "check"; empty where the folder has none.
        fault: the step at which something was injected; 0 for nothing.
        diverged: the labelled step; None where it did not diverge.
        loss: training loss [steps].
        grad_norm: before clipping [steps].
        evaluated: step to the loss of a fixed batch.
        layers: step to its observations.
    """

    name: str
    set: str
    split: str
    fault: int
    diverged: int | None
    loss: list[float]
    grad_norm: list[float]
    evaluated: Mapping[int, float]
    layers: Mapping[int, tuple[Observation, ...]]


@dataclass(frozen=True, kw_only=True)
class Thinning:
    """What is left of a run: which steps are measured, what is given, how slow it is."""

    every: int = 1
    plan: bool = False
    stretch: int = 1
    with_loss: bool = True
    with_eval: bool = True

    def measured(self, run: Recording) -> list[int]:
        """The measured steps: of each interval the first recorded step at or after its start."""
        steps, last = [], -1
        for row in run.layers:
            step = row * self.stretch
            every = (1 if step <= DENSE else 10) if self.plan else self.every
            if (step - 1) // every != last:
                steps.append(step)
            last = (step - 1) // every
        return steps

    def of(self, run: Recording) -> Thinned:
        """The thinned run, for `replay`."""
        return Thinned(run, self)


@dataclass(frozen=True)
class Thinned:
    """A recording as seen through a thinning: what `replay` asks of a run."""

    run: Recording
    thinning: Thinning
    alerts: tuple[Alert, ...] = ()

    def records(self) -> Iterator[StepRecord]:
        """The run's records; every recorded step has its loss, measured ones statistics."""
        how, run = self.thinning, self.run
        measured = set(how.measured(run))
        for row, (loss, grad_norm) in enumerate(zip(run.loss, run.grad_norm, strict=True), 1):
            step = row * how.stretch
            scalars = StepScalars(
                step=step,
                loss=loss if how.with_loss else None,
                grad_norm=grad_norm,
                eval_loss=run.evaluated.get(row) if how.with_loss and how.with_eval else None,
            )
            layers = run.layers[row] if step in measured else ()
            yield StepRecord(scalars, layers, Level.DEFAULT if layers else Level.SENTINEL)


def recordings(
    folder: Path, *, lasting: bool = False, pre_cap: bool = False
) -> Iterator[Recording]:
    """Every run of a folder, in the order of its table.

    Args:
        folder: with `runs.csv` and the npz files.
        lasting: label long runs by the step from which the excess lasts to the end, not by the
            one from which nine tenths of the evaluations have it.
        pre_cap: give soft-capped layers a stand-in for their logits before the cap.
    """
    for row in pd.read_csv(folder / "runs.csv").to_dict("records"):
        with np.load(folder / f"{row['name']}.npz", allow_pickle=False) as data:
            arrays = {name: data[name] for name in data.files}
        cfg = json.loads(str(arrays["cfg"]))
        rows = arrays.get("stat_steps", np.arange(len(arrays["stats"])))
        evaluated = arrays.get("eval", np.empty((0, 2)))
        yield Recording(
            name=row["name"],
            set=row["set"],
            split=row.get("split", ""),
            fault=int(row["fault_start"]),
            diverged=_label(row, lasting=lasting),
            loss=arrays["glob"][:, 0].astype(float).tolist(),
            grad_norm=arrays["glob"][:, 1].astype(float).tolist(),
            evaluated={int(i) + 1: float(loss) for i, loss in evaluated},
            layers={
                int(i) + 1: _observations(arrays, n, cfg, pre_cap=pre_cap)
                for n, i in enumerate(rows)
            },
        )


def _label(row: Mapping[Any, Any], *, lasting: bool) -> int | None:
    """The step of divergence; the wider margin where a small batch makes the loss noisy."""
    if row["set"] not in ("attention", "softcap", "elsewhere"):
        return None
    if "t_div90" in row:
        step = row["t_div" if lasting else "t_div90"]
    else:
        step = row["t_div_m50"] if row["name"].startswith("pk_") else row["t_div_m25"]
    return None if math.isnan(step) else int(step)


def _observations(
    arrays: dict[str, Any], row: int, cfg: dict[str, Any], *, pre_cap: bool
) -> tuple[Observation, ...]:
    """One measured step's layers, under this project's names.

    Where a soft-cap hides the logits and they were not recorded before it, `pre_cap` lets their
    typical size, rms(q) rms(k) sqrt(width), stand for them; it is no maximum.
    """
    stats = arrays["stats"][row]
    named = {name: stats[column] for column, name in COLUMNS.items()}
    named["abs_max_logit"] = stats[0]
    if "extra" in arrays:
        named["qk_abs_max_logit"] = arrays["extra"][row, 0]
        named["fp16_headroom_log2"] = np.log2(FP16_MAX / np.maximum(arrays["extra"][row, 1], 1e-30))
        named["fp16_scores"] = np.full(stats.shape[1], float(bool(cfg.get("fp16"))))
    elif cfg["attn"] == "cap" and pre_cap:
        named["qk_abs_max_logit"] = stats[9] * stats[10] * math.sqrt(cfg["d"] / cfg["H"])
    elif cfg["attn"] != "cap":
        named["qk_abs_max_logit"] = stats[0]
    heads = cfg["H"]
    return tuple(
        Observation(
            f"layers.{layer}",
            layer,
            {
                n: v[layer * heads : (layer + 1) * heads].astype(np.float32)
                for n, v in named.items()
            },
        )
        for layer in range(stats.shape[1] // heads)
    )
