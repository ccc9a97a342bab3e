"""Starts to watch a model, or says why it cannot be watched."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.module import _global_forward_pre_hooks

from stability_probe.capture.attachment import Attachment, Receiver
from stability_probe.capture.hooks import is_live
from stability_probe.capture.sites import (
    attention_is_possible,
    candidates,
    identity,
    named_modules,
)
from stability_probe.errors import AlreadyWatchedError, EvalModeError, NoAttentionError


def _watched_at(model: nn.Module) -> str | None:
    """The name of a module of `model` that a live probe has hooked."""
    everywhere = _global_forward_pre_hooks.values()
    owners = [getattr(hook, "__self__", None) for hook in everywhere]
    followed = {i for o in owners if isinstance(o, Attachment) for i in o.followed}
    for name, module in named_modules(model).items():
        if identity(module) in followed or any(map(is_live, module._forward_pre_hooks.values())):
            return name
    return None


def attach(
    model: nn.Module,
    receiver: Receiver,
    *,
    strict: bool = False,
    allow_eval: bool = False,
    compiled: bool = True,
) -> Attachment:
    """Starts to report a model's attention calls to `receiver`.

    Args:
        model: the model that is trained, before or after DDP or FSDP wrapped it.
        receiver: takes the calls.
        strict: a fault while reading raises instead of disabling the site; for tests.
        allow_eval: accept a model whose attention is all in eval mode, as LoRA and DPO loops
            use it; calls are recorded there while gradients flow.
        compiled: also see attention in what torch.compile makes of the model from now on.

    Raises:
        AlreadyWatchedError: the model or a part of it is watched already.
        NoAttentionError: nothing in the model can be attention.
        EvalModeError: every attention layer is in eval mode.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"got {type(model).__name__}; expected a torch.nn.Module. "
            "Pass the model itself, not its output or its optimizer."
        )
    if (where := _watched_at(model)) is not None:
        raise AlreadyWatchedError(
            f"got a {type(model).__name__} that is watched already (at {where!r}); expected one "
            "probe a model. Close the first with probe.close(), or use it."
        )
    if not attention_is_possible(model):
        raise NoAttentionError(
            f"got a {type(model).__name__} in which no module is or calls attention "
            f"({sum(1 for _ in model.modules())} modules looked at); expected a model with at "
            "least one attention layer. Watch the part of your model that holds the transformer."
        )
    found = candidates(model)
    if found and not allow_eval and not any(m.training for m in found.values()):
        raise EvalModeError(
            f"got a {type(model).__name__} whose {len(found)} attention layers are all in eval "
            f"mode (first: {next(iter(found))!r}); expected train mode, because evaluation is not "
            "recorded. Call model.train() before watch(), or pass allow_eval=True if you train "
            "in eval mode."
        )
    return Attachment(model, receiver, strict=strict, compiled=compiled)
