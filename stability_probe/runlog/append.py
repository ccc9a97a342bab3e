"""A file that only grows, each record in the kernel when `append` returns."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | getattr(os, "O_BINARY", 0)
_sync = getattr(os, "fdatasync", os.fsync)


class AppendFile:
    """A new file, open for appending whole records.

    After a failure the file is cut back to its last whole record and closed for good: nobody
    knows what a failed write left behind it. A file that is closed without a record is removed.

    Attributes:
        path: where it lies.
        size: bytes of all whole records.
        closed: whether nothing more can be appended.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self.closed = False
        self._descriptor = os.open(path, _FLAGS, 0o666)

    def append(self, record: bytes | memoryview) -> int:
        """Appends one record and returns its offset in bytes.

        Raises:
            OSError: it could not be written, or the file was removed meanwhile.
        """
        try:
            self._check_linked()
            left = memoryview(record)
            while left:  # once, unless the disk is nearly full or a signal came
                left = left[os.write(self._descriptor, left) :]
        except BaseException:
            self._abandon()
            raise
        offset = self.size
        self.size += len(record)
        return offset

    def sync(self) -> None:
        """Waits until the records are on the disk.

        Raises:
            OSError: they may not be.
        """
        if self.closed:
            return
        try:
            _sync(self._descriptor)
        except BaseException:
            self._abandon()
            raise

    def close(self) -> None:
        """Closes the file; again is harmless."""
        if self.closed:
            return
        self.closed = True
        os.close(self._descriptor)
        if self.size == 0:
            self.path.unlink(missing_ok=True)

    def _check_linked(self) -> None:
        # The kernel takes writes to a removed file gladly, and no reader will ever see them.
        if os.fstat(self._descriptor).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "the file was removed", str(self.path))

    def _abandon(self) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, self.size)
        with contextlib.suppress(OSError):
            self.close()
