"""Tables that pyarrow reads (Parquet, Arrow) as rows, a batch at a time: a column is a key. Needs pyarrow.

Rows are made within bounds of memory. A batch may hold a value once and refer to it from many rows (dictionaries, runs,
views), or hold lists of elements that take no bytes. Its size then says nothing of what its rows become.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pyarrow
import pyarrow.compute
import pyarrow.ipc
import pyarrow.parquet
from pyarrow import types

from nvcli.core.validation import shorten
from nvcli.errors import NvcliError, RowError, first_line
from nvcli.job.input.column_check import ColumnsError
from nvcli.job.input.line_source import DamagedInput, Source
from nvcli.job.line_splitter import MAX_LINE_BYTES, too_long
from nvcli.job.rows.bad_json import explain_bad_utf8
from nvcli.job.rows.parser import Row
from nvcli.job.rows.raw_values import without_nulls

_BATCH_ROWS = 256
_BATCH_BYTES = 16 * 1024 * 1024
"""Maximum number of rows to make at a time, and their maximum memory."""
_OBJECT_BYTES = 64
"""Approximate overhead of a Python object."""
_READ_BYTES = 1024 * 1024
"""Bytes of each Parquet column to read at a time; without a limit pyarrow reads whole row groups."""
_ARROW_FILE_START = b"ARROW1"
_TEXTS = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
_LISTS = (types.is_list, types.is_large_list, types.is_map)
_LIST_MAKERS = (
    (types.is_list, pyarrow.list_),
    (types.is_large_list, pyarrow.large_list),
    (types.is_list_view, pyarrow.list_view),
    (types.is_large_list_view, pyarrow.large_list_view),
)
_BYTES_OF_TEXTS = {
    pyarrow.string(): pyarrow.binary(),
    pyarrow.large_string(): pyarrow.large_binary(),
    pyarrow.string_view(): pyarrow.binary_view(),
}

_Made = TypeVar("_Made")


class TableSource(Source):
    """The rows of one file, without null values at any level."""

    @abstractmethod
    def batches(self) -> Iterator[tuple[Any, int]]:
        """Yield each `RecordBatch` of the file, and the bytes of the file up to its end. Raises as pyarrow does."""

    def place(self, number: int) -> str:
        """Return the name of the last row's place in messages; it was the `number`-th."""
        return f"row {number}"

    def lines(self) -> Iterator[Row]:
        """Yield the rows, and the errors of those that are too large or have texts that are not UTF-8.

        Raises OSError or DamagedInput where the file cannot be read on, and InputChanged where it is not what it was.
        """
        size = os.stat(self.name).st_size
        for batch, end in self._explained(self._valid_batches()):
            if isinstance(batch, RowError):
                yield batch
                continue
            begin, num_made = self.bytes_read, 0
            for rows, row_bytes in self._explained(rows_of(batch)):
                num_made += len(rows)
                self.row_bytes = row_bytes
                self.bytes_read = begin + (end - begin) * num_made // batch.num_rows
                yield from rows
        self._check()
        self.bytes_read = size

    def _valid_batches(self) -> Iterator[tuple[Any, int]]:
        """Yield what `batches` yields, after a check, in parts where rows between have texts that are not UTF-8: their
        errors.

        Raises DamagedInput for offsets or lengths that are not valid: pyarrow would follow them to memory that is not
        the file's, or crash. Raises ColumnsError for two columns of one name.
        """
        for batch, end in self.batches():
            self._check()
            names = batch.schema.names
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise ColumnsError(f"{self.name}: two of its columns are called `{shorten(twice)}`; rename one")
            errors: dict[int, RowError] = {}
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                try:
                    column.validate(full=True)
                except Exception as error:
                    of_column = _bad_texts(name, column)
                    if not of_column:
                        raise DamagedInput(f"the column `{shorten(name)}` is damaged: {first_line(error)}") from None
                    errors = of_column | errors
            begin = 0
            for row, row_error in sorted(errors.items()):
                yield batch.slice(begin, row - begin), end
                yield row_error, end
                begin = row + 1
            yield batch.slice(begin), end

    def _explained(self, made: Iterator[_Made]) -> Iterator[_Made]:
        """Yield what pyarrow makes, with its exceptions turned into OSError, DamagedInput and InputChanged."""
        try:
            yield from made
        except (OSError, NvcliError, DamagedInput):
            raise
        except Exception as error:  # pyarrow has its own, and its values have those of their Python types
            self._check()
            raise DamagedInput(first_line(error)) from None

    def _check(self) -> None:
        if self.known is not None:
            self.known.check_state()


class ParquetSource(TableSource):
    """The rows of one Parquet file, once. Holds a batch of them at a time."""

    def batches(self) -> Iterator[tuple[Any, int]]:
        """Yield each `RecordBatch` of the file, and the bytes of the file up to its end. Raises as pyarrow does."""
        size = os.stat(self.name).st_size
        with pyarrow.parquet.ParquetFile(self.name, buffer_size=_READ_BYTES) as file:
            metadata, num_read = file.metadata, 0
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            row_bytes = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=0)
            for batch in file.iter_batches(batch_size=_rows_within(row_bytes)):
                num_read += batch.num_rows
                yield batch, size * num_read // max(1, metadata.num_rows)


class ArrowSource(TableSource):
    """The rows of one file or stream of Arrow's IPC format, once: Feather V2 and datasets on disk among them.

    The file is read and not mapped into memory: a file that is cut short while it is mapped would kill the process. So
    one record batch is in memory at a time, as large as its writer made it.
    """

    def batches(self) -> Iterator[tuple[Any, int]]:
        """Yield each `RecordBatch` of the file, and the bytes of the file up to its end. Raises as pyarrow does."""
        with pyarrow.OSFile(self.name) as file:
            size = file.size()
            is_file = file.read(len(_ARROW_FILE_START)) == _ARROW_FILE_START
            file.seek(0)
            if is_file:
                reader = pyarrow.ipc.open_file(file)
                for number in range(reader.num_record_batches):
                    yield reader.get_batch(number), size * (number + 1) // reader.num_record_batches
            elif size:
                for batch in pyarrow.ipc.open_stream(file):
                    yield batch, file.tell()


def _rows_within(row_bytes: int) -> int:
    """Return how many rows of `row_bytes` fit in a batch."""
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, row_bytes)))


def _bad_texts(name: str, column: Any) -> dict[int, RowError]:
    """Return the errors of a column's texts that are not UTF-8, by row; none if more than that is wrong with it."""
    try:
        column.view(_with_types(column.type, _as_bytes)).validate(full=True)
    except Exception:
        return {}
    errors = {}
    are_small = _most_value_bytes(column) <= MAX_LINE_BYTES
    for row, value in enumerate(column):
        if are_small or _most_value_bytes(column.slice(row, 1)) <= MAX_LINE_BYTES:
            try:
                value.as_py()
            except UnicodeDecodeError as error:
                explained = explain_bad_utf8(error.object, error.reason)
                errors[row] = RowError("invalid_utf8", f"`{shorten(name)}`: {explained}")
            except Exception:  # a moment, which gets a text of its own
                continue
    return errors


def rows_of(batch: Any) -> Iterator[tuple[list[dict[str, Any] | RowError], int]]:
    """Yield a few rows of a valid `RecordBatch` at a time, without nulls, and the approximate bytes of each row.

    A row that is too large to make is an error.
    """
    num_bytes = batch.nbytes
    is_plain = num_bytes <= MAX_LINE_BYTES and all(_is_plain(field.type) for field in batch.schema)
    row_bytes = num_bytes // max(1, batch.num_rows) if is_plain else _most_row_bytes(batch)
    step = _rows_within(row_bytes)
    for start in range(0, batch.num_rows, step):
        part = batch.slice(start, step)
        if step == 1 and not is_plain:
            row_bytes = _most_row_bytes(part)
            if row_bytes > MAX_LINE_BYTES:
                yield [too_long()], 0
                continue
        yield list(map(without_nulls, _to_rows(part))), row_bytes


def _to_rows(part: Any) -> list[dict[str, Any]]:
    """Return the rows of a `RecordBatch`, with texts for moments that Python's types cannot hold, and objects for maps
    of texts to values."""
    try:
        rows: list[dict[str, Any]] = part.to_pylist()
    except Exception:
        columns = [_values(column) for column in part.columns]
        rows = [dict(zip(part.schema.names, values, strict=True)) for values in zip(*columns, strict=True)]
    for field in part.schema:
        if _holds_map(field.type):
            for row in rows:
                row[field.name] = _with_objects(row[field.name], field.type)
    return rows


def _holds_map(kind: Any) -> bool:
    return types.is_map(kind) or any(_holds_map(kind.field(at).type) for at in range(kind.num_fields))


def _with_objects(value: Any, kind: Any) -> Any:
    """Return a value of a type with dicts in place of maps, whose keys must be texts that differ."""
    if value is None:
        return None
    if types.is_map(kind):
        pairs = [(key, _with_objects(item, kind.item_type)) for key, item in value]
        found = dict(pairs) if types.is_string(kind.key_type) or types.is_large_string(kind.key_type) else {}
        return found if len(found) == len(pairs) else pairs
    if types.is_struct(kind):
        return {field.name: _with_objects(value[field.name], field.type) for field in kind}
    return [_with_objects(each, kind.value_type) for each in value] if isinstance(value, list) else value


def _in_utc(kind: Any) -> Any:
    return pyarrow.timestamp(kind.unit, "+00:00") if types.is_timestamp(kind) and kind.tz else kind


def _as_text(kind: Any) -> Any:
    return pyarrow.string() if types.is_temporal(kind) else kind


def _as_bytes(kind: Any) -> Any:
    return _BYTES_OF_TEXTS.get(kind, kind)


def _values(column: Any, changes: Sequence[Callable[[Any], Any]] = (_in_utc, _as_text)) -> list[Any]:
    """Return the values of a column. Those that Python's types cannot hold get the first change of type that helps.

    The types end with the year 9999 and with microseconds, and know the time zones that the machine has files of.
    """
    try:
        values: list[Any] = column.to_pylist()
        return values
    except Exception:
        if not changes:
            raise
    changed = _values(column.cast(_with_types(column.type, changes[0])), changes[1:])
    return [_value_or(value, other) for value, other in zip(column, changed, strict=True)]


def _value_or(value: Any, other: Any) -> Any:
    try:
        return value.as_py()
    except Exception:
        return other


def _with_types(kind: Any, change: Callable[[Any], Any]) -> Any:
    """Return a type in which `change` was made to the types of single values, also those in lists and structs."""
    if types.is_struct(kind):
        return pyarrow.struct([field.with_type(_with_types(field.type, change)) for field in kind])
    if types.is_map(kind):
        return pyarrow.map_(_with_types(kind.key_type, change), _with_types(kind.item_type, change))
    if types.is_fixed_size_list(kind):
        return pyarrow.list_(_with_types(kind.value_type, change), kind.list_size)
    if types.is_dictionary(kind):
        return pyarrow.dictionary(kind.index_type, _with_types(kind.value_type, change), kind.ordered)
    if isinstance(kind, pyarrow.BaseExtensionType):
        return _with_types(kind.storage_type, change)
    make = next((make for is_kind, make in _LIST_MAKERS if is_kind(kind)), None)
    return change(kind) if make is None else make(_with_types(kind.value_type, change))


def _is_plain(kind: Any) -> bool:
    """Tell whether each value of a type takes its own bytes in the batch."""
    if any(is_kind(kind) for is_kind in _TEXTS):
        return True
    if types.is_struct(kind):
        return kind.num_fields > 0 and all(_is_plain(kind.field(at).type) for at in range(kind.num_fields))
    if types.is_list(kind) or types.is_large_list(kind):
        return _is_plain(kind.value_type)
    return bool(types.is_primitive(kind) or types.is_decimal(kind))


def _most_row_bytes(batch: Any) -> int:
    return sum(map(_most_value_bytes, batch.columns))


def _most_value_bytes(array: Any) -> int:
    """Return an upper bound of the bytes of an array's largest value as Python objects."""
    kind = array.type
    if isinstance(array, pyarrow.ExtensionArray):
        return _most_value_bytes(array.storage)
    if not len(array) or types.is_null(kind):
        return 0
    if types.is_dictionary(kind):
        return _most_value_bytes(array.dictionary)
    if types.is_run_end_encoded(kind):
        return _most_value_bytes(array.values)
    if types.is_struct(kind) or types.is_union(kind):
        inside = sum(_most_value_bytes(array.field(at)) for at in range(kind.num_fields))
    elif types.is_fixed_size_list(kind):
        inside = int(kind.list_size) * (8 + _most_value_bytes(array.values))
    elif any(is_kind(kind) for is_kind in _LISTS):
        first, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
        children = (array.keys, array.items) if types.is_map(kind) else (array.values,)
        element = sum(_most_value_bytes(child.slice(first, end - first)) + 8 for child in children)
        inside = _largest(pyarrow.compute.subtract(array.offsets[1:], array.offsets[:-1])) * element
    elif types.is_list_view(kind) or types.is_large_list_view(kind):
        inside = _largest(array.sizes) * (8 + _most_value_bytes(array.values))
    else:
        inside = _most_text_bytes(array)
    return _OBJECT_BYTES + inside


def _most_text_bytes(array: Any) -> int:
    """Return the bytes of the longest text of an array; 0 for numbers and the like."""
    if types.is_string_view(array.type) or types.is_binary_view(array.type):
        lengths = memoryview(array.buffers()[1]).cast("i")[4 * array.offset : 4 * (array.offset + len(array)) : 4]
        return int(max(0, *lengths))
    if any(is_kind(array.type) for is_kind in _TEXTS):
        return _largest(pyarrow.compute.binary_length(array))
    return int(array.type.byte_width) if types.is_fixed_size_binary(array.type) else 0


def _largest(lengths: Any) -> int:
    return int(pyarrow.compute.max(lengths).as_py() or 0)
