"""How well the stock rules warn on recorded runs: recall, lead, false alarms, attribution.

    python benchmarks/recorded_runs.py DIR [--every N | --plan] [--stretch N] [--no-loss]
        [--no-eval] [--split tune|check] [--pre-cap]
        [--lasting] [--grid] [--list] [--json]

DIR holds `runs.csv`, a row per run with its label, and NAME.npz per run, as `recorded_files.py`
reads them. A divergence counts as caught by a rule that fires between the start of the fault and
the divergence, and in time where that is 10 steps or more before. "active" asks for more: an
episode that is open in the last half of the way, 10 steps or more before the divergence. What
fires before the fault, or in a run that does not diverge, is a false alarm; so is, as an error of
attribution, a rule about attention that warns before a divergence that begins elsewhere. Bounds
are Wilson's, at 95 %.

`--stretch 4` makes a run four times slower: row i is step 4 i, and the steps between give
nothing. `--grid` replays the runs at several speeds and cadences and prints one line for each.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from recorded_files import Recording, Thinning, recordings

from stability_probe.alerts.stock import stock_rules
from stability_probe.records import Alert, Severity, State
from stability_probe.replaying import replay

LEAD = 10  # steps that a warning must come ahead to be of use
ANY, ATTENTION = "any warning or worse", "attention, warning or worse"
ABOUT_ATTENTION = ("logit_growth", "attention_divergence", "entropy_collapse")
STRETCHES, CADENCES = (1, 4, 10), (1, 10, 20, 50, 100)
ENOUGH = 8  # samples between fault and divergence from which on recall is promised


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

    run: Recording
    fault: int
    diverged: int | None
    samples: int  # measured between fault and divergence
    episodes: tuple[Episode, ...]


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


def judge(runs: list[Recording], thinning: Thinning) -> list[Outcome]:
    """Replay every run."""
    outcomes = []
    for run in runs:
        slow = thinning.stretch
        fault, end = run.fault * slow, None if run.diverged is None else run.diverged * slow
        way = [s for s in thinning.measured(run) if end is not None and fault <= s < end]
        episodes = _episodes(replay(thinning.of(run)))
        outcomes.append(Outcome(run, fault, end, len(way), episodes))
    return outcomes


def wilson(hits: int, runs: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    if not runs:
        return 0.0, 1.0
    share, norm = hits / runs, 1 + z * z / runs
    middle = (share + z * z / (2 * runs)) / norm
    half = z * math.sqrt(share * (1 - share) / runs + z * z / (4 * runs * runs)) / norm
    return max(middle - half, 0.0), min(middle + half, 1.0)


def _of(outcome: Outcome, rule: str, least: Severity) -> list[Episode]:
    rules = {ANY: None, ATTENTION: ABOUT_ATTENTION}.get(rule, (rule,))
    return [
        e
        for e in outcome.episodes
        if (rules is None or e.rule in rules) and e.severity.rank >= least.rank
    ]


def caught(outcomes: list[Outcome], rule: str, least: Severity) -> dict[str, Any]:
    """Recall and lead on the runs that diverged."""
    leads, active, early, missed = [], 0, 0, []
    for outcome in outcomes:
        fault, end = outcome.fault, outcome.diverged
        assert end is not None
        found = _of(outcome, rule, least)
        in_time = [e for e in found if fault <= e.start <= end]
        lead = end - min(e.start for e in in_time) if in_time else -1
        leads += [lead] if in_time else []
        on = any(e.end > (fault + end) / 2 and e.start <= end - LEAD for e in in_time)
        active += on
        early += any(e.start < fault for e in found)
        if lead < LEAD or not on:
            missed.append(outcome.run.name)
    lead_10 = sum(lead >= LEAD for lead in leads)
    return {
        "runs": len(outcomes),
        "caught": len(leads),
        "lead_10": lead_10,
        "bounds": wilson(lead_10, len(outcomes)),
        "median_lead": median(leads) if leads else None,
        "active": active,
        "before_fault": early,
        "missed": missed,
    }


def fired(outcomes: list[Outcome], rule: str, least: Severity) -> dict[str, Any]:
    """Runs in which the rule fired at all, and how often."""
    found = {o.run.name: _of(o, rule, least) for o in outcomes}
    hits = [name for name, episodes in found.items() if episodes]
    return {
        "runs": len(outcomes),
        "fired": len(hits),
        "bounds": wilson(len(hits), len(outcomes)),
        "episodes": sum(len(f) for f in found.values()),
        "where": hits,
    }


def misattributed(outcomes: list[Outcome], least: Severity) -> dict[str, Any]:
    """Divergences that begin elsewhere and that a rule about attention announced."""
    before = [
        Outcome(
            o.run,
            o.fault,
            o.diverged,
            o.samples,
            tuple(e for e in o.episodes if e.start <= (o.diverged or math.inf)),
        )
        for o in outcomes
    ]
    return fired(before, ATTENTION, least)


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    """Every figure, by rule and set."""
    rules = [(ANY, Severity.WARNING), (ATTENTION, Severity.WARNING)] + [
        (rule.name, least)
        for rule in stock_rules()
        for least in (Severity.INFO, Severity.WARNING, Severity.CRITICAL)
    ]
    result: dict[str, Any] = {}
    for rule, least in rules:
        cells: dict[str, Any] = {}
        for name in sorted({o.run.set for o in outcomes}):
            members = [o for o in outcomes if o.run.set == name]
            if name in ("attention", "softcap"):
                cells[name] = caught(members, rule, least)
            else:
                cells[name] = fired(members, rule, least)
        result[rule if rule in (ANY, ATTENTION) else f"{rule} >= {least}"] = cells
    elsewhere = [o for o in outcomes if o.run.set == "elsewhere"]
    result["attribution errors"] = {"elsewhere": misattributed(elsewhere, Severity.WARNING)}
    return result


def show(result: dict[str, Any], *, names: bool) -> None:
    """Print the figures as text, leaving out rules that never fired."""
    for rule, cells in result.items():
        if not any(cell.get("caught") or cell.get("fired") for cell in cells.values()):
            continue
        print(rule)
        for name, cell in cells.items():
            low, high = (f"{100 * bound:.0f}" for bound in cell["bounds"])
            if "caught" in cell:
                print(
                    f"  {name:10} caught {cell['caught']}/{cell['runs']}, with lead >= {LEAD}: "
                    f"{cell['lead_10']} ({low}-{high} %), median lead {cell['median_lead']}, "
                    f"active {cell['active']}, before the fault {cell['before_fault']}"
                )
            else:
                print(
                    f"  {name:10} fired in {cell['fired']}/{cell['runs']} ({low}-{high} %, "
                    f"{cell['episodes']} alerts)"
                )
            listed = cell.get("missed", cell.get("where"))
            if names and listed:
                print(f"             {', '.join(listed)}")


def show_grid(runs: list[Recording]) -> None:
    """One line for each speed and cadence: recall where there is something to judge by."""
    for stretch in STRETCHES:
        for every in CADENCES:
            outcomes = judge(runs, Thinning(every=every, stretch=stretch))
            bad = [o for o in outcomes if o.run.set == "attention"]
            enough = caught([o for o in bad if o.samples >= ENOUGH], ANY, Severity.WARNING)
            false = {
                name: fired([o for o in outcomes if o.run.set == name], ANY, Severity.WARNING)
                for name in ("ordinary", "hard")
            }
            print(
                f"{stretch:2}x slower, every {every:3}: lead >= {LEAD} in {enough['lead_10']}/"
                f"{enough['runs']} with {ENOUGH} samples, active {enough['active']}, median lead "
                f"{enough['median_lead']}; "
                + ", ".join(f"{n} {c['fired']}/{c['runs']}" for n, c in false.items())
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="Score the stock rules on recorded runs.")
    parser.add_argument("folder", type=Path, help="a folder with runs.csv and NAME.npz files")
    thinned = parser.add_mutually_exclusive_group()
    thinned.add_argument("--every", type=int, default=1, help="measure every so many steps")
    thinned.add_argument("--plan", action="store_true", help="200 steps densely, then every 10")
    thinned.add_argument("--grid", action="store_true", help="several speeds and cadences")
    parser.add_argument("--stretch", type=int, default=1, help="as if so many times slower")
    parser.add_argument("--no-loss", action="store_true", help="as if no loss were given")
    parser.add_argument("--no-eval", action="store_true", help="judge by the training loss")
    parser.add_argument("--split", default="", help="only the runs of this split")
    parser.add_argument("--match", default="", help="only runs whose name holds this")
    parser.add_argument("--lasting", action="store_true", help="t_div, not t_div90, as the label")
    parser.add_argument(
        "--pre-cap", action="store_true", help="a stand-in for logits before a soft-cap"
    )
    parser.add_argument("--list", action="store_true", help="also list every run's alerts")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    wanted: Callable[[Recording], bool] = lambda run: (  # noqa: E731
        args.match in run.name and args.split in ("", run.split)
    )
    found = recordings(args.folder, lasting=args.lasting, pre_cap=args.pre_cap)
    runs = [run for run in found if wanted(run)]
    if args.grid:
        show_grid(runs)
        return
    thinning = Thinning(
        every=args.every,
        plan=args.plan,
        stretch=args.stretch,
        with_loss=not args.no_loss,
        with_eval=not args.no_eval,
    )
    outcomes = judge(runs, thinning)
    if args.list:
        for o in outcomes:
            told = ", ".join(f"{e.rule}:{e.severity}@{e.start}-{e.end}" for e in o.episodes)
            print(f"{o.run.set:9} {o.run.name:24} fault {o.fault} t_div {o.diverged}: {told}")
    result = summary(outcomes)
    print(json.dumps(result, indent=1)) if args.json else show(result, names=args.list)


if __name__ == "__main__":
    main()
