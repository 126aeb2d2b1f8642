"""A PDF file as rows: one for each page, with the file's name, the page's number and the image of the page.

The file is opened by image processes alone, which have counted its pages before the job begins (`job.images.pdf_files`)
and draw them when their rows are prepared. So its size and contents do not matter here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nvcli.errors import RowError
from nvcli.job.input.known_input import KnownInput
from nvcli.job.input.line_source import Source
from nvcli.job.rows.conversation import IMAGE
from nvcli.job.rows.parser import PageRow
from nvcli.job.rows.pdf_part import DEFAULT_DPI, DPI, FILE, PAGE

_FILE, _PAGE = "file", "page"
"""The columns of a row."""


@dataclass(frozen=True, slots=True)
class PdfFile:
    """An input that is a PDF file."""

    name: str
    num_pages: int = 0
    problem: str = ""
    """Why its pages cannot be counted."""
    known: KnownInput | None = None
    """The file as it was when the job began, where that is to be checked."""

    @property
    def description(self) -> str:
        """The number of pages, as a manifest has it after the size and digest: rows are numbered by it."""
        return "not readable" if self.problem else f"{self.num_pages:,} pages"

    def check_unchanged(self) -> None:
        """Raise InputChanged if the file may have other bytes than when the job began."""
        if self.known is not None:
            self.known.check_state()


class PdfSource(Source):
    """The rows of one file, once. A file that cannot be read is one row with an error."""

    def __init__(self, file: PdfFile, known: KnownInput | None = None) -> None:
        super().__init__(file.name, known)
        self._file = replace(file, known=known)

    def lines(self) -> Iterator[PageRow]:
        """Yield the rows. Raises OSError, and InputChanged where the file is not what it was."""
        file, name = self._file, self.name
        size = os.stat(name).st_size
        key = f"{Path(name).name} {'' if self.known is None else self.known.description}"
        if file.problem:
            yield PageRow({_FILE: name}, key, problem=RowError("invalid_image", file.problem))
        for number in range(1, file.num_pages + 1):
            file.check_unchanged()
            self.bytes_read = size * number // file.num_pages
            part: dict[str, Any] = {"type": IMAGE, IMAGE: name, PAGE: number, DPI: DEFAULT_DPI, FILE: file}
            yield PageRow({_FILE: name, _PAGE: number}, f"{key} {number}", image=part)
        self.bytes_read = size

    def place(self, number: int) -> str:
        """Return the name of the last row's place in messages; it was the `number`-th."""
        return "all pages" if self._file.problem else f"page {number}"
