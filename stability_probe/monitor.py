"""The one door through which a run's records become alerts, live and in replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from stability_probe.alerts.engine import Engine
from stability_probe.alerts.history import History
from stability_probe.alerts.rule import Rule
from stability_probe.alerts.stock import stock_rules
from stability_probe.detect.span import longest
from stability_probe.records import Alert, StepRecord


class Monitor:
    """Judges a run record by record.

    The alerts depend on the records and their order and on nothing else: no clock, no files, no
    randomness. Memory is bounded: windows of a few dozen measured records.

    Attributes:
        rules: the rules, in the order in which they judge.
    """

    def __init__(self, rules: Sequence[Rule] | None = None) -> None:
        """Start with no past.

        Args:
            rules: the rules to judge by; None for the stock rules.

        Raises:
            ValueError: two rules have the same name.
        """
        self.rules: tuple[Rule, ...] = stock_rules() if rules is None else tuple(rules)
        twice = [name for name, n in Counter(r.name for r in self.rules).items() if n > 1]
        if twice:
            raise ValueError(
                f"More than one rule is named {', '.join(twice)}; alerts are told apart by rule "
                "name: give each rule its own, such as LogitGrowth(name='logit_growth_strict')."
            )
        self._history = History(keep=longest(rule.lookback for rule in self.rules))
        self._engine = Engine()
        self._armed = dict.fromkeys((rule.name for rule in self.rules), False)

    def observe(self, record: StepRecord) -> list[Alert]:
        """Take the next record, and return the alerts that it gives rise to.

        Steps are expected to rise. A step that does not (the run went back to a checkpoint)
        takes the steps from there on out of the windows.
        """
        self._history.update(record)
        alerts: list[Alert] = []
        for rule in self.rules:
            verdict = rule.evaluate(self._history, record.step)
            if record.measured or verdict:
                self._armed[rule.name] = bool(verdict)
            alerts += self._engine.judge(rule, verdict, self._history)
        return alerts

    @property
    def armed(self) -> dict[str, bool]:
        """Rule by rule, whether it could judge anything when it last tried.

        A trend rule is not armed before its burn-in and while its window holds too few samples
        or losses; a rule whose statistic is not recorded is never armed.
        """
        return dict(self._armed)
