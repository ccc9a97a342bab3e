"""One module that was seen to call attention: what is remembered of it, and its calls."""

from __future__ import annotations

import dataclasses
import weakref

from torch import nn

from stability_probe.capture.functions import Seen
from stability_probe.capture.layout import canonical
from stability_probe.capture.scope import Admission, Frame
from stability_probe.capture.shards import HeadShare, local_part, share_of
from stability_probe.capture.verify import Verification, verify
from stability_probe.records import AttentionCall, SiteReport


@dataclasses.dataclass(slots=True, eq=False)
class Site:
    """What is remembered of a module that calls attention."""

    name: str
    index: int  # in the order of the first forward
    module: weakref.ref[nn.Module]
    kind: str = ""  # its class
    heads: int | None = None  # what the module declares
    seen_heads: int = 0
    seam: str = ""
    sees: str = ""  # "qk" or "scores"
    calls: int = 0
    calls_in_forward: int = 0
    last_step: int = 0
    verification: Verification | None = None
    unverifiable: str = ""  # why nothing could be compared
    disabled: str = ""  # why nothing is recorded any more
    plain_softmax: bool = False  # its softmax does not descend from q k^T, yet weighs values
    share: HeadShare | None = None  # which heads are on this rank, as its first call said
    share_asked: bool = False

    def share_of(self, seen: Seen) -> HeadShare | None:
        """Which of all heads a localized call shows; looked up once."""
        if not self.share_asked:
            self.share = share_of(self.module(), seen, seen.heads or self.heads)
            self.share_asked = True
        return self.share

    def note(self, call: AttentionCall, *, step: int) -> None:
        """Takes a call into account."""
        matrix = call.q_BHQD if call.q_BHQD is not None else call.scores_BHQK
        self.seen_heads = 0 if matrix is None else matrix.shape[1]
        self.seam, self.sees = call.seam, "qk" if call.q_BHQD is not None else "scores"
        self.calls += 1
        self.calls_in_forward += 1
        self.last_step = step

    def verify(self, call: AttentionCall, seen: Seen) -> None:
        """Compares the call with what the model computed; failing to is no fault of the site."""
        weights = seen.weights
        if weights is not None:
            weights = weights.reshape(-1, self.seen_heads, *weights.shape[-2:])
        try:
            self.verification = verify(call, weights, seen.dropout)
        except Exception as error:
            self.unverifiable = f"{type(error).__name__}: {error}"

    def report(self) -> SiteReport:
        """The site's line of the coverage table. Waits for the device."""
        report = SiteReport(
            self.name, self.kind, self.seam, self.seen_heads, self.sees, self.calls,
            reason=self.disabled or self.unverifiable,
        )  # fmt: skip
        found = self.verification
        if found is None:
            reason = report.reason or "no measured call could be compared yet"
            return dataclasses.replace(report, reason=reason)
        error = found.relative()
        if found.passed():
            return dataclasses.replace(report, verified=found.against, error=error)
        reason = f"the rebuilt {found.against} differs by {error:.1e} (relative)"
        return dataclasses.replace(report, error=error, reason=self.disabled or reason)


def call_of(site: Site, frame: Frame, seen: Seen, *, with_input: bool) -> AttentionCall:
    """The call as the statistics take it.

    Raises:
        UnsupportedCallError: it cannot be read.
    """
    rms = None
    given = local_part(frame.input) if with_input else None
    if given is not None:
        rms = given.float().square().mean().sqrt()
    share = site.share_of(seen)
    return AttentionCall(
        layer=site.name,
        layer_index=site.index,
        call_index=site.calls_in_forward,
        seam=seen.seam,
        causal=seen.causal,
        softcap=seen.softcap,
        score_mod=seen.score_mod,
        mask_mod=seen.mask_mod,
        sequences=seen.sequences,
        dtype=seen.dtype,
        fused=seen.seam == "sdpa",
        pre_scaled=seen.pre_scaled,
        phase="eval_grad" if frame.admission is Admission.EVAL_GRAD else "train",
        provisional=frame.admission is Admission.PROVISIONAL,
        input_rms=rms,
        head_offset=0 if share is None else share.offset,
        all_heads=None if share is None else share.total,
        replica=share is not None and share.replica,
        **canonical(seen, site.heads),
    )
