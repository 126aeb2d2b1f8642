"""A plain text file as rows: each line is a prompt."""

from __future__ import annotations

from collections.abc import Iterator

from nvcli.errors import RowError
from nvcli.jobs.input.line_source import LineSource
from nvcli.jobs.line_splitter import DroppedLine
from nvcli.jobs.rows.bad_json import explain_bad_utf8
from nvcli.jobs.rows.parser import Row


class TextSource(LineSource):
    """The rows of one text file, once."""

    def lines(self) -> Iterator[Row | None]:
        """Yield each line as a text, a blank line as it is, and the error of a line that is no UTF-8 text.

        Yields None and raises as `LineSource.lines` does.
        """
        for line in self._lines():
            if line is None or isinstance(line, DroppedLine) or not line or line.isspace():
                yield line
                continue
            try:
                yield line.removesuffix(b"\r").decode()
            except UnicodeDecodeError as error:
                yield RowError("invalid_utf8", explain_bad_utf8(line, error.reason))
