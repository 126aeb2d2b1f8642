"""Files named by flags that a run replaces atomically, so that readers never see half of one.

Such a file must be no file of the job itself, and nothing but a regular file, because whatever is there is replaced.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from nvcli.core.system.file_limits import why_not_writable
from nvcli.core.system.regular_file import create_anew, is_too_long
from nvcli.errors import ConfigError
from nvcli.job.progress.run_status import RunStatus, RunView, bare_status, how_it_ended


class SideFile:
    """The file that `flag` names. `str` gives both, for messages."""

    def __init__(self, flag: str, path: Path, *, taken: Collection[str] = ()) -> None:
        """`taken` are files that `path` must not replace. Raises ConfigError for a bad `path`."""
        self.path = path
        self._text = f"{flag} {path}"
        self._new = path.with_name(f".{path.name}.new")
        if too_long := next(filter(is_too_long, self.names), None):
            raise ConfigError(
                f"{self} cannot be written: {too_long} is a longer name than the file system takes; name another"
            )
        if os.path.isdir(path):
            raise ConfigError(f"{self} is a folder; name a file in it")
        if os.path.exists(path) and not os.path.isfile(path):
            raise ConfigError(f"{self} is not a regular file, and would be replaced by one; name another")
        real_taken = set(map(os.path.realpath, taken))
        for name in self.names:
            if os.path.realpath(name) in real_taken:
                raise ConfigError(f"{self}: {name} is a file of the job itself, and would be replaced; name another")
        if not path.parent.is_dir():
            raise ConfigError(f"{self} cannot be written: {path.parent} is not a folder; create it, or name another")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise ConfigError(f"{self} cannot be written in {path.parent}: {why_not_writable(path.parent)}")

    @property
    def names(self) -> tuple[str, str]:
        """The names that are written: the file's, and that of its next version."""
        return str(self.path), str(self._new)

    def replace(self, data: bytes) -> None:
        """Replace the file. Raises OSError, which leaves the old file in place."""
        try:
            with create_anew(self._new) as file:
                file.write(data)
            self._new.replace(self.path)
        except OSError:
            with contextlib.suppress(OSError):
                self._new.unlink(missing_ok=True)
            raise

    def __str__(self) -> str:
        return self._text


WRITE_SECONDS = 1.0


class StatusFile:
    """`--progress-file`: a `RunStatus` as JSON for other programs.

    It is written about once a second and when the run ends. A run that was killed leaves it in the state `running`;
    `pid` and `updated_at` tell.
    """

    def __init__(self, file: SideFile, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._clock = clock
        self._next = clock()
        self._started = datetime.datetime.now(datetime.UTC)
        self._view: RunView | None = None
        self._warn: Callable[[str], None] | None = None

    def begin(self, warn: Callable[[str], None]) -> None:
        """Write the file for the first time. If it cannot be written, `warn` is called once, and the run goes on."""
        self._warn = warn
        self._write(bare_status("starting", self._started))

    def update(self, view: RunView) -> None:
        """Write the file if it is due. May be called as often as you like."""
        self._view = view
        if self._clock() >= self._next:
            self._next = self._clock() + WRITE_SECONDS
            self._write(view.status())

    def end(self, error: BaseException | None) -> None:
        """Write how the run ended. `error` is what ended it early, if anything did."""
        state, message = how_it_ended(error)
        view = self._view
        self._write(bare_status(state, self._started, message) if view is None else view.status(state, message))

    def _write(self, status: RunStatus) -> None:
        try:
            self._file.replace(msgspec.json.format(msgspec.json.encode(status), indent=2) + b"\n")
        except OSError as error:
            if self._warn is not None:
                self._warn(f"warning: {self._file} cannot be written: {error.strerror}; the run continues")
                self._warn = None
