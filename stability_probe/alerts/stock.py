"""The rules that a run is judged by unless it brings its own."""

from __future__ import annotations

from stability_probe.alerts.attention_divergence import AttentionDivergence
from stability_probe.alerts.entropy_collapse import EntropyCollapse
from stability_probe.alerts.extreme_rules import (
    AttentionUniform,
    SaturatedSinceStart,
    SoftmaxSaturation,
)
from stability_probe.alerts.fp16_forecast import Fp16Forecast
from stability_probe.alerts.fp16_overflow import Fp16Overflow
from stability_probe.alerts.logit_growth import LogitGrowth
from stability_probe.alerts.loss_elsewhere import LossDivergenceElsewhere
from stability_probe.alerts.loss_missing import LossMissing
from stability_probe.alerts.nonfinite import NonFinite
from stability_probe.alerts.nonfinite_loss import NonFiniteLoss
from stability_probe.alerts.rule import Rule
from stability_probe.alerts.skipped_update import SkippedUpdate
from stability_probe.alerts.training_stalled import TrainingStalled


def stock_rules() -> tuple[Rule, ...]:
    """The stock rules with their default constants, hard events first."""
    return (
        NonFinite(),
        NonFiniteLoss(),
        Fp16Overflow(),
        Fp16Forecast(),
        AttentionDivergence(),
        LogitGrowth(),
        EntropyCollapse(),
        LossDivergenceElsewhere(),
        TrainingStalled(),
        SoftmaxSaturation(),
        AttentionUniform(),
        SaturatedSinceStart(),
        SkippedUpdate(),
        LossMissing(),
    )
