"""Writes an output's rows to a Parquet file, a batch at a time. Needs pyarrow.

nvcli's own keys have fixed types. For each other key a first pass finds out whether every row has a number, a truth
value or a text there. All that is nested or mixed, and OpenAI's `response`, becomes JSON text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet

_BATCH_ROWS = 1024

_LOGPROBS = pyarrow.struct(
    [
        ("tokens", pyarrow.list_(pyarrow.string())),
        ("token_logprobs", pyarrow.list_(pyarrow.float64())),
        ("top_logprobs", pyarrow.list_(pyarrow.map_(pyarrow.string(), pyarrow.float64()))),
    ]
)
_CHOICE = pyarrow.struct(
    [
        ("index", pyarrow.int64()),
        ("text", pyarrow.string()),
        ("finish_reason", pyarrow.string()),
        ("token_ids", pyarrow.list_(pyarrow.int32())),
        ("logprobs", _LOGPROBS),
    ]
)
_OWN_TYPES = {
    "index": pyarrow.int64(),
    "choices": pyarrow.list_(_CHOICE),
    "usage": pyarrow.struct(
        [(name, pyarrow.int64()) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")]
    ),
    "error": pyarrow.struct([("type", pyarrow.string()), ("message", pyarrow.string())]),
}


class _LargeInt:
    """The kind of integers that a column of floats does not hold exactly."""


_SCALARS = {
    bool: pyarrow.bool_(),
    int: pyarrow.int64(),
    _LargeInt: pyarrow.int64(),
    float: pyarrow.float64(),
    str: pyarrow.string(),
}
_NUMBERS = ({int, float}, {int, _LargeInt})
"""Sets of kinds that one column of numbers can hold."""
_MAX_FLOAT_INT = 1 << 53


def write_parquet(lines: Callable[[], Iterable[bytes]], path: Path) -> None:
    """Write rows to a file. `lines` begins a pass over the rows and is called twice. Raises OSError."""
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    columns = _Columns()
    for line in lines():
        columns.look_at(decode(line))
    schema = pyarrow.schema(columns.types)
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        batch: list[dict[str, Any]] = []
        for line in lines():
            batch.append(columns.fit(decode(line)))
            if len(batch) == _BATCH_ROWS:
                writer.write_table(pyarrow.Table.from_pylist(batch, schema))
                batch = []
        if batch:
            writer.write_table(pyarrow.Table.from_pylist(batch, schema))


class _Columns:
    """The columns of a file, which follow from all of its rows."""

    def __init__(self) -> None:
        self._kinds: dict[str, set[type]] = {}
        """The kinds of values under each key."""
        self._is_native = True
        """Whether all rows have nvcli's own form."""

    def look_at(self, row: dict[str, Any]) -> None:
        """Take note of a row. All rows are looked at before the first one is fitted."""
        self._is_native = self._is_native and "index" in row and "choices" in row
        for key, value in row.items():
            self._kinds.setdefault(key, set()).add(_kind(value))

    @property
    def types(self) -> list[tuple[str, pyarrow.DataType]]:
        """The name and the type of each column."""
        return [
            (name, _OWN_TYPES[name] if self._is_own(name) else _column_type(self._kinds.get(name, {str})))
            for name in list(self._kinds) or ["id", *_OWN_TYPES]
        ]

    def fit(self, row: dict[str, Any]) -> dict[str, Any]:
        """Bring the values of a row into the types of its columns."""
        for name in self._json_names & row.keys():
            row[name] = _as_text(row[name])
        for choice in row["choices"] if self._is_native else ():
            if choice.get("logprobs"):
                top = choice["logprobs"]["top_logprobs"]
                choice["logprobs"]["top_logprobs"] = [list(alternatives.items()) for alternatives in top]
        return row

    @cached_property
    def _json_names(self) -> set[str]:
        """The columns that hold JSON text, because their values are nested or mixed."""
        return {
            name
            for name, kinds in self._kinds.items()
            if not self._is_own(name) and (kinds - set(_SCALARS) - {type(None)} or _is_mixed(kinds))
        }

    def _is_own(self, name: str) -> bool:
        return self._is_native and name in _OWN_TYPES


def _kind(value: Any) -> type:
    """Return the kind of a value; `object` where no column of scalars can hold it."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _MAX_FLOAT_INT:
        return _LargeInt if -(1 << 63) <= value < 1 << 63 else object
    return type(value)


def _is_mixed(kinds: set[type]) -> bool:
    scalars = kinds - {type(None)}
    return len(scalars) > 1 and scalars not in _NUMBERS


def _column_type(kinds: set[type]) -> pyarrow.DataType:
    scalars = kinds - {type(None)}
    if scalars in _NUMBERS:
        return _SCALARS[float if float in scalars else int]
    return _SCALARS.get(next(iter(scalars)), _SCALARS[str]) if len(scalars) == 1 else _SCALARS[str]


def _as_text(value: Any) -> str | None:
    """Return a text as it is, and anything else as JSON."""
    return value if isinstance(value, str | None) else msgspec.json.encode(value).decode()
