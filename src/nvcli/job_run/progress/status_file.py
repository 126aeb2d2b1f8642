"""`--progress-file`: how a run stands, as JSON for other programs.

The file is replaced as a whole, about once a second and when the run ends, so that a reader never sees half of it. It
holds a `RunStatus`. A run that was killed leaves it in the state `running`; `pid` and `updated_at` tell.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType

import msgspec

from nvcli.errors import ConfigError, NvcliError
from nvcli.job_run.progress.display import Progress
from nvcli.job_run.progress.run_status import RunStatus, RunView, State, bare_status

WRITE_SECONDS = 1.0


class StatusFile(Progress):
    """A display that keeps a file up to date beside another display, `shown`."""

    def __init__(
        self,
        path: Path,
        shown: Progress,
        *,
        taken: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`taken` are files of the job, which `path` must not replace. Raises ConfigError for a bad `path`."""
        self._path = path
        self._shown = shown
        self._clock = clock
        self._next = clock()
        self._started = datetime.datetime.now(datetime.UTC)
        self._view: RunView | None = None
        self._failed = False
        if os.path.isdir(path):
            raise ConfigError(f"--progress-file {path} is a folder; name a file in it")
        if os.path.exists(path) and not os.path.isfile(path):
            raise ConfigError(f"--progress-file {path} is no regular file, and would be replaced by one; name another")
        self._new = path.with_name(f".{path.name}.new")
        real_taken = set(map(os.path.realpath, taken))
        for name in (path, self._new):
            if os.path.realpath(name) in real_taken:
                raise ConfigError(
                    f"--progress-file {path}: {name} is a file of the job itself, and would be replaced; name another"
                )
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise ConfigError(f"--progress-file {path} cannot be written: no folder {path.parent}, or no permission")

    def note(self, line: str) -> None:
        self._shown.note(line)

    def update(self, view: RunView) -> None:
        self._shown.update(view)
        self._view = view
        if self._clock() >= self._next:
            self._next = self._clock() + WRITE_SECONDS
            self._write(view.status())

    def close(self) -> None:
        self._shown.close()

    def __enter__(self) -> Progress:
        self._write(bare_status("starting", self._started))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        state: State = "failed"
        if error is None:
            state = "done"
        elif not isinstance(error, Exception):
            state = "interrupted"
        message = None
        if state == "failed":
            message = str(error) if isinstance(error, NvcliError) else repr(error)
            message = message.encode(errors="backslashreplace").decode()  # it may name a file whose name is no text
        view = self._view
        self._write(bare_status(state, self._started, message) if view is None else view.status(state, message))

    def _write(self, status: RunStatus) -> None:
        new = self._new
        try:
            new.write_bytes(msgspec.json.format(msgspec.json.encode(status), indent=2) + b"\n")
            new.replace(self._path)
        except OSError as error:
            if not self._failed:  # the rows matter more
                self._failed = True
                self.note(f"--progress-file {self._path} cannot be written: {error.strerror}; the run goes on")
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
