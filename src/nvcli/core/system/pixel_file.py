"""PixelFile: the memory in which a run keeps the pixels of images, as its image processes and ranks see it."""

from __future__ import annotations

import os


class PixelFile:
    """A file without a name, of another process. It knows no images, only bytes and their places."""

    def __init__(self, path: str) -> None:
        """`path` is the file's in /proc; what follows a `#` only tells it from others that had the path before."""
        self.path = path
        self._fd = os.open(path.partition("#")[0], os.O_RDWR | os.O_CLOEXEC)

    def write(self, data: bytes, offset: int) -> None:
        """Write pixels. Raises OSError where there is no memory for them."""
        left = memoryview(data)
        while left:
            written = os.pwrite(self._fd, left, offset)
            left, offset = left[written:], offset + written

    def read(self, into: memoryview, offset: int) -> None:
        """Fill a buffer with pixels. Raises OSError where they end early."""
        if os.preadv(self._fd, [into], offset) != into.nbytes:
            raise OSError(f"{self.path}: the pixels of an image end early")

    def close(self) -> None:
        os.close(self._fd)
