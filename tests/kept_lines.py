"""The display of a job's progress, which shows nothing here: what it is told is kept."""

from __future__ import annotations

import io

from nvcli.job.progress.display import Progress


class KeptLines(Progress):
    """Keeps the notes, warnings and details of a job."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self.lines: list[str] = []
        """Notes and warnings."""
        self.warnings: list[str] = []
        self.details: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)

    def detail(self, line: str) -> None:
        self.details.append(line)

    def warn(self, line: str) -> None:
        self.warnings.append(line)
        self.lines.append(line)
