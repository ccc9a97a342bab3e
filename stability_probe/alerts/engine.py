"""Episodes: what makes a finding news, and when it is over.

A finding is pending until it has held for as many judgements as it asks for, then an episode
starts with one firing alert. The episode stays while the finding recurs, in whatever layers; a
rise in severity is a further firing alert. It ends with resolved alerts after enough quiet steps,
which tell its start, its peak and its end, and the rule is armed again.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace

from stability_probe.alerts.history import History
from stability_probe.alerts.rule import Finding, Rule, Verdict
from stability_probe.records import Alert, Severity, State

QUIET_STEPS = 50  # as in the calibration of the stock rules
QUIET_SAMPLES = 3  # where a run is measured so seldom that 50 steps are one sample
FORGET_SAMPLES = 500  # measured steps without any judgement until a layer counts as gone


@dataclass(slots=True)
class _Episode:
    """One rule's open episode.

    Attributes:
        severity: the highest so far.
        announced: the newest firing alert of each layer that was named.
        unseen: every layer that had a finding, with the measured steps since it was judged.
        quiet: steps known to be quiet, up to now.
        samples: judgements known to be quiet, up to now.
        last: the step up to which `quiet` is counted.
        peaks: the worst finding of each layer that had one.
    """

    severity: Severity
    last: int
    announced: dict[str | None, Alert] = field(default_factory=dict)
    unseen: dict[str | None, int] = field(default_factory=dict)
    quiet: int = 0
    samples: int = 0
    peaks: dict[str | None, Finding] = field(default_factory=dict)

    def note(self, finding: Finding) -> None:
        """Remember a finding that is worse than the layer's others."""
        peak = self.peaks.get(finding.layer)
        if peak is None or _worse(finding, peak):
            self.peaks[finding.layer] = finding


def _worse(finding: Finding, peak: Finding) -> bool:
    """Whether a finding lies farther beyond its limit, on whichever side of it."""
    if finding.value is None or peak.value is None or peak.statistic != finding.statistic:
        return finding.severity.rank > peak.severity.rank
    down = finding.limit is not None and finding.value < finding.limit
    return finding.value < peak.value if down else finding.value > peak.value


class Engine:
    """Owns the open episodes, at most one per rule."""

    def __init__(self) -> None:
        self._open: dict[str, _Episode] = {}
        self._held: defaultdict[str, list[int]] = defaultdict(lambda: [0] * len(Severity))
        self._over: dict[str, tuple[int, Severity]] = {}

    def judge(self, rule: Rule, verdict: Verdict, history: History) -> list[Alert]:
        """The alerts that a rule's verdict on the newest record gives rise to."""
        if not verdict:  # nothing was judged: all is held, the pending too
            return []
        findings = [finding for finding in verdict.values() if finding is not None]
        self._hold(rule, findings)
        findings = [f for f in findings if not self._pending(rule, f, history.step)]
        episode = self._open.get(rule.name)
        if findings:
            return self._continue(rule, findings, history)
        if episode is None:
            return []
        return self._calm(rule, episode, verdict, history)

    def _hold(self, rule: Rule, findings: list[Finding]) -> None:
        """Count the judgements in a row that found something as bad or worse."""
        worst = max((finding.severity.rank for finding in findings), default=-1)
        held = self._held[rule.name]
        self._held[rule.name] = [n + 1 if rank <= worst else 0 for rank, n in enumerate(held)]

    def _pending(self, rule: Rule, finding: Finding, step: int) -> bool:
        """Whether a finding has not held for long enough, or comes too soon after another."""
        if self._held[rule.name][finding.severity.rank] < finding.holds:
            return True
        if rule.name in self._open or rule.name not in self._over:
            return False
        over, severity = self._over[rule.name]
        return over <= step < over + finding.rests and finding.severity.rank <= severity.rank

    def _continue(self, rule: Rule, findings: list[Finding], history: History) -> list[Alert]:
        """Open or carry on an episode; an alert where the finding is news."""
        worst = max(findings, key=lambda finding: finding.severity.rank)
        episode = self._open.get(rule.name)
        news = episode is None or worst.severity.rank > episode.severity.rank
        if episode is None:
            episode = self._open[rule.name] = _Episode(worst.severity, history.step)
        elif rule.each_layer:
            news |= all(finding.layer not in episode.unseen for finding in findings)
        for finding in findings:
            episode.note(finding)
        episode.unseen.update((finding.layer, 0) for finding in findings)
        episode.quiet, episode.samples, episode.last = 0, 0, history.step
        if not news:
            return []
        episode.severity = max(episode.severity, worst.severity, key=lambda s: s.rank)
        alert = rule.explain(history, worst)
        episode.announced[worst.layer] = alert
        return [alert]

    def _calm(
        self, rule: Rule, episode: _Episode, verdict: Verdict, history: History
    ) -> list[Alert]:
        """Count quiet steps where every layer of the episode was judged; else hold."""
        for layer in list(episode.unseen):
            if layer in verdict:
                episode.unseen[layer] = 0
            elif history.fresh:
                episode.unseen[layer] += 1
        gone = [layer for layer, count in episode.unseen.items() if count >= FORGET_SAMPLES]
        for layer in gone:
            if layer is not None:
                del episode.unseen[layer]
        if not episode.unseen:
            return self._close(rule, history, "its layers are no longer measured")
        if all(layer in verdict for layer in episode.unseen):
            episode.quiet += max(history.step - episode.last, 0)
            episode.samples += 1
            episode.last = history.step
        elif history.fresh:
            episode.last = history.step
        if episode.quiet < QUIET_STEPS or episode.samples < QUIET_SAMPLES:
            return []
        return self._close(rule, history, f"quiet for {episode.quiet} steps")

    def _close(self, rule: Rule, history: History, why: str) -> list[Alert]:
        """One resolved alert for each layer that was named."""
        episode = self._open.pop(rule.name)
        self._over[rule.name] = (history.step, episode.severity)
        return [
            replace(
                alert,
                step=history.step,
                state=State.RESOLVED,
                severity=episode.severity,
                value=_number(episode.peaks[layer]),
                window=(alert.step, history.step),
                cause="",
                remedies=(),
                message=f"{rule.name}{f' in {layer}' if layer else ''} is over: {why}"
                f"{_peak(episode.peaks[layer])}.",
            )
            for layer, alert in episode.announced.items()
        ]


def _number(peak: Finding) -> float | None:
    """The peak's value where it is a number that compares."""
    return peak.value if peak.value is not None and math.isfinite(peak.value) else None


def _peak(peak: Finding) -> str:
    """The peak, as the end of a sentence."""
    value = _number(peak)
    return (
        ""
        if value is None or peak.statistic is None
        else f"; {peak.statistic} peaked at {value:.3g}"
    )
