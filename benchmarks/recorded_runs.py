"""How well the stock rules warn on recorded runs: recall, lead, false alarms.

    python benchmarks/recorded_runs.py DIR [--every N | --plan] [--no-loss] [--no-eval] [--json]

DIR holds `runs.csv`, a row per run with its label, and NAME.npz per run: `cfg` (JSON), `glob`
[steps, 7] with the training loss and the gradient norm first, `stats` [steps, 12, layers * heads]
and, in long runs, `stat_steps`, `extra` [n, 2, layers * heads] (largest logit before any
soft-cap, largest raw |q.k|) and `eval` [m, 2] (step index, loss on a fixed batch).

A divergence counts as caught by a rule that fires between the start of the fault and the
divergence; what fires before the fault is a false alarm. "active" asks for more: an episode
that is still open in the last half of the way, 10 steps or more before the divergence.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from stability_probe.alerts.stock import stock_rules
from stability_probe.records import (
    Alert,
    Level,
    Observation,
    Severity,
    State,
    StepRecord,
    StepScalars,
)
from stability_probe.replaying import replay

COLUMNS = {1: "entropy", 2: "entropy_ratio", 3: "softmax_slope", 4: "jacobian_trace"}
LEAD = 10  # steps that a warning must come ahead to be of use
ANY = "any warning or worse"


@dataclass(frozen=True)
class Episode:
    """One firing alert, and the step at which it was over (infinite: never)."""

    rule: str
    severity: Severity
    start: int
    end: float


@dataclass(frozen=True)
class Outcome:
    """A run's label and what the rules said."""

    name: str
    set: str
    stable: bool
    fault: int
    diverged: int | None
    episodes: tuple[Episode, ...]


@dataclass(frozen=True)
class RecordedRun:
    """A run read from its npz file, thinned: what `replay` asks of a run."""

    path: Path
    measured: Callable[[int], bool]
    with_loss: bool
    with_eval: bool

    alerts: tuple[Alert, ...] = ()

    def records(self) -> Iterator[StepRecord]:
        """The run's records; every step has its loss, measured steps their statistics."""
        with np.load(self.path, allow_pickle=False) as data:
            arrays = {name: data[name] for name in data.files}
        cfg = json.loads(str(arrays["cfg"]))
        rows = arrays.get("stat_steps", np.arange(len(arrays["stats"])))
        row_of = {int(i) + 1: row for row, i in enumerate(rows)}
        evaluated = {int(i) + 1: float(loss) for i, loss in arrays.get("eval", np.empty((0, 2)))}
        for i, (loss, grad_norm) in enumerate(arrays["glob"][:, :2]):
            step = i + 1
            scalars = StepScalars(
                step=step,
                loss=float(loss) if self.with_loss else None,
                grad_norm=float(grad_norm),
                eval_loss=evaluated.get(step) if self.with_loss and self.with_eval else None,
            )
            layers: tuple[Observation, ...] = ()
            if step in row_of and self.measured(step):
                layers = _observations(arrays, row_of[step], cfg)
            yield StepRecord(scalars, layers, Level.DEFAULT if layers else Level.SENTINEL)


def _observations(arrays: dict[str, Any], row: int, cfg: dict[str, Any]) -> tuple[Observation, ...]:
    """One measured step's layers, under this project's names."""
    stats = arrays["stats"][row]
    named = {name: stats[column] for column, name in COLUMNS.items()}
    named["abs_max_logit"] = stats[0]
    if "extra" in arrays:
        named["qk_abs_max_logit"] = arrays["extra"][row, 0]
        named["fp16_headroom_log2"] = np.log2(65504.0 / np.maximum(arrays["extra"][row, 1], 1e-30))
        named["fp16_scores"] = np.full(stats.shape[1], float(bool(cfg.get("fp16"))))
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


def _label(row: Mapping[Any, Any]) -> int | None:
    """The step of divergence; the wider margin where a small batch makes the loss noisy."""
    if "t_div90" in row:
        step = row["t_div90"]
    else:
        step = row["t_div_m50"] if row["name"].startswith("pk_") else row["t_div_m25"]
    return None if step is None or math.isnan(step) else int(step)


def _episodes(alerts: tuple[Alert, ...]) -> tuple[Episode, ...]:
    over = [a for a in alerts if a.state is State.RESOLVED]
    return tuple(
        Episode(
            alert.rule,
            alert.severity,
            alert.step,
            min(
                (o.step for o in over if o.rule == alert.rule and o.step > alert.step),
                default=math.inf,
            ),
        )
        for alert in alerts
        if alert.state is State.FIRING
    )


def judge(folder: Path, args: argparse.Namespace) -> list[Outcome]:
    """Replay every run of the folder."""
    outcomes = []
    for row in pd.read_csv(folder / "runs.csv").to_dict("records"):
        run = RecordedRun(
            folder / f"{row['name']}.npz", _plan(args), not args.no_loss, not args.no_eval
        )
        if args.match and args.match not in row["name"]:
            continue
        outcomes.append(
            Outcome(
                name=row["name"],
                set=row["set"],
                stable=row["group"].startswith("stable"),
                fault=int(row["fault_start"]),
                diverged=_label(row) if row["set"] in ("attention", "softcap") else None,
                episodes=_episodes(replay(run)),
            )
        )
    return outcomes


def _plan(args: argparse.Namespace) -> Callable[[int], bool]:
    if args.plan:
        return lambda step: step <= 200 or step % 10 == 1
    return lambda step: (step - 1) % args.every == 0


def _of(outcome: Outcome, rule: str, least: Severity) -> list[Episode]:
    return [e for e in outcome.episodes if rule in (ANY, e.rule) and e.severity.rank >= least.rank]


def caught(outcomes: list[Outcome], rule: str, least: Severity) -> dict[str, Any]:
    """Recall and lead on the runs that diverged."""
    leads, active, early = [], 0, 0
    for run in outcomes:
        assert run.diverged is not None
        found = _of(run, rule, least)
        in_time = [e for e in found if run.fault <= e.start <= run.diverged]
        leads += [run.diverged - min(e.start for e in in_time)] if in_time else []
        halfway = (run.fault + run.diverged) / 2
        active += any(e.end > halfway and e.start <= run.diverged - LEAD for e in in_time)
        early += any(e.start < run.fault for e in found)
    return {
        "runs": len(outcomes),
        "caught": len(leads),
        "lead_10": sum(lead >= LEAD for lead in leads),
        "median_lead": median(leads) if leads else None,
        "active": active,
        "before_fault": early,
    }


def fired(outcomes: list[Outcome], rule: str, least: Severity) -> dict[str, int]:
    """Runs in which the rule fired at all, and how often."""
    found = [_of(run, rule, least) for run in outcomes]
    return {
        "runs": len(outcomes),
        "fired": sum(bool(f) for f in found),
        "episodes": sum(len(f) for f in found),
    }


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    """Every figure, by rule and set."""
    rules = [(ANY, Severity.WARNING)] + [
        (rule.name, least) for rule in stock_rules() for least in (Severity.INFO, Severity.WARNING)
    ]
    result: dict[str, Any] = {}
    for rule, least in rules:
        cells: dict[str, Any] = {}
        for name in sorted({run.set for run in outcomes}):
            members = [run for run in outcomes if run.set == name]
            positive = [run for run in members if run.diverged is not None]
            cells[name] = caught(positive, rule, least) if positive else fired(members, rule, least)
        cells["stable"] = fired([run for run in outcomes if run.stable], rule, least)
        result[rule if rule == ANY else f"{rule} >= {least}"] = cells
    return result


def show(result: dict[str, Any]) -> None:
    """Print the figures as text, leaving out rules that never fired."""
    for rule, cells in result.items():
        if not any(cell.get("caught") or cell.get("fired") for cell in cells.values()):
            continue
        print(rule)
        for name, cell in cells.items():
            if "caught" in cell:
                print(
                    f"  {name:10} caught {cell['caught']}/{cell['runs']}, with lead >= {LEAD}: "
                    f"{cell['lead_10']}, median lead {cell['median_lead']}, active "
                    f"{cell['active']}, before the fault {cell['before_fault']}"
                )
            else:
                fired_in = f"{cell['fired']}/{cell['runs']}"
                print(f"  {name:10} fired in {fired_in} ({cell['episodes']} alerts)")


def main() -> None:
    parser = argparse.ArgumentParser(description="Score the stock rules on recorded runs.")
    parser.add_argument("folder", type=Path, help="a folder with runs.csv and NAME.npz files")
    thinned = parser.add_mutually_exclusive_group()
    thinned.add_argument("--every", type=int, default=1, help="measure every so many steps")
    thinned.add_argument("--plan", action="store_true", help="200 steps densely, then every 10")
    parser.add_argument("--no-loss", action="store_true", help="as if no loss were given")
    parser.add_argument("--no-eval", action="store_true", help="judge by the training loss")
    parser.add_argument("--match", default="", help="only runs whose name holds this")
    parser.add_argument("--list", action="store_true", help="also list every run's alerts")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    outcomes = judge(args.folder, args)
    if args.list:
        for run in outcomes:
            told = ", ".join(f"{e.rule}:{e.severity}@{e.start}" for e in run.episodes)
            print(f"{run.set:9} {run.name:24} fault {run.fault} t_div {run.diverged}: {told}")
    result = summary(outcomes)
    print(json.dumps(result, indent=1)) if args.json else show(result)


if __name__ == "__main__":
    main()
