"""What a rule is: a small frozen object that looks at the history and says what it finds.

The engine owns what lasts (episodes); the history owns what is remembered; a rule owns its
constants and nothing else, so the same history always gives the same verdict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from stability_probe.alerts.history import History
from stability_probe.detect.span import Span
from stability_probe.records import Alert, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a rule saw at one step in one layer, before it is known whether that is news.

    Attributes:
        severity: how bad it is.
        layer: canonical module name; None for the whole model.
        layer_index: its place in the model.
        statistic: the statistic that was judged.
        value: its value, in the statistic's unit.
        limit: the value it passed.
        since: first step of the evidence.
        holds: judgements in a row that must find as bad or worse before it is news.
        rests: steps after an episode until as bad a finding is news again.
    """

    severity: Severity
    layer: str | None = None
    layer_index: int | None = None
    statistic: str | None = None
    value: float | None = None
    limit: float | None = None
    since: int | None = None
    holds: int = 1
    rests: int = 0


Verdict = Mapping[str | None, Finding | None]
"""Layer (None: the whole model) to what was found there; None there says that it is calm.

A layer that is not in the mapping was not judged at this step: its state is held. Findings
stand worst first: the engine names the first of the highest severity.
"""


class Rule(Protocol):
    """What the engine asks of a rule."""

    @property
    def name(self) -> str:
        """The rule's name, as alerts carry it."""

    @property
    def each_layer(self) -> bool:
        """Whether a further layer is news of its own while another layer is still bad no more."""

    @property
    def lookback(self) -> Span:
        """The longest window the rule looks back over: so much the history keeps."""

    def evaluate(self, history: History, step: int) -> Verdict:
        """Judge the newest record of the history. Must be pure and cheap."""

    def explain(self, history: History, finding: Finding) -> Alert:
        """The alert for a finding of this step. Called only when the finding is news."""


def announce(
    rule: str,
    finding: Finding,
    history: History,
    *,
    message: str,
    heads: tuple[int, ...] = (),
    cause: str = "",
    remedies: tuple[str, ...] = (),
) -> Alert:
    """The alert that says a finding, at the history's step.

    A value that is not finite is left to the message, so that alerts compare and are plain JSON.
    """
    value = finding.value
    since = history.step if finding.since is None else finding.since
    return Alert(
        step=history.step,
        rule=rule,
        severity=finding.severity,
        layer=finding.layer,
        layer_index=finding.layer_index,
        heads=heads,
        statistic=finding.statistic,
        value=value if value is not None and math.isfinite(value) else None,
        limit=finding.limit,
        window=(since, history.step),
        cause=cause,
        remedies=remedies,
        message=message,
    )
