"""Explains why a file cannot be written when the system's own message is vague: a shell's limit, no inodes left, or a
read-only file system.

The processes of a run share memory as unnamed files, to which a shell's limit on file sizes applies too.
"""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

from nvcli.errors import ConfigError

_RAISE = "raise it with: ulimit -f unlimited"


def explain_failed_write(error: OSError, path: Path) -> str:
    """Explain why a file could not be created or written: the system's message, and the limit behind it, if any.

    `path` is the file that the message is about; if the error names another one, so does the explanation.
    """
    reason = error.strerror or str(error)
    other = error.filename2 or error.filename  # of two names, the second is the file to be written
    if isinstance(other, str | bytes | Path) and Path(os.fsdecode(other)) != path:
        reason = f"{os.fsdecode(other)}: {reason}"
        path = Path(os.fsdecode(other))
    limit = _most_bytes_of_a_file()
    if error.errno == errno.EFBIG and limit is not None:
        return f"{reason}: this shell lets a program write files of at most {limit:,} bytes (`ulimit -f`); {_RAISE}"
    if error.errno == errno.ENOSPC and _has_no_inodes(path.parent):
        return f"{reason}: the file system of {path.parent} has no free inode (`df -i`); remove files there"
    return reason


def why_not_writable(path: Path) -> str:
    """Explain why an existing file or folder is not writable for this user."""
    try:
        is_read_only = bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError as error:
        return error.strerror or str(error)
    return "its file system is mounted read-only" if is_read_only else "no permission"


def resize_memory_file(fd: int, num_bytes: int) -> None:
    """Set the size of a file in memory. Raises ConfigError if the shell's limit on file sizes is lower, and OSError."""
    try:
        os.ftruncate(fd, num_bytes)
    except OSError as error:
        limit = _most_bytes_of_a_file()
        if error.errno != errno.EFBIG or limit is None:
            raise
        raise ConfigError(
            f"this shell lets a program write files of at most {limit:,} bytes (`ulimit -f`), which also limits the "
            f"memory that the processes of a run share: {num_bytes:,} bytes are needed; {_RAISE}"
        ) from None


def _most_bytes_of_a_file() -> int | None:
    """Return the shell's limit on file sizes; None if there is none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if limit == resource.RLIM_INFINITY else limit


def _has_no_inodes(folder: Path) -> bool:
    """Tell whether a file system has run out of inodes."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return False
    return found.f_files > 0 and found.f_favail == 0
