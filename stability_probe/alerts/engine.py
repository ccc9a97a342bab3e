"""Episodes: what makes a finding news, and when it is over.

A rule's finding starts an episode with one firing alert. The episode stays while the finding
recurs, in whatever layers; a rise in severity is a further firing alert. It ends with resolved
alerts after enough quiet steps, and the rule is armed again.
"""

from __future__ import annotations

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
    """

    severity: Severity
    last: int
    announced: dict[str | None, Alert] = field(default_factory=dict)
    unseen: dict[str | None, int] = field(default_factory=dict)
    quiet: int = 0
    samples: int = 0


class Engine:
    """Owns the open episodes, at most one per rule."""

    def __init__(self) -> None:
        self._open: dict[str, _Episode] = {}

    def judge(self, rule: Rule, verdict: Verdict, history: History) -> list[Alert]:
        """The alerts that a rule's verdict on the newest record gives rise to."""
        findings = [finding for finding in verdict.values() if finding is not None]
        episode = self._open.get(rule.name)
        if findings:
            return self._continue(rule, findings, history)
        if episode is None:
            return []
        return self._calm(rule, episode, verdict, history)

    def _continue(self, rule: Rule, findings: list[Finding], history: History) -> list[Alert]:
        """Open or carry on an episode; an alert where the finding is news."""
        worst = max(findings, key=lambda finding: finding.severity.rank)
        episode = self._open.get(rule.name)
        news = episode is None or worst.severity.rank > episode.severity.rank
        if episode is None:
            episode = self._open[rule.name] = _Episode(worst.severity, history.step)
        elif rule.each_layer:
            news |= all(finding.layer not in episode.unseen for finding in findings)
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
        return [
            replace(
                alert,
                step=history.step,
                state=State.RESOLVED,
                severity=episode.severity,
                value=None,
                window=(alert.step, history.step),
                cause="",
                remedies=(),
                message=f"{rule.name}{f' in {layer}' if layer else ''} is over: {why}.",
            )
            for layer, alert in episode.announced.items()
        ]
