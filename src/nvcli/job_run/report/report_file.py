"""`--report FILE`: the report of a run as a page (`.html`) or as JSON (`.json`), written once the run is over."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from nvcli.errors import ConfigError
from nvcli.job_run.progress.side_file import SideFile
from nvcli.job_run.report.data import Report

SUFFIXES = (".html", ".json")


class ReportFile:
    """The file that `--report` names."""

    def __init__(self, path: Path, *, taken: Collection[str] = ()) -> None:
        """`taken` are files that `path` must not replace. Raises ConfigError for a bad `path`."""
        if path.suffix.lower() not in SUFFIXES:
            raise ConfigError(f"--report {path}: allowed: a name that ends in {' or '.join(SUFFIXES)}")
        self._file = SideFile("--report", path, taken=taken)

    def write(self, report: Report, warn: Callable[[str], None]) -> None:
        """Replace the file. Where that fails, `warn` is told: the rows matter more."""
        try:
            self._file.replace(self._encode(report))
        except OSError as error:
            warn(f"warning: {self._file} cannot be written: {error.strerror}")

    def _encode(self, report: Report) -> bytes:
        if self._file.path.suffix.lower() == ".json":
            return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
        from nvcli.job_run.report.html import render_html  # late: jinja2 is for this alone

        return render_html(report).encode(errors="backslashreplace")
