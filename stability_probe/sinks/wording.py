"""How an alert is put into words: the same places and names in every sink."""

from __future__ import annotations

from collections.abc import Sequence

from stability_probe.records import Alert


def head_list(heads: Sequence[int]) -> str:
    """Heads as runs of consecutive numbers: (1, 4, 5, 6) gives ``"heads 1, 4-6"``.

    Args:
        heads: Query head indices in any order; empty gives ``""``.
    """
    spans: list[list[int]] = []
    for head in sorted(set(heads)):
        if spans and head == spans[-1][1] + 1:
            spans[-1][1] = head
        else:
            spans.append([head, head])
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in spans]
    if not parts:
        return ""
    return ("head " if len(set(heads)) == 1 else "heads ") + ", ".join(parts)


def place(alert: Alert) -> str:
    """Where it happened: ``"layer 3 (decoder.3.attn), heads 1, 4-6"``, or the whole run."""
    if alert.layer is None:
        return "the whole run"
    named = (
        alert.layer if alert.layer_index is None else f"layer {alert.layer_index} ({alert.layer})"
    )
    return ", ".join(part for part in (named, head_list(alert.heads)) if part)


def plain(text: str) -> str:
    """The text without control characters, which could move a terminal's cursor.

    Recorded runs are untrusted input. Line breaks and tabs stay; everything else that is not
    printable becomes U+FFFD.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
