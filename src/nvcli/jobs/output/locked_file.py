"""A file that one run at a time may write to."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

from nvcli.errors import ConfigError
from nvcli.jobs.output.manifest import sync_folder
from nvcli.jobs.own_files import real_path, rewrite_path

_CHUNK_BYTES = 1024 * 1024


class LockedFile:
    """An open file with a lock that goes with the process, however that ends. No other file is needed for the lock."""

    def __init__(self, path: Path) -> None:
        """Open the file or make it. Raises ConfigError where it cannot be opened or another run holds it."""
        self.path = path = real_path(path)
        """The file itself, behind a symbolic link, so that the link stays."""
        self.is_new = not path.exists()
        try:
            self.fd = _open_locked(path)
        except BlockingIOError:
            raise ConfigError(
                f"another run is writing to the output {path}; wait for its end, or name another with -o"
            ) from None
        except OSError as error:
            raise ConfigError(f"the output {path} cannot be written: {error.strerror}") from None

    @property
    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def truncate(self, size: int) -> None:
        """Cut the file off at `size`, and wait until that is on disk."""
        os.ftruncate(self.fd, size)
        os.fsync(self.fd)

    def replace(self, chunks: Iterable[bytes]) -> None:
        """Write the file anew. After a crash there is the old file or the new one. The lock is kept throughout."""
        temporary = rewrite_path(self.path)
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            _lock(fd)
            os.fchmod(fd, os.fstat(self.fd).st_mode & 0o7777)
            for chunk in chunks:
                view = memoryview(chunk)
                while view:
                    view = view[os.write(fd, view) :]
            os.fsync(fd)
            temporary.replace(self.path)
        except BaseException:
            os.close(fd)
            temporary.unlink(missing_ok=True)
            raise
        os.close(self.fd)
        self.fd = fd
        sync_folder(self.path.parent)

    def close(self) -> None:
        os.close(self.fd)


def in_chunks(lines: Iterable[bytes]) -> Iterable[bytes]:
    """Join lines, which have no newline, to chunks of about a mebibyte."""
    chunk = bytearray()
    for line in lines:
        chunk += line
        chunk += b"\n"
        if len(chunk) >= _CHUNK_BYTES:
            yield bytes(chunk)
            chunk.clear()
    if chunk:
        yield bytes(chunk)


def _open_locked(path: Path) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            _lock(fd)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), path.stat()):
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # the run that held it has replaced or removed the file


def _lock(fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass  # a file system without locks
