"""Sees attention calls in a running model. Knows nothing of statistics, files or alerts."""

from stability_probe.capture.attach import attach
from stability_probe.capture.attachment import Attachment

__all__ = ["Attachment", "attach"]
