"""The words of the rule `nonfinite`: what is bad, where it came from, what to do."""

from __future__ import annotations

from collections.abc import Sequence

from stability_probe.alerts.actions import (
    BACKWARD_IN_FLOAT32,
    CLIP_GRADIENT,
    FP32_LOGITS,
    FROM_CHECKPOINT,
    FULLY_MASKED,
    GIVE_OPTIMIZER,
    GRAD_SCALER,
    LOOK_BELOW,
    LOOK_DOWNSTREAM,
    QK_NORM,
    SKIP_BATCH,
)
from stability_probe.alerts.history import History
from stability_probe.alerts.nonfinite_layers import BadLayer

_OWN = (
    " were not finite when they reached attention, and the module's first input was not seen to "
    "be so: its projections or norms made it, or another of its inputs brought it."
)
_CAUSES = {
    "q": f"The queries{_OWN}",
    "k": f"The keys{_OWN}",
    "v": f"The values{_OWN}",
    "scores": "q and k are finite and their scores are not: q.k overflowed, or a mask added it.",
    "output": "q, k, v and the scores are finite and the output is not: the kernel made it.",
    "": "The record does not say in which tensor.",
}
_EXPLAINED = "It may come from rows that have no visible key (fully masked queries)."
_REACHED = " It has reached the gradients."
_REMEDIES = {
    "input": (LOOK_BELOW, FROM_CHECKPOINT, SKIP_BATCH),
    "scores": (FP32_LOGITS, QK_NORM, FROM_CHECKPOINT),
    "output": (FULLY_MASKED, FROM_CHECKPOINT),
}


def forward_message(bad: BadLayer, about: str, later: Sequence[BadLayer]) -> str:
    """What a layer's forward holds; `about` says its heads and their entropy."""
    tensors = [t for t in bad.tensors if t != "input"]
    what = _listed(tensors) or "attention"
    count = "" if bad.count is None else f"{bad.count:.0f} "
    received = "received non-finite inputs and " if "input" in bad.tensors else ""
    return (
        f"{bad.layer} {received}holds {count}values that are not finite in its {what} "
        f"({about}), first at step {bad.step}{_followers(later, 'later layers follow')}."
    )


def forward_cause(history: History, bad: BadLayer, *, reached: bool) -> str:
    """Where a layer's forward values came from; `reached` says that gradients are bad too."""
    if bad.explained:
        return _EXPLAINED + (_REACHED if reached else "")
    first = bad.tensors[0] if bad.tensors else ""
    cause = _CAUSES.get(first) or (
        f"The first non-finite value came from outside attention, {_below(history, bad)}."
    )
    before = history.updates.bad_gradient_before(bad.step)
    if before is not None and first in ("input", "q", "k", "v"):
        layer, step = before
        cause += f" Gradients of {layer} were not finite at step {step}: the update may have put "
        cause += "that into the weights."
    return cause


def forward_remedies(bad: BadLayer) -> tuple[str, ...]:
    """What to do about a layer's forward values."""
    if bad.explained:
        return (FULLY_MASKED,)
    return _REMEDIES.get(bad.tensors[0] if bad.tensors else "", (FROM_CHECKPOINT, SKIP_BATCH))


def backward_message(history: History, bad: BadLayer, earlier: Sequence[BadLayer]) -> str:
    """What backward did at the first layer where its gradients were not finite."""
    skipped = history.updates.was_skipped(bad.step)
    update = "was skipped" if skipped else "was not reported as skipped"
    ending = f"{_followers(earlier, 'earlier layers follow')}. The update {update}"
    if skipped:
        ending += ", as GradScaler does while it searches its scale"
        ending += f" ({history.updates.skips} of {history.updates.count} updates skipped)"
    if bad.tensors[0] == "grad_output":
        return (
            f"The gradient was already not finite when it reached the output of {bad.layer} at "
            f"step {bad.step}, though attention's forward is finite{ending}."
        )
    names = [t.removeprefix("grad_") for t in bad.tensors if t != "grad_input"]
    if names:
        finite, whose = "the gradient of its output is", f"of its {_listed(names)}"
    else:
        finite, whose = "the gradients of its output, q, k and v are", "of the module's input"
    return (
        f"{bad.layer}: forward healthy, backward non-finite. At step {bad.step} {finite} finite, "
        f"and that {whose} is not{ending}."
    )


def backward_cause(history: History, bad: BadLayer) -> str:
    """Where the first gradient that was not finite was made."""
    if bad.tensors[0] == "grad_output":
        return f"It came from downstream, outside attention: {_above(history, bad)}."
    if bad.tensors == ("grad_input",):
        return (
            "The backward of this layer's projections or norms made it, or another reader of the "
            "module's input."
        )
    return "The backward of this layer's attention made it."


def backward_remedies(history: History, bad: BadLayer) -> tuple[str, ...]:
    """What to do about gradients; nothing while a loss scale is searched."""
    if history.updates.was_skipped(bad.step):
        return (GRAD_SCALER,)
    look = LOOK_DOWNSTREAM if bad.tensors[0] == "grad_output" else BACKWARD_IN_FLOAT32
    return (look, CLIP_GRADIENT, FROM_CHECKPOINT, GIVE_OPTIMIZER)


def _below(history: History, bad: BadLayer) -> str:
    """Between which attention layers a bad input was made."""
    known = zip(history.indices, history.names, strict=True)
    below = max(((i, name) for i, name in known if i < bad.layer_index), default=None)
    return f"before {bad.layer}" if below is None else f"between {below[1]} and {bad.layer}"


def _above(history: History, bad: BadLayer) -> str:
    """Between which attention layers a bad gradient was made."""
    known = zip(history.indices, history.names, strict=True)
    above = min(((i, name) for i, name in known if i > bad.layer_index), default=None)
    if above is None:
        return f"after {bad.layer}, in the layers behind it, the loss or its scale"
    return f"between {bad.layer} and {above[1]}"


def _listed(names: Sequence[str]) -> str:
    """Names as part of a sentence."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _followers(others: Sequence[BadLayer], how: str) -> str:
    """The layers after the first bad one, as the end of a sentence."""
    if not others:
        return ""
    named = ", ".join(b.layer for b in others[:3])
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    return f"; {how}: {named}{more}"
