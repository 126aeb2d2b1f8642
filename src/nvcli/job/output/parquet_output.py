"""Writes an output's rows to a Parquet file, a batch at a time. Needs pyarrow.

nvcli's own keys have fixed types. For each other key a first pass finds out whether every row has a number, a truth
value or a text there. All that is nested or mixed, and OpenAI's `response`, becomes JSON text: the bytes of the row as
they are, because objects made of them could take thirty times the memory.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import pyarrow
import pyarrow.lib
import pyarrow.parquet
from msgspec import inspect

from nvcli.core.task_config import Task
from nvcli.errors import OutputError, first_line
from nvcli.job.job import Choice, ErrorInfo, FoundClass, Logprobs, ScoredChoice, Usage
from nvcli.job.rows.raw_values import as_text, decode, decode_row, is_null

_BATCH_ROWS = 1024
_BATCH_BYTES = 16 * 1024 * 1024
"""Limits of a batch, in rows and in bytes of JSON."""

_READ_ROWS = 256
"""Rows to hold at a time when a table is read back."""

_JSON_KEYS = frozenset(("choices", "usage", "error", "response"))
"""nvcli's own keys that become JSON text unless all rows have nvcli's own form."""


class _LargeInt:
    """The kind of integers that floats cannot represent exactly."""


_SCALARS = {
    bool: pyarrow.bool_(),
    int: pyarrow.int64(),
    _LargeInt: pyarrow.int64(),
    float: pyarrow.float64(),
    str: pyarrow.string(),
}
_NUMBERS = ({int, float}, {int, _LargeInt})
"""Sets of kinds that fit in one column of numbers."""
_MAX_FLOAT_INT = 1 << 53


_Row = dict[str, msgspec.Raw]
"""A row whose values are still JSON."""

_encode = msgspec.json.Encoder().encode

_TOKEN = pyarrow.struct([("token", pyarrow.string()), ("logprob", pyarrow.float64())])
_FIRST = ("index", "text", "finish_reason", "token_ids", "logprobs", "score")
"""Fields of a generated answer that come first."""


def _column_of(kind: inspect.Type) -> pyarrow.DataType:
    """Return the column type of a field by its type in Python."""
    match kind:
        case inspect.StructType(fields=fields):
            if kind.cls is Choice:
                fields = tuple(sorted(fields, key=lambda field: (*_FIRST, field.name).index(field.name)))
            return pyarrow.struct([(field.name, _column_of_field(field)) for field in fields])
        case inspect.ListType(item_type=item):
            return pyarrow.list_(_column_of(item))
        case inspect.DictType():  # the alternatives of a token: Hugging Face's datasets have no maps
            return pyarrow.list_(_TOKEN)
        case inspect.UnionType(types=(first, *_)):
            return _column_of(first)
        case inspect.IntType():
            return pyarrow.int64()
        case inspect.FloatType():
            return pyarrow.float64()
        case inspect.BoolType():
            return pyarrow.bool_()
        case _:
            return pyarrow.string()


def _column_of_field(field: inspect.Field) -> pyarrow.DataType:
    return pyarrow.list_(pyarrow.int32()) if field.name == "token_ids" else _column_of(field.type)


_LOGPROBS, _CHOICE, _SCORED_CHOICE, _CLASS, _USAGE, _ERROR = (
    _column_of(inspect.type_info(kind)) for kind in (Logprobs, Choice, ScoredChoice, FoundClass, Usage, ErrorInfo)
)
_END_TYPES = {"usage": _USAGE, "error": _ERROR}
ANSWER_TYPES = {"index": pyarrow.int64(), "choices": pyarrow.list_(_CHOICE), **_END_TYPES}
"""The columns of generated answers."""
_TASK_TYPES: dict[Task, dict[str, pyarrow.DataType]] = {
    "generate": {**ANSWER_TYPES, "prompt_logprobs": _LOGPROBS},
    "score": {
        "index": pyarrow.int64(),
        "choices": pyarrow.list_(_SCORED_CHOICE),
        "best": pyarrow.int64(),
        "correct": pyarrow.bool_(),
        **_END_TYPES,
    },
    "embed": {"index": pyarrow.int64(), "embedding": pyarrow.list_(pyarrow.float32()), **_END_TYPES},
    "classify": {
        "index": pyarrow.int64(),
        "label": pyarrow.string(),
        "score": pyarrow.float64(),
        "classes": pyarrow.list_(_CLASS),
        **_END_TYPES,
    },
}


def write_parquet(lines: Callable[[], Iterable[bytes]], file: BinaryIO) -> int:
    """Write rows to an open file, and return the number of rows in its metadata.

    `lines` begins a pass over the rows and is called twice. Raises OSError, and OutputError for rows that no table can
    hold.
    """
    columns = _Columns()
    for line in lines():
        columns.look_at(decode_row(line))
    schema = pyarrow.schema(columns.types)
    try:
        with pyarrow.parquet.ParquetWriter(file, schema, compression="zstd") as writer:
            for batch in _batches(lines(), columns):
                writer.write_table(pyarrow.Table.from_pylist(batch, schema))
    except pyarrow.lib.ArrowException as error:
        raise OutputError(
            f"the rows cannot be written as a Parquet table: {error}; they are kept, and -o FILE.jsonl has no limits"
        ) from None
    file.seek(0)
    return int(pyarrow.parquet.read_metadata(file).num_rows)


def read_parquet(path: Path) -> Iterator[bytes]:
    """Yield the rows of a file that `write_parquet` made as lines of JSON that give the same table again.

    Raises OSError.
    """
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_READ_ROWS):
                batch.validate(full=True)
                for row in batch.to_pylist():
                    yield _encode(_json_row(row))
    except (pyarrow.lib.ArrowException, ValueError) as error:
        raise OSError(errno.EIO, f"it is a damaged table: {first_line(error)}") from None


def _json_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a table's row as `output_row` made it; a null is an absent key."""
    values = {key: value for key, value in row.items() if value is not None}
    for key in _JSON_KEYS & values.keys():
        if isinstance(values[key], str):
            values[key] = msgspec.Raw(values[key].encode())
    if isinstance(choices := values.get("choices"), list):
        values["choices"] = [_json_choice(choice) for choice in choices]
    if isinstance(of_prompt := values.get("prompt_logprobs"), dict):
        values["prompt_logprobs"] = _json_logprobs(of_prompt)
    return values | {"error": values.get("error")}


def _json_choice(choice: dict[str, Any]) -> dict[str, Any]:
    values = {key: value for key, value in choice.items() if value is not None}
    if logprobs := values.get("logprobs"):
        values["logprobs"] = _json_logprobs(logprobs)
    return values


def _json_logprobs(logprobs: dict[str, Any]) -> dict[str, Any]:
    return {**logprobs, "top_logprobs": [*map(_json_alternatives, logprobs["top_logprobs"])]}


def _batches(lines: Iterable[bytes], columns: _Columns) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    num_bytes = 0
    for line in lines:
        batch.append(columns.fit(decode_row(line)))
        num_bytes += len(line)
        if len(batch) == _BATCH_ROWS or num_bytes >= _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


class _Columns:
    """The columns of a file, which depend on all of its rows."""

    def __init__(self) -> None:
        self._kinds: dict[str, set[type]] = {}
        """The kinds of values under each key."""
        self._is_native = True
        """Whether all rows have nvcli's own form."""
        self._tasks: dict[bool, set[Task]] = {False: set(), True: set()}
        """Tasks of rows, by whether the rows are answered."""

    def look_at(self, row: _Row) -> None:
        """Record a row. All rows are recorded before the first one is fitted."""
        self._is_native = self._is_native and "index" in row
        self._tasks[is_null(row.get("error"))].add(_task_of(list(row)))
        for key, value in row.items():
            self._kinds.setdefault(key, set()).add(_kind(value))

    @property
    def types(self) -> list[tuple[str, pyarrow.DataType]]:
        """The name and the type of each column."""
        return [
            (name, self._own_types[name] if self._is_own(name) else _column_type(self._kinds.get(name, {str})))
            for name in list(self._kinds) or ["id", *ANSWER_TYPES]
        ]

    def fit(self, row: _Row) -> dict[str, Any]:
        """Convert the values of a row to the types of its columns."""
        json_names = self._json_names
        fitted: dict[str, Any] = {
            name: as_text(raw) if name in json_names and not is_null(raw) else decode(raw) for name, raw in row.items()
        }
        if self._is_native:
            fit_row(fitted)
        return fitted

    @cached_property
    def _json_names(self) -> set[str]:
        """Columns of JSON text, because their values are nested or mixed."""
        return {
            name
            for name, kinds in self._kinds.items()
            if not self._is_own(name) and (kinds - set(_SCALARS) - {type(None)} or _is_mixed(kinds))
        }

    def _is_own(self, name: str) -> bool:
        return self._is_native and name in self._own_types

    @cached_property
    def _own_types(self) -> Mapping[str, pyarrow.DataType]:
        """Types of nvcli's own columns. Answered rows decide the task, which failed rows may not show."""
        (task, *others) = self._tasks[True] or self._tasks[False] or {"generate"}
        return {} if others else _own_types_of(task, is_base64=str in self._kinds.get("embedding", ()))


_KINDS = {b'"': str, b"t": bool, b"f": bool, b"n": type(None), b"{": object, b"[": object}
"""Kinds of values by their first byte."""


def _kind(raw: msgspec.Raw) -> type:
    """Return the kind of a value; `object` if no column of scalars can hold it."""
    kind = _KINDS.get(bytes(memoryview(raw)[:1]))
    if kind is not None:
        return kind
    try:
        number = decode(raw)
    except msgspec.DecodeError:  # larger than any number that we can hold
        return object
    if isinstance(number, int) and abs(number) > _MAX_FLOAT_INT:
        return _LargeInt if -(1 << 63) <= number < 1 << 63 else object
    return type(number)


def _is_mixed(kinds: set[type]) -> bool:
    scalars = kinds - {type(None)}
    return len(scalars) > 1 and scalars not in _NUMBERS


def _column_type(kinds: set[type]) -> pyarrow.DataType:
    scalars = kinds - {type(None)}
    if scalars in _NUMBERS:
        return _SCALARS[float if float in scalars else int]
    return _SCALARS.get(next(iter(scalars)), _SCALARS[str]) if len(scalars) == 1 else _SCALARS[str]


def _task_of(names: Sequence[str]) -> Task:
    """Return the task whose answer begins with these keys. Later keys are columns of the input, which may have the
    same names."""
    own = names[2:4]
    marks: dict[str, Task] = {"embedding": "embed", "best": "score", "label": "classify"}
    return next((task for mark, task in marks.items() if mark in own), "generate")


def _own_types_of(task: Task, *, is_base64: bool) -> Mapping[str, pyarrow.DataType]:
    """Return the column types of a task's answers. `is_base64`: embeddings are texts."""
    return {**_TASK_TYPES[task], "embedding": pyarrow.string()} if is_base64 else _TASK_TYPES[task]


def fit_row(row: dict[str, Any]) -> None:
    """Convert the alternatives of log-probabilities in a row to the form of their columns."""
    for part in (*(choice.get("logprobs") for choice in row.get("choices", ())), row.get("prompt_logprobs")):
        if part:
            part["top_logprobs"] = [
                None if top is None else [{"token": token, "logprob": logprob} for token, logprob in top.items()]
                for top in part["top_logprobs"]
            ]


def _json_alternatives(top: Sequence[Any] | None) -> dict[str, float | None] | None:
    """Convert the alternatives of a token from a table to their form in JSON.

    Tables of earlier versions have maps, which are read as pairs.
    """
    if top is None:
        return None
    return dict((each["token"], each["logprob"]) if isinstance(each, dict) else each for each in top)
