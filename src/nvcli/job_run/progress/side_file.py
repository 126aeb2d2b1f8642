"""A file that a flag names and that a run replaces as a whole, so that a reader never sees half of it.

It must be no file of the job itself, and nothing but a regular file, because whatever is there is replaced.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

from nvcli.errors import ConfigError
from nvcli.file_limits import why_not_writable
from nvcli.regular_file import create_anew, is_too_long


class SideFile:
    """The file that `flag` names. As text it is both, as messages show them."""

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
            raise ConfigError(f"{self} is no regular file, and would be replaced by one; name another")
        real_taken = set(map(os.path.realpath, taken))
        for name in self.names:
            if os.path.realpath(name) in real_taken:
                raise ConfigError(f"{self}: {name} is a file of the job itself, and would be replaced; name another")
        if not path.parent.is_dir():
            raise ConfigError(f"{self} cannot be written: {path.parent} is no folder; make it, or name another")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise ConfigError(f"{self} cannot be written in {path.parent}: {why_not_writable(path.parent)}")

    @property
    def names(self) -> tuple[str, str]:
        """The names that are written to: the file's, and that of its next version."""
        return str(self.path), str(self._new)

    def replace(self, data: bytes) -> None:
        """Replace the file. Raises OSError; the old file is there then."""
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
