"""A file that one run at a time may write to."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

from nvcli.core.system.file_limits import explain_failed_write
from nvcli.core.system.regular_file import open_unlinked
from nvcli.errors import ConfigError, OutputError
from nvcli.job.output.lock_file import LockFile, is_on_local_disk
from nvcli.job.output.manifest import new_file, sync_folder
from nvcli.job.own_files import lock_path, real_path, rewrite_path

_CHUNK_BYTES = 1024 * 1024


class LockedFile:
    """An open file with a lock that goes with the process, however that ends.

    Where the file system does not keep such a lock, the lock file beside the output keeps other runs away.
    """

    def __init__(self, path: Path, output: Path) -> None:
        """Open or create the file. Raises ConfigError if it cannot be opened or another run holds it, and OutputError
        if the disk is full.

        `output` is the output that the file belongs to, or the file itself.
        """
        self.path = path = real_path(path) if path == output else path
        """The file itself, behind a symbolic link if the output is one."""
        self.is_new = not path.exists()
        try:
            self.fd = _open_locked(path)
        except BlockingIOError:
            raise ConfigError(
                f"another run is writing to the output {path}; wait for it to end, or name another with -o"
            ) from None
        except OSError as error:
            raise _not_opened(path, error) from None
        try:
            self._lock_file = LockFile(
                lock_path(output), output, locks_work=_is_kept_from_others(path), is_shared=not is_on_local_disk(path)
            )
        except BaseException as error:
            os.close(self.fd)  # a new file stays: the run that has the lock file may have opened it
            if isinstance(error, OSError):
                raise _not_opened(path, error) from None
            raise

    @property
    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def truncate(self, size: int) -> None:
        """Truncate the file to `size`, and wait until that is on disk."""
        os.ftruncate(self.fd, size)
        os.fsync(self.fd)

    def replace(self, chunks: Iterable[bytes]) -> None:
        """Rewrite the file. After a crash there is the old or the new one. The lock is kept throughout."""
        self.write_draft(chunks)
        self.adopt_draft()
        sync_folder(self.path.parent)

    def write_draft(self, chunks: Iterable[bytes]) -> None:
        """Write a new version of the file beside it, and wait until its bytes are on disk."""
        with new_file(rewrite_path(self.path)) as file:
            os.fchmod(file.fileno(), os.fstat(self.fd).st_mode & 0o7777)
            file.writelines(chunks)

    def adopt_draft(self) -> None:
        """Replace the file by its new version, if there is one. The folder is not synced."""
        draft = rewrite_path(self.path)
        try:
            fd = open_unlinked(draft, os.O_RDWR | os.O_APPEND)
        except FileNotFoundError:
            return
        try:
            _lock(fd)
            draft.replace(self.path)
        except BaseException:
            os.close(fd)
            raise
        os.close(self.fd)
        self.fd, self.is_new = fd, False

    def close(self) -> None:
        try:
            self._lock_file.release()
        finally:
            os.close(self.fd)


def in_chunks(lines: Iterable[bytes]) -> Iterable[bytes]:
    """Join lines without newlines to chunks of about a mebibyte."""
    chunk = bytearray()
    for line in lines:
        chunk += line
        chunk += b"\n"
        if len(chunk) >= _CHUNK_BYTES:
            yield bytes(chunk)
            chunk.clear()
    if chunk:
        yield bytes(chunk)


def _not_opened(path: Path, error: OSError) -> ConfigError | OutputError:
    kind = OutputError if error.errno in (errno.ENOSPC, errno.EDQUOT) else ConfigError  # as where a disk fills up later
    return kind(f"the output {path} cannot be written: {explain_failed_write(error, path)}")


def _open_locked(path: Path) -> int:
    while True:
        fd = open_unlinked(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
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


def _is_kept_from_others(path: Path) -> bool:
    """Tell whether the lock that this process holds on a file keeps others out."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False
