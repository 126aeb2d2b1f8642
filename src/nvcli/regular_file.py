"""Regular files, opened without the traps of other kinds.

Opening a FIFO waits for somebody who may never come, a device may have no end, and a socket has no bytes to read. Files
of a checkpoint, of the configuration and of a job are opened here, so that such a thing is refused instead. The errors
are OSErrors whose `strerror` says what is there, for the caller to put behind the file's name.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def check_regular(path: Path) -> None:
    """Raise OSError unless `path` is a regular file or a link to one. FileNotFoundError: there is none.

    Nothing is opened, so that this returns at once.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            target = os.readlink(path)
            raise FileNotFoundError(errno.ENOENT, f"a link to {target}, where there is no file") from None
        raise FileNotFoundError(errno.ENOENT, "no such file") from None
    except ValueError as error:  # a name with a NUL
        raise FileNotFoundError(errno.ENOENT, str(error)) from None
    _check_mode(mode)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises OSError as `check_regular` does, and where it must not be read."""
    check_regular(path)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # it may have become a FIFO since
    try:
        _check_mode(os.fstat(fd).st_mode)
    except OSError:
        os.close(fd)
        raise
    return open(fd, "rb")


def read_regular(path: Path, *, most_bytes: int | None = None) -> bytes:
    """Read a regular file. Raises OSError as `open_regular` does, and for one of more than `most_bytes`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if most_bytes is not None and size > most_bytes:
            raise OSError(errno.EFBIG, f"{size:,} bytes, more than the {most_bytes:,} that such a file may have")
        return file.read()


def _check_mode(mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, where a regular file belongs")
