"""Why logits grew, in words, from the growth of the factors they are a product of."""

from __future__ import annotations

import math
from enum import StrEnum

from stability_probe.alerts.evidence import Evidence

ORDER = ("scale", "|q|", "|k|", "cosine", "the rest")
INPUT_SHARE = 1.2  # growth of the layer's input from which on it is named as a part of the cause


class Driver(StrEnum):
    """Which factor carries the growth."""

    NORMS = "norms"  # the lengths of queries and keys
    SCALE = "scale"  # the factor on q.k, where it is learned or scheduled
    ALIGNMENT = "alignment"  # queries and keys point the same way
    REST = "rest"  # not the largest norms: scale or alignment, not told apart
    UNKNOWN = "unknown"  # norms were not recorded


def driver(evidence: Evidence) -> Driver:
    """The factor with the largest share of the logarithm of the growth."""
    grown = {name: math.log(g) for name, g in evidence.factors.items() if g > 0}
    shares = {
        Driver.NORMS: grown.get("|q|", 0.0) + grown.get("|k|", 0.0),
        Driver.SCALE: grown.get("scale", 0.0),
        Driver.ALIGNMENT: grown.get("cosine", 0.0),
        Driver.REST: grown.get("the rest", 0.0),
    }
    most = max(shares, key=lambda name: shares[name])
    return most if shares[most] > 0 else Driver.UNKNOWN


def growth_cause(evidence: Evidence) -> str:
    """One line: how much each factor of the largest logit grew over the window."""
    if not evidence.factors:
        return "The cause cannot be split: the norms of q and k were not recorded at both ends."
    product = " · ".join(
        f"{name} {evidence.factors[name]:.2f}x" for name in ORDER if name in evidence.factors
    )
    lead = {
        Driver.NORMS: "queries and keys grew longer",
        Driver.SCALE: "the scale on q.k grew",
        Driver.ALIGNMENT: "queries and keys turned the same way",
        Driver.REST: "the largest norms do not explain it: the scale grew or q and k aligned",
        Driver.UNKNOWN: "no factor grew",
    }[driver(evidence)]
    grown = evidence.input_growth
    fed = f"; the layer's input grew {grown:.2f}x" if grown and grown >= INPUT_SHARE else ""
    return f"{lead[0].upper()}{lead[1:]} ({product}){fed}."


def entropy_change(evidence: Evidence) -> str:
    """The entropy of the heads, from -> to, as part of a sentence."""
    if evidence.entropy_ratio is None:
        return "entropy ratio not known"
    then, now = evidence.entropy_ratio
    return f"entropy ratio {then:.2g} -> {now:.2g}"


def named_heads(heads: tuple[int, ...], *, most: int = 8) -> str:
    """Heads as part of a sentence, no longer than a line."""
    if not heads:
        return "heads not known"
    named = ", ".join(str(h) for h in heads[:most])
    more = f" and {len(heads) - most} more" if len(heads) > most else ""
    return f"head{'s' if len(heads) > 1 else ''} {named}{more}"
