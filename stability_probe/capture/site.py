"""One module that was seen to call attention: what is remembered of it, and its calls."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable

from torch import nn

from stability_probe.capture.functions import Seen
from stability_probe.capture.jagged import packed, values_of
from stability_probe.capture.layout import canonical
from stability_probe.capture.scope import Admission, Frame
from stability_probe.capture.shards import HeadShare, local_part, share_of
from stability_probe.capture.sites import head_count, identity, soft_cap
from stability_probe.capture.verify import Verification, verify
from stability_probe.records import AttentionCall, SiteReport


def _nothing() -> None:
    """The reference of a site that has no module yet."""


@dataclasses.dataclass(slots=True, eq=False)
class Site:
    """What is remembered of a module that calls attention."""

    name: str
    index: int  # of its module in the model
    module: Callable[[], nn.Module | None] = _nothing  # a weak reference
    identity: int = 0  # its, see `sites.identity`
    kind: str = ""  # its class
    heads: int | None = None  # what the module declares
    seen_heads: int = 0
    seam: str = ""
    sees: str = ""  # "qk", "scores", or "scores, qk" where q and k give only the raw products
    attends: str = ""  # "self", "cross", "mixed"; empty: not known yet
    key_heads: int = 0  # fewer than `seen_heads` under grouped-query attention
    declared_cap: float | None = None  # the module or its config asks for a soft-cap
    cap_missed: bool = False  # and a call did not get one
    calls: int = 0
    last_step: int = 0
    verification: Verification | None = None
    unverifiable: str = ""  # why nothing could be compared
    unreadable: str = ""  # why some of its calls cannot be read
    disabled: str = ""  # why nothing is recorded any more
    compiled: bool = False  # its calls come from a compiled graph
    plain_softmax: bool = False  # its softmax does not descend from q k^T, yet weighs values
    share: HeadShare | None = None  # which heads are on this rank, as its first call said
    share_asked: bool = False

    def share_of(self, seen: Seen) -> HeadShare | None:
        """Which of all heads a localized call shows; looked up once."""
        if not self.share_asked:
            self.share = share_of(self.module(), seen, seen.heads or self.heads)
            self.share_asked = True
        return self.share

    def adopt(self, module: nn.Module) -> None:
        """Stands for this module from now on: a first one, or one that has replaced it."""
        self.module, self.identity = weakref.ref(module), identity(module)
        self.kind = type(module).__name__
        self.heads, self.declared_cap = head_count(module), soft_cap(module)
        self.attends, self.verification = "", None
        self.unverifiable = self.unreadable = self.disabled = ""

    def note(self, call: AttentionCall, seen: Seen, *, step: int) -> None:
        """Takes a call into account."""
        matrix = call.q_BHQD if call.q_BHQD is not None else call.scores_BHQK
        self.seen_heads = 0 if matrix is None else matrix.shape[1]
        self.key_heads = self.seen_heads if call.k_BGKD is None else call.k_BGKD.shape[1]
        if call.q_BHQD is None:
            self.sees = "scores"
        else:
            self.sees = "qk" if seen.exact else "scores, qk"
        self.seam = call.seam
        self.attends = self.attends or seen.attends
        capped = call.softcap is not None or call.score_mod is not None
        self.cap_missed |= self.declared_cap is not None and not capped and seen.exact
        self.calls += 1
        self.last_step = step

    def verify(self, call: AttentionCall, seen: Seen) -> None:
        """Compares the call with what the model computed; failing to is no fault of the site."""
        weights = seen.weights
        if weights is not None:
            weights = weights.reshape(-1, self.seen_heads, *weights.shape[-2:])
        if not seen.exact:
            call = dataclasses.replace(call, q_BHQD=None, k_BGKD=None)
        try:
            self.verification = verify(call, weights, seen.dropout, seen.row_max)
        except Exception as error:
            self.unverifiable = f"{type(error).__name__}: {error}"

    def report(self) -> SiteReport:
        """The site's line of the coverage table. Waits for the device."""
        report = SiteReport(
            self.name, self.kind, self.seam, self.seen_heads, self.sees, self.calls,
            attends=self.attends, key_heads=self.key_heads,
            reason=self.disabled or self.unreadable or self.unverifiable,
        )  # fmt: skip
        found = self.verification
        if found is None:
            reason = report.reason or "no measured call could be compared yet"
            return dataclasses.replace(report, reason=reason)
        error = found.relative()
        if error != error:  # the rows hold NaN: another call will do
            self.verification = None
            reason = report.reason or "the call that was compared was not finite"
            return dataclasses.replace(report, reason=reason)
        if found.passed():
            return dataclasses.replace(report, verified=found.against, error=error)
        reason = f"the rebuilt {found.against} differs by {error:.1e} (relative)"
        return dataclasses.replace(report, error=error, reason=self.disabled or reason)


def call_of(site: Site, frame: Frame, seen: Seen, *, index: int, with_input: bool) -> AttentionCall:
    """The call as the statistics take it.

    Raises:
        UnsupportedCallError: it cannot be read.
    """
    seen, rms = packed(seen), None
    given = local_part(frame.input)
    if given is not None:
        given = values_of(given.detach())
        if with_input:
            rms = given.float().square().mean().sqrt()
    share = site.share_of(seen)
    return AttentionCall(
        layer=site.name,
        layer_index=site.index,
        call_index=index,
        seam=seen.seam,
        causal=seen.causal,
        softcap=seen.softcap,
        score_mod=seen.score_mod,
        mask_mod=seen.mask_mod,
        sequences=seen.sequences,
        dtype=seen.dtype,
        fused=seen.seam != "softmax",
        pre_scaled=seen.pre_scaled,
        phase="eval_grad" if frame.admission is Admission.EVAL_GRAD else "train",
        input_rms=rms,
        input=given,
        head_offset=0 if share is None else share.offset,
        all_heads=None if share is None else share.total,
        replica=share is not None and share.replica,
        **canonical(seen, site.heads),
    )
