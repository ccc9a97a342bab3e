"""Makes blindness loud: turns what the capture misses into alerts.

Alerts of here are about the probe and not about the run: a replay copies them.
"""

from __future__ import annotations

from collections.abc import Iterator

from stability_probe.capture import Attachment
from stability_probe.records import Alert, Origin, Severity

DISCOVERY_STEPS = 3  # a layer that is skipped at random shows within a few steps
REPLACED_STEPS = 10  # so often are the model's modules compared with the ones that are watched
EVAL_STEPS = 3  # one step may be an evaluation whose gradients nobody switched off
SILENT_STEPS = 20  # a site without a call for so long is blind, or was replaced


class Lookout:
    """Asks the attachment, after every step, what it did not see."""

    def __init__(self, attachment: Attachment, *, allow_eval: bool = False) -> None:
        self._attachment, self._allow_eval = attachment, allow_eval
        self._forwards, self._forwards_in_eval = 0, 0
        self._steps_in_eval = 0
        self._discovery_steps = 0
        self._steps_without_forward = 0
        self._told: set[str] = set()

    def after_step(self, step: int) -> list[Alert]:
        """The operational alerts that a step gives rise to; ends discovery when it is done."""
        self._attachment.refresh()
        return [
            *self._faults(step),
            *self._unreadable(step),
            *self._blindness(step),
            *self._eval_mode(step),
        ]

    def _faults(self, step: int) -> Iterator[Alert]:
        faults, self._attachment.faults = self._attachment.faults, []
        for layer, what in faults:
            yield _operational(
                step,
                "probe_fault",
                Severity.WARNING,
                layer or None,
                f"Reading attention failed at {layer or 'the model'} ({what}); training is not "
                "touched, and this site is not watched any more.",
                "Please report it, with the layer's code if you can.",
            )

    def _unreadable(self, step: int) -> Iterator[Alert]:
        for site in self._attachment.sites.values():
            if site.unreadable and (key := f"{site.name}: unreadable") not in self._told:
                self._told.add(key)
                yield _operational(
                    step,
                    "blind",
                    Severity.WARNING,
                    site.name,
                    f"A call of {site.name} ({site.kind}) cannot be read: {site.unreadable}. "
                    "Such calls are not watched.",
                    "Train with plain tensors, or watch the rest; see probe.coverage.",
                )

    def _blindness(self, step: int) -> Iterator[Alert]:
        if self._attachment.discovering:
            yield from self._while_discovering(step)
        else:
            yield from self._silent_sites(step)
            if step % REPLACED_STEPS == 0:
                yield from self._replaced(step)

    def _while_discovering(self, step: int) -> Iterator[Alert]:
        if not self._attachment.forwards:
            self._steps_without_forward += 1
            if self._steps_without_forward == DISCOVERY_STEPS:
                yield self._no_forward(step)
            return
        self._discovery_steps += 1
        unseen = self._attachment.unseen()
        if unseen and self._discovery_steps < DISCOVERY_STEPS:
            return
        self._attachment.settle()
        if not self._attachment.sites:
            if "" not in self._told:
                self._told.add("")
                yield self._nothing_seen(step, len(unseen))
            return
        for layer, kind in unseen.items():
            if layer not in self._told:
                self._told.add(layer)
                yield self._unseen(step, layer, kind)
        yield from self._unverified(step)
        yield from self._uncapped(step)

    def _unseen(self, step: int, layer: str, kind: str) -> Alert:
        if layer in self._attachment.gates:  # deformable sampling: no logits to watch
            return _operational(
                step,
                "blind",
                Severity.INFO,
                layer,
                f"{layer} ({kind}) is called attention, but its softmax is of no product of "
                "queries and keys that can be seen; it is not watched.",
                "Nothing to do for sampling and gating layers; else see probe.coverage.",
            )
        return _operational(
            step,
            "blind",
            Severity.WARNING,
            layer,
            f"{layer} ({kind}) looks like attention and gave no attention call in "
            f"{self._discovery_steps} steps; it is not watched.",
            self._what_hides(),
        )

    def _nothing_seen(self, step: int, candidates: int) -> Alert:
        return _operational(
            step,
            "blind",
            Severity.WARNING if candidates else Severity.INFO,
            None,
            f"No attention call was seen in {self._discovery_steps} steps of training; "
            f"{candidates} modules look like attention. Nothing is watched.",
            self._what_hides()
            if candidates
            else "Watch a model that attends; this one may hold no attention at all.",
        )

    def _eval_mode(self, step: int) -> Iterator[Alert]:
        """Says it where every forward of several steps trained in eval mode, unasked for."""
        forwards = self._attachment.forwards - self._forwards
        in_eval = self._attachment.forwards_in_eval - self._forwards_in_eval
        self._forwards += forwards
        self._forwards_in_eval += in_eval
        if not forwards:
            return
        self._steps_in_eval = self._steps_in_eval + 1 if in_eval == forwards else 0
        if self._steps_in_eval == EVAL_STEPS and not self._allow_eval:
            yield _operational(
                step,
                "blind",
                Severity.WARNING,
                None,
                f"All attention of the last {EVAL_STEPS} steps trained in eval mode: it is "
                "recorded, but dropout is off and the numbers are not those of train mode.",
                "Call model.train() before the training step (after each evaluation), or pass "
                "allow_eval=True if you train so on purpose.",
            )

    def _no_forward(self, step: int) -> Alert:
        in_eval = self._attachment.refused_in_eval > 0
        return _operational(
            step,
            "blind",
            Severity.WARNING,
            None,
            f"{DISCOVERY_STEPS} steps went by without a forward of the watched model in "
            + ("training: its modules are in eval mode." if in_eval else "training."),
            "Call model.train() before the training step, or watch the module that is trained."
            if in_eval
            else self._what_hides()
            if self._attachment.may_be_compiled
            else "Watch the module whose forward your loop calls.",
        )

    def _what_hides(self) -> str:
        """What to do about calls that are not seen."""
        if not self._attachment.may_be_compiled:
            return "A kernel of its own hides its calls; see probe.coverage."
        if not self._attachment.compiled:
            return "It may run compiled: pass compiled=True to watch()."
        return (
            "If the model ran compiled before watch(), its graphs know nothing of the probe: call "
            "torch._dynamo.reset() once after watch(), or call watch() before the first step. "
            "Otherwise a kernel of its own hides its calls; see probe.coverage."
        )

    def _silent_sites(self, step: int) -> Iterator[Alert]:
        silent = [
            site
            for site in self._attachment.sites.values()
            if not site.disabled and self._attachment.step - site.last_step >= SILENT_STEPS
        ]
        for site in silent:
            if site.name not in self._told:
                self._told.add(site.name)
                module = site.module()
                training = module is not None and module.training
                mode = "in train mode" if training else "in eval mode"
                yield _operational(
                    step,
                    "blind",
                    Severity.WARNING,
                    site.name,
                    f"{site.name} ({site.kind}, {mode}) gave no attention call for "
                    f"{SILENT_STEPS} steps; its numbers have stopped.",
                    "Call model.train() if it is to train.",
                )
                self._look_again()
        self._told -= {s.name for s in self._attachment.sites.values() if s not in silent}

    def _replaced(self, step: int) -> Iterator[Alert]:
        for layer, (old, new) in self._attachment.replaced().items():
            if (key := f"{layer}: {old} by {new}") in self._told:
                continue
            self._told.add(key)
            if not new:
                self._attachment.sites[layer].disabled = "no part of the model any more"
            yield _operational(
                step,
                "blind",
                Severity.WARNING,
                layer,
                f"{layer} ({old}) was replaced by a {new}; its attention is looked for now."
                if new
                else f"{layer} ({old}) is no part of the model any more; its numbers end.",
                "Watch the model after its modules are in place.",
            )
            self._look_again()

    def _look_again(self) -> None:
        self._discovery_steps = 0
        self._attachment.discover()

    def _unverified(self, step: int) -> Iterator[Alert]:
        for report in self._attachment.report():
            if report.error is not None and report.verified == "no":
                yield _operational(
                    step,
                    "unverified",
                    Severity.WARNING,
                    report.layer,
                    f"The numbers of {report.layer} may be wrong: {report.reason}.",
                    "Treat its alerts with care; please report it, with the layer's code.",
                )

    def _uncapped(self, step: int) -> Iterator[Alert]:
        """One alert for the whole model: it is one setting that is wrong."""
        sites = [site for site in self._attachment.sites.values() if site.cap_missed]
        if not sites or "soft-cap" in self._told:
            return
        self._told.add("soft-cap")
        first = sites[0]
        more = f" and {len(sites) - 1} more layers" if len(sites) > 1 else ""
        yield _operational(
            step,
            "soft_cap_missing",
            Severity.WARNING,
            first.name,
            f"{first.name}{more} asks for a soft-cap of {first.declared_cap} on its logits, and "
            f"the kernel ({first.seam}) did not get one: the model trains without it.",
            "Use an attention implementation that applies it, such as eager or flex attention.",
        )


def _operational(
    step: int, rule: str, severity: Severity, layer: str | None, message: str, remedy: str
) -> Alert:
    return Alert(
        step=step,
        rule=rule,
        severity=severity,
        layer=layer,
        message=message,
        remedies=(remedy,),
        origin=Origin.OPERATIONAL,
    )
