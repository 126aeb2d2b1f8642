"""Tables that pyarrow reads as rows, a batch at a time: a column is a key. Needs pyarrow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from nvcli.errors import ConfigError, NvcliError, RowError, first_line
from nvcli.jobs.file_state import FileState
from nvcli.jobs.input.known_input import KnownInput
from nvcli.jobs.input.table_rows import rows_of
from nvcli.validation import shorten

_Made = TypeVar("_Made")


class TableSource(ABC):
    """The rows of one file. Keys whose value is null are left out, in nested values too."""

    kind: str
    """The name of the format."""

    def __init__(self, path: Path, known: KnownInput | None = None) -> None:
        """`known` is the input as it was when the job began, where that is to be checked."""
        self._path = path
        self._known = known
        self.bytes_read = 0
        """The share of the file's bytes that belongs to the rows that were read."""
        self.row_bytes = 0
        """Roughly the bytes of the row that was yielded last."""

    @abstractmethod
    def batches(self) -> Iterator[tuple[Any, int]]:
        """Yield each `RecordBatch` of the file, and the bytes of the file up to its end. Raises as pyarrow does."""

    def place(self, number: int) -> str:
        """Return what messages call the place of the row that was yielded last, as the `number`-th."""
        return f"row {number}"

    def lines(self) -> Iterator[dict[str, Any] | RowError]:
        """Yield the rows, and the errors of those that are too large.

        Raises OSError where the file cannot be read on, ConfigError where it is damaged or not of its format, and
        InputChanged where it is not what it was.
        """
        size = self._path.stat().st_size
        for batch, end in self._explained(self._sound_batches()):
            begin, num_made = self.bytes_read, 0
            for rows, row_bytes in self._explained(rows_of(batch)):
                num_made += len(rows)
                self.row_bytes = row_bytes
                self.bytes_read = begin + (end - begin) * num_made // batch.num_rows
                yield from rows
        self._check()
        self.bytes_read = size

    def _sound_batches(self) -> Iterator[tuple[Any, int]]:
        """Yield what `batches` yields, once it is checked.

        Raises ConfigError for offsets, lengths or texts that are not sound: pyarrow would follow them to memory that is
        not the file's, or crash.
        """
        for batch, end in self.batches():
            self._check()
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                try:
                    column.validate(full=True)
                except Exception as error:
                    raise self._damaged(f"the column `{shorten(name)}` is damaged: {first_line(error)}") from None
            yield batch, end

    def _explained(self, made: Iterator[_Made]) -> Iterator[_Made]:
        """Yield what pyarrow makes. Raises OSError, ConfigError and InputChanged where it cannot go on."""
        try:
            yield from made
        except (OSError, NvcliError):
            raise
        except Exception as error:  # pyarrow has its own, and its values have those of their Python types
            self._check()
            raise self._damaged(first_line(error)) from None

    def _damaged(self, why: str) -> ConfigError:
        return ConfigError(f"{self._path}: cannot be read as {self.kind}: {why}; put a sound file in its place")

    def _check(self) -> None:
        if self._known is None:
            return
        try:
            is_same = FileState.of(self._path) == self._known.state
        except OSError:
            is_same = False
        if not is_same:
            raise self._known.changed("another program wrote to it, removed it, or put another file in its place")
