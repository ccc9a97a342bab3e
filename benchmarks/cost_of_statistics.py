"""What the statistics of one attention call cost, in units of its SDPA forward.

    python benchmarks/cost_of_statistics.py [--only REGEX] [--quick] [--json FILE] [--write]

Beside the forward three things run, interleaved in one process: the default set, all statistics,
and the dense formulation: the whole T x T matrix in float32 and a line for each number, on which
most tools rely. Printed are medians of ratios to the forward of the same round. Extra memory is
the peak of the process during one call above what it held before. With `--no-run --json FILE
--write` the table in docs/performance.md is made from a file.

Shape suffixes: B batch, H query heads, G key heads, T positions, D head width.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from conditions import conditions, interleaved, put, sentence
from torch import Tensor

from stability_probe.records import AttentionCall
from stability_probe.stats.accumulate import accumulate

HOT = 40.0  # times larger queries: every head is collapsed


@dataclass(frozen=True, slots=True)
class Case:
    """One attention call."""

    shape: tuple[int, int, int, int, int]  # B, H, G, T, D
    causal: bool = False
    dtype: str = "float32"
    hot: bool = False
    extra: str = ""  # "padding", "bias", "soft-cap"
    threads: int = 1

    @property
    def name(self) -> str:
        """In words."""
        b, h, g, t, d = self.shape
        heads = f"{h}" if h == g else f"{h}/{g}"
        words = [f"({b}, {heads}, {t}, {d})", "causal" if self.causal else "full", self.dtype]
        words += ["collapsed"] * self.hot + [self.extra] * bool(self.extra)
        return ", ".join(words) + (f", {self.threads} threads" if self.threads > 1 else "")


SMALL, MIDDLE, LONG = (8, 8, 8, 256, 64), (4, 8, 8, 1024, 64), (1, 8, 8, 4096, 64)
GROUPED = (4, 8, 2, 1024, 64)
BOTH = (False, True)


def cases(*, quick: bool) -> list[Case]:
    """All of them, or a few."""
    if quick:
        return [Case(MIDDLE, causal, dtype) for causal in BOTH for dtype in ("float32", "bfloat16")]
    shapes = (SMALL, MIDDLE, LONG, GROUPED)
    plain = [
        Case(shape, causal, dtype)
        for shape in shapes
        for dtype in ("float32", "bfloat16")
        for causal in BOTH
    ]
    hot = [Case(MIDDLE, causal, d, hot=True) for d in ("float32", "bfloat16") for causal in BOTH]
    extra = [Case(MIDDLE, extra=extra) for extra in ("padding", "bias", "soft-cap")]
    return [*plain, *hot, *extra, *(Case(MIDDLE, causal, threads=2) for causal in BOTH)]


def call_of(case: Case) -> tuple[AttentionCall, Callable[[], Tensor]]:
    """The call, and its forward; a soft-cap has none of its own, so that of the plain call."""
    B, H, G, T, D = case.shape
    dtype = getattr(torch, case.dtype)
    q, k, v = (torch.randn(B, T, n, D).to(dtype).transpose(1, 2) for n in (H, G, G))
    q = q * HOT if case.hot else q
    mask = None
    if case.extra == "padding":
        mask = (torch.arange(T) < torch.linspace(T // 2, T, B)[:, None])[:, None, None]
    if case.extra == "bias":
        mask = torch.randn(1, H, T, T).to(dtype)

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=case.causal, enable_gqa=H != G
        )

    call = AttentionCall(
        layer="", seam="sdpa", q_BHQD=q, k_BGKD=k, v_BGKE=v, output_BHQE=forward(), scale=D**-0.5,
        causal=case.causal, masks=() if mask is None else (mask,), dtype=dtype,
        softcap=30.0 if case.extra == "soft-cap" else None,
    )  # fmt: skip
    return call, forward


def dense(call: AttentionCall) -> dict[str, Tensor]:
    """The same numbers from the whole matrix, one expression after the other."""
    assert call.q_BHQD is not None
    assert call.k_BGKD is not None
    H, G = call.q_BHQD.shape[1], call.k_BGKD.shape[1]
    k = call.k_BGKD.float().repeat_interleave(H // G, 1)
    scores = call.q_BHQD.float() @ k.mT * call.scale
    if call.softcap is not None:
        scores = (scores / call.softcap).tanh() * call.softcap
    for mask in call.masks:
        hidden = mask.logical_not() if mask.dtype == torch.bool else None
        scores = scores + mask if hidden is None else scores.masked_fill(hidden, -torch.inf)
    if call.causal:
        T = scores.shape[-1]
        hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    p = scores.softmax(-1)
    return {
        "largest": scores.amax((0, 2, 3)),
        "entropy": -(p * (p + 1e-9).log()).sum(-1).mean((0, 2)),
        "slope": (p * (1 - p)).mean((0, 2, 3)),
        "top": p.amax(-1).mean((0, 2)),
    }


def extra_memory(run: Callable[[], object]) -> float | None:
    """MB that a call needs at its peak; None where the system does not tell."""
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    run()
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # gives back what earlier calls have left
        clear.write_text("5")  # the peak starts anew
        before = _kilobytes(status, "VmRSS")
        run()
        return (_kilobytes(status, "VmHWM") - before) / 1024
    except (OSError, AttributeError, KeyError):
        return None


def _kilobytes(status: Path, name: str) -> int:
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(lines[name].split()[0])


def measured(case: Case, rounds: int) -> dict[str, Any]:
    """Ratios to the forward, and memory, of one case."""
    call, forward = call_of(case)
    runs: dict[str, Callable[[], object]] = {
        "default": lambda: accumulate(call, full=False),
        "all": lambda: accumulate(call, full=True),
        "dense": lambda: dense(call),
    }
    ratios = interleaved(
        {"forward": forward, **runs}, base="forward", rounds=rounds, threads=case.threads
    )
    memory = {name: extra_memory(run) for name, run in runs.items()}
    return {"name": case.name, "case": asdict(case), "rounds": rounds,
            "ratios": ratios, "megabytes": memory}  # fmt: skip


def table(found: dict[str, Any]) -> str:
    """The results as docs/performance.md shows them."""
    rows = [
        sentence(found["conditions"]),
        "",
        "| call: (batch, heads, T, width) | default | all | dense | MB: default | all | dense |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in found["cases"]:
        ratios, megabytes = result["ratios"], result["megabytes"]
        cells = [f"{ratios[name]:.2f}" for name in ("default", "all", "dense")]
        sizes = (megabytes[name] for name in ("default", "all", "dense"))
        cells += ["-" if size is None else f"{size:.0f}" for size in sizes]
        rows.append(f"| {result['name']} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="a regular expression over the names of calls")
    parser.add_argument("--quick", action="store_true", help="four calls")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--no-run", action="store_true", help="take what --json holds")
    parser.add_argument("--write", action="store_true", help="put the table into the document")
    arguments = parser.parse_args()
    if arguments.no_run:
        found = json.loads(arguments.json.read_text())
    else:
        torch.manual_seed(0)
        found = {"conditions": conditions(), "cases": []}
        for case in cases(quick=arguments.quick):
            if re.search(arguments.only, case.name):
                found["cases"].append(measured(case, arguments.rounds))
                result = found["cases"][-1]
                told = (f"{name} {ratio:.2f}" for name, ratio in result["ratios"].items())
                print(f"{case.name}: {', '.join(told)}; MB {result['megabytes']}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1))
    if arguments.write:
        put("cost-of-statistics", table(found))


if __name__ == "__main__":
    main()
