"""The sink of an output's bytes: appends whole chunks, which a thread syncs to disk.

A guard notices that another program changes the output meanwhile: replaces, removes, cuts or edits it. Before each
write and at the end, the output's name must lead to the open file, and the file must have the bytes that were written.
A change that keeps the size is told by the file's time of change, and then the bytes are read again.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

from nvcli.core.system.file_limits import explain_failed_write
from nvcli.errors import OutputError
from nvcli.job.file_state import FileState
from nvcli.job.output.digest_file import DigestFile

_READ_BYTES = 1024 * 1024


class OutputClosed(Exception):
    """The reader of standard output is gone (`nvcli … -o - | head`)."""


class OutputGuard:
    """Notices when other programs change an open output file."""

    def __init__(self, path: Path, fd: int) -> None:
        """`path` is the name that must lead to the file, and `fd` is the file as opened by this process."""
        self._path = path
        self._fd = fd
        self._state: FileState | None = None
        self._first_byte = 0
        self._checksum = 0
        self.was_touched = False
        """Whether the modification time has changed since our last write, but not the size."""

    def begin(self) -> None:
        """Start to watch the file in its present state. Raises OutputError."""
        self._state = FileState.of(self._fd)
        self._first_byte = self._state.num_bytes
        self.check()

    def check(self) -> None:
        """Raise OutputError if the name leads elsewhere, or the size has changed since the last write."""
        assert self._state is not None, "`begin` was not called"
        now = FileState.of(self._fd)
        check_place(self._path, self._fd)
        if now.num_bytes != self._state.num_bytes:
            raise _changed(self._path, f"it has {now.num_bytes:,} bytes, and had {self._state.num_bytes:,}")
        if now != self._state:
            self.was_touched = True
            self._state = now

    def wrote(self, data: bytes) -> None:
        """Record bytes that were appended. Raises OutputError if the file did not grow by just these."""
        assert self._state is not None, "`begin` was not called"
        expected = self._state.num_bytes + len(data)
        self._checksum = zlib.crc32(data, self._checksum)
        self._state = FileState.of(self._fd)
        if self._state.num_bytes != expected:
            raise _changed(self._path, f"it has {self._state.num_bytes:,} bytes, and {expected:,} were written")

    def check_written(self) -> None:
        """Check as `check` does, and read back what was written if the file was touched. Raises OutputError."""
        self.check()
        if self.was_touched and _checksum_from(self._fd, self._first_byte) != self._checksum:
            raise _changed(self._path, "it holds other bytes than were written")


def check_place(path: Path, fd: int) -> None:
    """Raise OutputError unless a name leads to an open file."""
    try:
        is_there = FileState.of(path).is_same_file(FileState.of(fd))
    except OSError:
        is_there = False
    if not is_there:
        raise _changed(path, "another file has taken its place, or it was removed")


def _checksum_from(fd: int, start: int) -> int:
    checksum = 0
    while chunk := os.pread(fd, _READ_BYTES, start):
        checksum = zlib.crc32(chunk, checksum)
        start += len(chunk)
    return checksum


def _changed(path: Path, what: str) -> OutputError:
    return OutputError(
        f"the output {path} was changed by another program during the run: {what}; rows that it no longer holds "
        "will be computed again"
    )


class Sink:
    """An open file descriptor with compression. One thread writes, and never waits for syncs."""

    def __init__(
        self,
        fd: int,
        name: str,
        *,
        pack: Callable[[bytes], bytes] = bytes,
        before_first_write: Callable[[], None] | None = None,
        guard: OutputGuard | None = None,
        digests: DigestFile | None = None,
    ) -> None:
        """Take over a descriptor. `pack` makes a complete compressed member of a chunk.

        `guard` knows the file and notices when somebody else changes it. `digests` are written and synced before the
        rows are.
        """
        self._fd = fd
        self._name = name
        self._pack = pack
        self._before_first_write = before_first_write
        self._guard = guard
        self._digests = digests
        self._is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        self.is_started = before_first_write is None
        """Whether `before_first_write` has been called, if there is one."""
        self._wake = threading.Condition()
        self._sync_wanted = False
        self._closing = False
        self._sync_error: OSError | None = None
        self._syncer: threading.Thread | None = None

    def start(self) -> None:
        """Call `before_first_write`, once. Raises OutputError."""
        if self._before_first_write is not None and not self.is_started:
            try:
                self._before_first_write()
            except OSError as error:
                raise self._failed(error) from error
            self.is_started = True

    def write(self, data: bytes) -> None:
        """Write all of `data`, unless an earlier sync failed. Raises OutputClosed or OutputError."""
        self.start()
        if self._sync_error is not None:
            raise self._failed(self._sync_error)
        if self._guard is not None:
            self._guard.check()
        start = os.fstat(self._fd).st_size if self._is_file else 0
        packed = self._pack(data)
        view = memoryview(packed)
        try:
            if self._digests is not None:
                self._digests.flush()
            while view:
                try:
                    view = view[os.write(self._fd, view) :]
                except BlockingIOError:  # a pipe that its other users have set not to wait
                    select.select([], [self._fd], [])
        except BrokenPipeError:
            raise OutputClosed from None
        except OSError as error:
            if self._is_file:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, start)  # no half lines; a run that continues it would cut them off
            raise self._failed(error) from error
        if self._guard is not None:
            self._guard.wrote(packed)

    def sync(self) -> None:
        """Request a sync of everything written so far. Does not wait."""
        if not self._is_file or not self.is_started:
            return
        if self._syncer is None:
            # A daemon: a disk that hangs must not keep an interrupted run from ending.
            self._syncer = threading.Thread(target=self._sync_when_asked, name="nvcli-sync", daemon=True)
            self._syncer.start()
        with self._wake:
            self._sync_wanted = True
            self._wake.notify()

    def close(self) -> None:
        """Sync everything and close the descriptor. Raises OutputError. Idempotent."""
        if self._closing:
            return
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._syncer is not None:
            self._syncer.join()
        try:
            if self._is_file and self.is_started:
                self._sync()
        except OSError as error:
            raise self._failed(error) from error
        finally:
            os.close(self._fd)
        if self._sync_error is not None:
            raise self._failed(self._sync_error)

    def _sync_when_asked(self) -> None:
        while True:
            with self._wake:
                while not self._sync_wanted and not self._closing:
                    self._wake.wait()
                if self._closing:
                    return  # `close` syncs
                self._sync_wanted = False
            try:
                self._sync()
            except OSError as error:
                self._sync_error = error
                return

    def _sync(self) -> None:
        if self._digests is not None:
            self._digests.sync()
        os.fsync(self._fd)

    def _failed(self, error: OSError) -> OutputError:
        why = explain_failed_write(error, Path(self._name))
        return OutputError(f"the output {self._name} cannot be written{' any further' * self.is_started}: {why}")
