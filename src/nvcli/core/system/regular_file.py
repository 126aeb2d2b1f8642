"""Regular files, opened without the traps of other kinds.

Opening a FIFO waits for a writer that may never come, a device may have no end, and a socket has no bytes to read.
Files of a checkpoint, of the configuration and of a job are opened here, so that these are refused instead. Files that
a job writes under predictable names are not opened through a symbolic link, which could lead to any file of the user's.
The errors are OSErrors whose `strerror` says what is there, for the caller to append to the file's name.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

LINK = "it is a symbolic link, which is not followed"

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def check_regular(path: Path) -> None:
    """Raise OSError unless `path` is a regular file or a link to one; FileNotFoundError if nothing is there.

    Opens nothing, so it returns at once.
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
    """Open a regular file for reading. Raises OSError as `check_regular` does, and for an unreadable file."""
    check_regular(path)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # it may have become a FIFO in the meantime
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


def is_too_long(path: Path | str) -> bool:
    """Tell whether a name or a path is too long for the file system."""
    try:
        os.lstat(path)
    except OSError as error:
        return error.errno == errno.ENAMETOOLONG
    return False


def open_unlinked(path: Path, flags: int) -> int:
    """Open a file with these flags, and return its descriptor. Raises OSError, also for a symbolic link."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise OSError(errno.ELOOP, LINK, str(path)) from None
        raise


def create_anew(path: Path, *, mode: int = 0o666) -> BinaryIO:
    """Create a file for writing and reading, replacing what is there but not the target of a link.

    Raises OSError.
    """
    path.unlink(missing_ok=True)
    return open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "w+b")


def _check_mode(mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file")
