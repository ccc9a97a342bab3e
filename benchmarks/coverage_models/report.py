"""Turns the sweep's results into a document: a summary with denominators, then tables."""

from __future__ import annotations

import importlib.metadata
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from .trial import NO_ATTENTION, STEPS

Result = dict[str, Any]

LIBRARIES = {"hf": "transformers", "torch": "torch.nn", "timm": "timm", "diffusers": "diffusers",
             "x": "x-transformers"}  # fmt: skip
EXACT = 1e-5  # the largest difference between rebuilt and real numbers that counts as rounding

HEAD = """# Coverage

Written by `python benchmarks/coverage.py --write`; do not edit it by hand.

Each entry is a tiny random model of one type, trained for {steps} steps on the CPU in float32, once
unwatched and once watched, from the same seeds, with dropout as the type's default
configuration has it (layer dropping and time masking are off). *Bit-identical* means that losses,
gradients, weights, buffers and the random states of torch, Python and NumPy are `torch.equal`.
*Verified* means that the rows which the probe rebuilds from what it read differ from what the
model computed by rounding only; a case with dropout inside a fused kernel is run once more with
all dropout at zero for it.

How many modules compute attention is not the probe's own count. It is an oracle's, which looks at
the operators that the dispatcher runs: fused attention kernels, and a softmax whose output becomes
an operand of a batched matrix product. Routers, classifiers and deformable sampling do not count.
The oracle also computes the mean entropy and the largest logit of every module in float64.

A model's own loss is used where its class has one that takes generic labels; else a fixed random
projection of its outputs. Versions: {versions}.
"""


def document(found: list[Result], wanted: Iterable[str]) -> str:
    """The whole document."""
    run = [r for r in found if not r["problem"]]
    parts = [HEAD.format(steps=STEPS, versions=_versions()), _summary(found, list(wanted))]
    parts += [
        _list("Not bit-identical", [(r, r["differs"]) for r in run if not r["identical"]]),
        _list("Attention that was not seen", [(r, _notes(r, "not seen")) for r in run
                                              if r["seen"] < r["attention"]]),
        _list("Not verified", [(r, _notes(r, "not verified")) for r in run
                               if r["verified"] < r["sites"]]),
        _list("Entropy or logit not the oracle's", [(r, _notes(r, "the oracle says")) for r in run
                                                    if _notes(r, "the oracle says")]),
        _list("Operational alerts", [(r, "; ".join(r["alerts"])) for r in run if r["alerts"]]),
        _not_run(found),
        _table(run),
    ]  # fmt: skip
    return "\n".join(p for p in parts if p)


def _versions() -> str:
    names = ("torch", "transformers", "timm", "diffusers", "x-transformers")
    found = []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} not installed")
    return ", ".join(found)


def _summary(found: list[Result], wanted: list[str]) -> str:
    rows = [
        "## Summary\n",
        "| library | entries | reached | trained | with attention | cases | modules seen "
        "| sites verified | q and k known | bit-identical cases | entropies right |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key, name in LIBRARIES.items():
        mine = [r for r in found if r["entry"].startswith(f"{key}:")]
        entries = [e for e in wanted if e.startswith(f"{key}:")]
        if mine:
            rows.append(_summary_row(name, entries, mine))
    reached = {r["entry"] for r in found}
    late = [e for e in wanted if e not in reached]
    if late:
        rows.append(f"\n{len(late)} entries were not reached in this run of the sweep.")
    rows.append(
        "\nA case is an entry in one attention implementation (eager, sdpa). Entropies are right "
        "where the worst module of a case is within 1e-4 nats of the oracle; models with a sink "
        "column are not compared. Where a model subtracts each row's maximum before its softmax, "
        "the oracle's largest logit is a shifted one and the probe's the true one."
    )
    return "\n".join(rows) + "\n"


def _summary_row(name: str, entries: list[str], mine: list[Result]) -> str:
    run = [r for r in mine if not r["problem"]]
    reached = len({r["entry"] for r in mine})

    def total(field: str) -> int:
        return sum(r[field] for r in run)

    trained = len({r["entry"] for r in run})
    attends = [r for r in run if r["attention"]]
    cells = [
        name,
        len(entries),
        reached,
        f"{trained} ({100 * trained / reached:.0f} %)",
        len({r["entry"] for r in attends}),
        len(run),
        f"{total('seen')} of {total('attention')}",
        f"{total('verified')} of {total('sites')}",
        f"{total('with_qk')} of {total('sites')}",
        f"{sum(r['identical'] for r in run)} of {len(run)}",
        f"{sum(r['entropy_error'] <= 1e-4 for r in attends)} of {len(attends)}",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def _notes(r: Result, word: str) -> str:
    return "; ".join(n for n in r["notes"] if word in n)


def _list(title: str, items: list[tuple[Result, str]]) -> str:
    if not items:
        return f"## {title}\n\nNone.\n"
    lines = [f"- `{r['entry']}` ({r['implementation']}): {_plain(what)}" for r, what in items]
    return f"## {title}\n\n{len(items)} cases.\n\n" + "\n".join(lines) + "\n"


def _not_run(found: list[Result]) -> str:
    missing = [r for r in found if r["problem"]]
    if not missing:
        return ""
    kinds = Counter(reason_kind(r["problem"]) for r in missing)
    lines = [f"- {kind}: {count}" for kind, count in kinds.most_common()]
    each = [f"- `{r['entry']}`: {_plain(r['problem'])[:160]}" for r in missing]
    return (
        f"## Not run, and why\n\n{len(missing)} entries.\n\n" + "\n".join(lines)
        + "\n\n<details><summary>each</summary>\n\n" + "\n".join(each) + "\n\n</details>\n"
    )  # fmt: skip


def reason_kind(problem: str) -> str:
    """A reason in general words."""
    if library := re.search(r"requires the ([\w-]+) library", problem):
        return f"the package {library[1]} is missing"
    kinds = {
        "CPU time|more than|died": "too slow for the limit",
        "parameters after shrinking": "too large even after shrinking",
        "has no attribute": "the class or a part of it is not in this version",
        'missing the required "forward"': "has no forward of its own",
        "inference_session": "takes a session of a video and no tensors",
        "the trial failed": "the trial failed",
        "Validat|divisible|Class validation": "the shrunk configuration is refused",
        "missing|required|NoneType|must be|have to|specify": "inputs of its own kind are needed",
    }
    return next(
        (k for p, k in kinds.items() if re.search(p, problem)), "the shrunk parts do not fit"
    )


def _plain(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


def _table(run: list[Result]) -> str:
    rows = [
        "## Each case\n",
        "| entry | implementation | class | fed | seen / modules | verified / sites | with q, k "
        "| largest error | bit-identical |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in run:
        none = "no attention" if NO_ATTENTION in r["notes"] or not r["attention"] else ""
        seen = none or f"{r['seen']} / {r['attention']}"
        small = "yes" if r["worst_error"] <= EXACT else "NO"
        error = f"{r['worst_error']:.0e}" + ("" if small == "yes" else " (!)")
        rows.append(
            f"| `{r['entry']}` | {r['implementation']} | {r['model_class']} | {r['fed']} | {seen} "
            f"| {r['verified']} / {r['sites']} | {r['with_qk']} | {error} "
            f"| {'yes' if r['identical'] else 'NO'} |"
        )
    return "\n".join(rows) + "\n"
