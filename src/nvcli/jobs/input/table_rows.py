"""Rows of a record batch as Python objects, within bounds of memory. Needs pyarrow.

A batch may hold a value once and refer to it from many rows (dictionaries, runs, views), or hold lists of elements that
take no bytes. Its size then says nothing of what its rows become.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow
from pyarrow import types

from nvcli.errors import RowError
from nvcli.jobs.line_splitter import MAX_LINE_BYTES, too_long
from nvcli.jobs.rows.raw_values import without_nulls

_BATCH_ROWS = 256
_BATCH_BYTES = 16 * 1024 * 1024
"""So many rows are made at a time, and fewer where they would take more memory than that."""
_OBJECT_BYTES = 64
"""Roughly what a Python object takes beside its value."""
_TEXTS = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
_LISTS = (types.is_list, types.is_large_list, types.is_map)


def rows_within(row_bytes: int) -> int:
    """Return how many rows of `row_bytes` make a batch."""
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, row_bytes)))


def rows_of(batch: Any) -> Iterator[tuple[list[dict[str, Any] | RowError], int]]:
    """Yield some rows of a valid `RecordBatch` at a time, without their nulls, and roughly the bytes of each.

    A row that is too large to make is an error.
    """
    num_bytes = batch.nbytes
    is_plain = num_bytes <= MAX_LINE_BYTES and all(_is_plain(field.type) for field in batch.schema)
    row_bytes = num_bytes // max(1, batch.num_rows) if is_plain else _most_row_bytes(batch)
    step = rows_within(row_bytes)
    for start in range(0, batch.num_rows, step):
        part = batch.slice(start, step)
        if step == 1 and not is_plain:
            row_bytes = _most_row_bytes(part)
            if row_bytes > MAX_LINE_BYTES:
                yield [too_long()], 0
                continue
        yield list(map(without_nulls, part.to_pylist())), row_bytes


def _is_plain(kind: Any) -> bool:
    """Tell whether values of a type take bytes of their own in the batch, each of them."""
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
    """Return at least what the largest value of an array takes as Python objects."""
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
        return _OBJECT_BYTES + sum(_most_value_bytes(array.field(at)) for at in range(kind.num_fields))
    if types.is_fixed_size_list(kind):
        return _OBJECT_BYTES + int(kind.list_size) * (8 + _most_value_bytes(array.values))
    if any(is_kind(kind) for is_kind in _LISTS):
        return _most_list_bytes(array, array.offsets)
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        return _OBJECT_BYTES + _largest(array.sizes) * (8 + _most_value_bytes(array.values))
    return _OBJECT_BYTES + _most_text_bytes(array)


def _most_list_bytes(array: Any, offsets: Any) -> int:
    import pyarrow.compute

    first, end = offsets[0].as_py(), offsets[-1].as_py()
    children = (array.keys, array.items) if types.is_map(array.type) else (array.values,)
    element = sum(_most_value_bytes(child.slice(first, end - first)) + 8 for child in children)
    return _OBJECT_BYTES + _largest(pyarrow.compute.subtract(offsets[1:], offsets[:-1])) * element


def _most_text_bytes(array: Any) -> int:
    """Return the bytes of the longest text of an array; 0 for one of numbers and the like."""
    import pyarrow.compute

    if types.is_string_view(array.type) or types.is_binary_view(array.type):
        lengths = memoryview(array.buffers()[1]).cast("i")[4 * array.offset : 4 * (array.offset + len(array)) : 4]
        return int(max(0, *lengths))
    if any(is_kind(array.type) for is_kind in _TEXTS):
        return _largest(pyarrow.compute.binary_length(array))
    return int(array.type.byte_width) if types.is_fixed_size_binary(array.type) else 0


def _largest(lengths: Any) -> int:
    import pyarrow.compute

    return int(pyarrow.compute.max(lengths).as_py() or 0)
