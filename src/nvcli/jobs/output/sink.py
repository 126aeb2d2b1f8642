"""The sink of an output's bytes: it appends whole chunks, and a thread of its own syncs them to disk."""

from __future__ import annotations

import contextlib
import os
import select
import stat
import threading
from collections.abc import Callable
from pathlib import Path

from nvcli.errors import OutputError
from nvcli.file_limits import explain_failed_write
from nvcli.jobs.output.digest_file import DigestFile
from nvcli.jobs.output.output_guard import OutputGuard


class OutputClosed(Exception):
    """Whoever read our standard output has gone (`nvcli … -o - | head`); nobody wants the rest."""


class Sink:
    """An open file descriptor and its compression. One thread writes; syncing never holds it up."""

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
        """Whether `before_first_write` was called, or there is none."""
        self._wake = threading.Condition()
        self._sync_wanted = False
        self._closing = False
        self._sync_error: OSError | None = None
        self._syncer: threading.Thread | None = None

    def start(self) -> None:
        """Call `before_first_write` if that was not done yet. Raises OutputError."""
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
        """Ask that everything written so far be put on disk soon. Does not wait."""
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
        """Put everything on disk and close the descriptor. Raises OutputError. Idempotent."""
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
