"""PixelMemory: the pixels of images whose rows wait or run, in memory that the ranks can read.

It is a file without a name, which ends with its process, and which image processes and ranks open through /proc. Places
are handed out one after another, each as large as its pixels may be: only what is written takes memory, which goes back
to the kernel once nobody holds the pixels. So there is nothing to search for or to move.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import threading

from nvcli.kernels.whole_numbers import round_up
from nvcli.models.vision.image_size import Fit

_PAGE = 4096
_KEEP_SIZE_AND_PUNCH_HOLE = 0x01 | 0x02
"""FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE of Linux."""


class Pixels:
    """The pixels of one image: [height, width, 3] bytes, after those of its tiles row by row, if it has any, or before
    them (`Fit.has_whole_first`). Its memory is free once nobody holds it."""

    __slots__ = ("__weakref__", "_memory", "fit", "key", "num_bytes", "offset")

    def __init__(self, memory: PixelMemory, offset: int, fit: Fit, key: bytes) -> None:
        self._memory, self.offset, self.fit, self.key = memory, offset, fit, key
        self.num_bytes = sum(3 * tall * wide for tall, wide in fit.pictures)

    @property
    def file(self) -> str:
        """`PixelMemory.path`"""
        return self._memory.path

    def read(self) -> bytes:
        """Return the pixels."""
        return self._memory.read(self.offset, self.num_bytes)

    def __del__(self) -> None:
        self._memory.free(self.offset, self.num_bytes)


class PixelMemory:
    """The memory of a run."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("nvcli-pixels", os.MFD_CLOEXEC)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}#{secrets.token_hex(4)}"
        """The path by which ranks open it, and after `#` what tells it from an earlier memory with that path."""
        self._end = 0
        self._lock = threading.Lock()
        self._fallocate = ctypes.CDLL(None, use_errno=True).fallocate
        self._fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]

    def reserve(self, num_bytes: int) -> int:
        """Reserve a place for pixels of up to `num_bytes`."""
        with self._lock:
            offset, self._end = self._end, self._end + round_up(num_bytes, _PAGE)
        return offset

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return what was written to a place."""
        return os.pread(self._fd, num_bytes, offset)

    def free(self, offset: int, num_bytes: int) -> None:
        """Give pixels back to the kernel."""
        length = round_up(num_bytes, _PAGE)
        self._fallocate(self._fd, _KEEP_SIZE_AND_PUNCH_HOLE, offset, length)

    @property
    def num_bytes(self) -> int:
        """The bytes that are in use."""
        return os.fstat(self._fd).st_blocks * 512

    def __del__(self) -> None:
        os.close(self._fd)
