"""`--progress-file`: how a run stands, as JSON for other programs.

The file is replaced as a whole, about once a second and when the run ends, so that a reader never sees half of it. It
holds a `RunStatus`. A run that was killed leaves it in the state `running`; `pid` and `updated_at` tell.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from types import TracebackType

import msgspec

from nvcli.job_run.progress.display import Beside, Progress
from nvcli.job_run.progress.run_status import RunStatus, RunView, bare_status, how_it_ended
from nvcli.job_run.progress.side_file import SideFile

WRITE_SECONDS = 1.0


class StatusFile(Beside):
    """A display that keeps a file up to date beside another display, `shown`."""

    def __init__(self, file: SideFile, shown: Progress, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(shown)
        self._file = file
        self._clock = clock
        self._next = clock()
        self._started = datetime.datetime.now(datetime.UTC)
        self._view: RunView | None = None
        self._failed = False

    def update(self, view: RunView) -> None:
        super().update(view)
        self._view = view
        if self._clock() >= self._next:
            self._next = self._clock() + WRITE_SECONDS
            self._write(view.status())

    def __enter__(self) -> Progress:
        self._write(bare_status("starting", self._started))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        state, message = how_it_ended(error)
        view = self._view
        self._write(bare_status(state, self._started, message) if view is None else view.status(state, message))

    def _write(self, status: RunStatus) -> None:
        try:
            self._file.replace(msgspec.json.format(msgspec.json.encode(status), indent=2) + b"\n")
        except OSError as error:
            if not self._failed:  # the rows matter more
                self._failed = True
                self.warn(f"warning: {self._file} cannot be written: {error.strerror}; the run goes on")
