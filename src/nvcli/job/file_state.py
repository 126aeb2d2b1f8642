"""The state of a file according to the system, which shows a change without reading the file."""

from __future__ import annotations

import os
from typing import NamedTuple


class FileState(NamedTuple):
    """The identity, the size and the time of the last change of a file's bytes.

    Whoever writes to a file changes its state, unless two writes fall into one tick of the system's clock (4 ms).
    """

    device: int
    inode: int
    num_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, file: str | os.PathLike[str] | int) -> FileState:
        """Return the state of the file at a path or behind an open descriptor. Raises OSError."""
        found = os.stat(file)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)

    def is_same_file(self, other: FileState) -> bool:
        """Tell whether the other state is of the same file, whatever its contents."""
        return (self.device, self.inode) == (other.device, other.inode)
