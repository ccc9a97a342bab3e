"""A recorded run as curves over steps: the numbers that the plots draw, and nothing drawn yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from stability_probe.records import Alert, State
from stability_probe.stats.catalogue import BETWEEN_SET, MAX_LOGIT

if TYPE_CHECKING:
    import pandas as pd

Steps = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]

# The first that a layer has is its largest logit: before bias and soft-cap, where known.


class Recorded(Protocol):
    """What a plot needs of a run; `stability_probe.load` gives one."""

    @property
    def alerts(self) -> Sequence[Alert]:
        """In the order in which they were raised."""
        ...

    @property
    def scalars(self) -> pd.DataFrame:
        """One row a step: step, loss, eval_loss; NaN where a number is missing or is NaN."""
        ...

    def frame(self, *, bounds: bool = True) -> pd.DataFrame:
        """One row a (step, layer, head), a column per statistic; NaN where it is absent.

        `bounds`: also of steps at which only bounds were taken.
        """
        ...


@dataclass(frozen=True, eq=False)
class Curve:
    """Values over steps, some of which may be missing.

    Attributes:
        steps: ascending, [n].
        values: [n]; NaN or infinite where there is no number to draw.
    """

    steps: Steps
    values: Values

    @property
    def finite(self) -> Curve:
        """The points that have a number."""
        keep = np.isfinite(self.values)
        return Curve(self.steps[keep], self.values[keep])

    @property
    def gaps(self) -> Steps:
        """The steps at which a number was due and none is there.

        A value that is only given every tenth step is not due in between: the usual distance of
        the finite values says when one is. An infinite value is a gap wherever it stands.
        """
        return self.steps[self._is_gap()]

    @property
    def line(self) -> Curve:
        """The finite points, and NaN at each gap: a line through them breaks there."""
        gap = self._is_gap()
        keep = gap | np.isfinite(self.values)
        return Curve(self.steps[keep], np.where(gap, np.nan, self.values)[keep])

    @property
    def end(self) -> float:
        """The last number; minus infinity where there is none."""
        values = self.finite.values
        return float(values[-1]) if len(values) else float("-inf")

    def _is_gap(self) -> npt.NDArray[np.bool_]:
        finite = np.isfinite(self.values)
        if not finite.any():
            return np.isinf(self.values)
        given = self.steps[finite]
        usual = np.median(np.diff(given)) if len(given) > 1 else 1
        before = np.concatenate([[self.steps[0] - 1], given])
        since = self.steps - before[np.searchsorted(given, self.steps)]
        missing: npt.NDArray[np.bool_] = ~finite & ((since >= usual) | np.isinf(self.values))
        return missing


@dataclass(frozen=True, slots=True)
class Episode:
    """An alert from its firing until it resolved; `end` is None where it never did."""

    alert: Alert
    end: int | None


def step_range(runs: Iterable[Recorded], frames: Iterable[pd.DataFrame]) -> tuple[int, int]:
    """The first and the last step that any of them holds; (0, 0) where there is none."""
    tables = [run.scalars for run in runs] + list(frames)
    steps = [table["step"].to_numpy(np.int64) for table in tables if len(table)]
    joined = np.concatenate(steps) if steps else np.array([0])
    return int(joined.min()), int(joined.max())


def measured(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame without the rows of steps at which only bounds were taken: they are no gaps."""
    bounds = [name for name in BETWEEN_SET if name in frame]
    others = [name for name in frame if name not in ("step", "layer", "head", *bounds)]
    only_bounds = frame[bounds].notna().any(axis=1) & frame[others].isna().all(axis=1)
    return frame[~only_bounds]


def loss_curve(run: Recorded) -> Curve | None:
    """The training loss of every step; None where no step has it."""
    return _scalar(run, "loss")


def evaluation_curve(run: Recorded) -> Curve | None:
    """The loss on the fixed batch, of the steps that have it; None where none has.

    It is given now and then, at no set distance, so its absence is no gap; neither, then, is NaN.
    """
    curve = _scalar(run, "eval_loss")
    if curve is None:
        return None
    given = ~np.isnan(curve.values)
    return Curve(curve.steps[given], curve.values[given])


def largest_logit(frame: pd.DataFrame) -> dict[str, Curve]:
    """The largest logit of each layer's worst head, by layer in the order of the model.

    Before bias and soft-cap where that was recorded, else as softmax received it.
    """
    present = [name for name in MAX_LOGIT if name in frame]
    if not present:
        return {}
    values = frame[present[0]]
    for name in present[1:]:
        values = values.where(values.notna(), frame[name])
    worst_heads = values.groupby([frame["layer"], frame["step"]], observed=True).max()
    in_order = frame["layer"].drop_duplicates()
    return {str(layer): _curve(worst_heads.loc[layer]) for layer in in_order}


def entropy_ratio(frame: pd.DataFrame) -> dict[str, Curve]:
    """Entropy / ln(visible keys) over all heads of all layers: of the median and lowest head."""
    if "entropy_ratio" not in frame:
        return {}
    heads = frame.groupby("step")["entropy_ratio"]
    return {"median head": _curve(heads.median()), "lowest head": _curve(heads.min())}


def nonfinite_steps(frame: pd.DataFrame) -> Steps:
    """The measured steps at which attention held values that are not finite."""
    if "nonfinite" not in frame:
        return np.empty(0, np.int64)
    return np.unique(frame.loc[frame["nonfinite"] > 0, "step"].to_numpy(np.int64))


def largest(curves: Iterable[Curve]) -> Curve | None:
    """The largest value at each step over several curves; None without any curve."""
    curves = tuple(curves)
    if not curves:
        return None
    steps = np.unique(np.concatenate([curve.steps for curve in curves]))
    values = np.full(len(steps), np.nan)
    for curve in curves:
        at = np.searchsorted(steps, curve.steps)
        values[at] = np.fmax(values[at], curve.values)
    return Curve(steps, values)


def episodes(alerts: Iterable[Alert]) -> list[Episode]:
    """Firing alerts, each with the step at which its rule resolved in its layer.

    Alerts of steps that a later segment of the run took back are left out.
    """
    found: list[Episode] = []
    ends: dict[tuple[str, str | None], int] = {}
    for alert in reversed([alert for alert in alerts if not alert.superseded]):
        key = (alert.rule, alert.layer)
        if alert.state is State.RESOLVED:
            ends[key] = alert.step
        else:
            found.append(Episode(alert, ends.get(key)))
    return found[::-1]


def _scalar(run: Recorded, name: str) -> Curve | None:
    scalars = run.scalars
    if name not in scalars or scalars[name].isna().all():
        return None
    return Curve(scalars["step"].to_numpy(np.int64), scalars[name].to_numpy().astype(np.float64))


def _curve(series: pd.Series[float]) -> Curve:
    return Curve(series.index.to_numpy(np.int64), series.to_numpy().astype(np.float64))
