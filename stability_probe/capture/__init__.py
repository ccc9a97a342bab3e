"""Sees attention calls in a running model. Knows nothing of statistics, files or alerts."""

from stability_probe.capture.attach import Attachment, attach

__all__ = ["Attachment", "attach"]
