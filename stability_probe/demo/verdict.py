"""When a run diverged, and whether it stayed healthy: judged by its loss on a fixed batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stability_probe.records import Alert, Origin, Severity, State
from stability_probe.runlog.read import Run

LASTING = 30  # steps for which a divergence must last
NATS, SHARE = 0.25, 0.1  # margin above the best: the larger of the two

Array = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one run."""

    name: str
    alerts: tuple[Alert, ...]
    first_alert: Alert | None  # the first firing one of a rule, warning or worse
    divergence_step: int | None
    final_loss: float  # mean of the last three evaluations, nats
    best_before_ramp: float  # nats

    @property
    def lead(self) -> int | None:
        """Steps from the first alert to the divergence."""
        if self.first_alert is None or self.divergence_step is None:
            return None
        return self.divergence_step - self.first_alert.step

    @property
    def healthy(self) -> bool:
        """Whether the run ended about where it was before the ramp, without an alert."""
        near = self.final_loss <= self.best_before_ramp + NATS
        return near and self.first_alert is None and self.divergence_step is None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        shown = ("step", "rule", "severity", "state", "layer", "heads")
        return {
            "name": self.name,
            "alerts": [{name: getattr(a, name) for name in shown} for a in self.alerts],
            "first_alert_step": None if self.first_alert is None else self.first_alert.step,
            "divergence_step": self.divergence_step,
            "final_loss": self.final_loss if np.isfinite(self.final_loss) else None,
        }


def divergence_step(steps: Array, losses: Array) -> int | None:
    """The step from which a loss stays above its best by max(0.25, 10 % of initial - best).

    A loss that is not finite is above. None where it comes back, or where it is above for fewer
    than 30 steps before the end.

    Args:
        steps: [N], rising.
        losses: [N], nats, at these steps.
    """
    finite = losses[np.isfinite(losses)]
    if not len(finite):
        return None
    best = finite.min()
    above = ~(losses <= best + max(NATS, SHARE * (finite[0] - best)))
    first = len(above) - int(np.argmin(above[::-1])) if not above.all() else 0
    if first == len(above) or steps[-1] - steps[first] < LASTING:
        return None
    return int(steps[first])


def outcome(name: str, run: Run, *, ramp_start: int) -> Outcome:
    """Judges a finished run of the demo."""
    steps, losses = _evaluations(run)
    worrying = [
        a
        for a in run.alerts
        if a.state is State.FIRING
        and a.severity is not Severity.INFO
        and a.origin is Origin.RULE  # a full disk foretells no divergence
    ]
    return Outcome(
        name=name,
        alerts=run.alerts,
        first_alert=worrying[0] if worrying else None,
        divergence_step=divergence_step(steps, losses),
        final_loss=float(losses[-3:].mean()),
        best_before_ramp=float(np.nanmin(losses[steps <= ramp_start])),
    )


def _evaluations(run: Run) -> tuple[Array, Array]:
    """Steps and losses of the evaluations, a loss of NaN among them."""
    scalars = (record.scalars for record in run.records())
    found = [(s.step, s.eval_loss) for s in scalars if s.eval_loss is not None]
    return np.array([step for step, _ in found]), np.array([loss for _, loss in found])


def as_announced(outcomes: Mapping[str, Outcome]) -> bool:
    """Whether the plain run was announced before it diverged, and the twin stayed healthy."""
    plain, twin = outcomes["plain"], outcomes["qk_norm"]
    rules = {a.rule for a in plain.alerts}
    return (plain.lead or 0) > 0 and "entropy_collapse" in rules and twin.healthy
