"""`<output>.digests`: the digest of each input row as it was read for its answer.

A changed input is compared with these digests to find the rows that were answered. The file holds the digests of rows
0, 1, 2 and so on, 16 bytes each (`rows.row_digest`). It is written and synced before the output, so that an answer on
disk has its digest there too. If a digest is lost, its row is answered again once the input has changed.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from nvcli.core.system.regular_file import open_unlinked
from nvcli.job.own_files import digests_path
from nvcli.job.rows.row_digest import DIGEST_BYTES

_LOST = bytes(DIGEST_BYTES)
"""Zeros, which a power loss may leave in place of a digest."""


class DigestFile:
    """The digests of a run, added by the thread that reads rows and written by the one that writes the output."""

    def __init__(self, output: Path) -> None:
        """`output` is the output beside the file, which `begin` or `resume` opens."""
        self._path = digests_path(output)
        self._fd: int | None = None
        self._lock = threading.Lock()
        self._pending = bytearray()
        self._num_rows = 0

    def begin(self) -> None:
        """Create or empty the file, before the output has rows. Raises OSError."""
        self._fd = open_unlinked(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.fsync(self._fd)

    def resume(self) -> None:
        """Open the file of an output to be continued, and cut off damaged digests. Raises OSError."""
        self._fd = open_unlinked(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._num_rows = _sound_rows(self._path.read_bytes())
        os.ftruncate(self._fd, self._num_rows * DIGEST_BYTES)

    def wants(self, index: int) -> bool:
        """Tell whether the digest of a row is missing."""
        return index >= self._num_rows

    def add(self, digest: bytes) -> None:
        """Take the digest of the next missing row."""
        with self._lock:
            self._pending += digest
        self._num_rows += 1

    def add_all(self, digests: bytes) -> None:
        """Take the digests of all rows from the first on; known ones are skipped."""
        whole = len(digests) // DIGEST_BYTES * DIGEST_BYTES
        with self._lock:
            self._pending += digests[self._num_rows * DIGEST_BYTES : whole]
        self._num_rows = max(self._num_rows, whole // DIGEST_BYTES)

    def flush(self) -> None:
        """Write the digests added so far. Raises OSError."""
        if self._fd is None:
            return
        with self._lock:
            while self._pending:
                del self._pending[: os.write(self._fd, self._pending)]

    def sync(self) -> None:
        """Write the digests added so far, and wait until they are on disk. Raises OSError."""
        self.flush()
        if self._fd is not None:
            os.fsync(self._fd)

    def close(self) -> None:
        """Close the file. Digests not written yet belong to rows that the output does not have. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _sound_rows(data: bytes) -> int:
    """Count the digests before the first lost one, without the last of them, which may be damaged."""
    num_rows = len(data) // DIGEST_BYTES
    at = data.find(_LOST)
    return num_rows if at < 0 else min(num_rows, max(0, at // DIGEST_BYTES - 1))
