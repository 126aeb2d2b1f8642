"""The rows of a Python program: converted to the row format, parsed, and queued for the tokenizer.

A row is a dict in the format of `docs/rows.md`. A text stands for its `prompt`, a list of messages for its `messages`,
and a list of token ids for its `prompt_token_ids`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from nvcli.core.validation import is_integer, show
from nvcli.errors import ConfigError, RowError, first_line, unexpected
from nvcli.job.job import Job, JobResult
from nvcli.job.rows.native_row import RowDefaults, RowKeys
from nvcli.job.rows.parser import RowParser
from nvcli.job.rows.plain_values import plain_value

Row = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""One row: a prompt, its token ids, a conversation, or a dict with any keys of a row. Models of Pydantic, such as the
messages of OpenAI's client, stand for dicts."""

ReadRow = Callable[[Row, RowKeys], dict[str, Any] | str]
"""Converts a row to a dict, or returns a text. Raises RowError, or whatever an object of the program raises."""

FIRST_BATCH_ROWS = 8
"""The first batch after a pause is small, so that engines soon have work; batches double from there."""
MAX_QUEUED_ROWS = 256
MAX_QUEUED_CHARS = 16 * 1024 * 1024
"""Limit on the rows that wait for the tokenizer, in characters; a row that exceeds it waits alone."""


def as_row(row: Row, keys: RowKeys) -> dict[str, Any] | str:
    """Return a row as a dict or a text. Raises RowError, and whatever an object of the program raises when examined."""
    if isinstance(row, str):
        return row
    if isinstance(row, Mapping):
        return dict(row)
    for method in ("model_dump", "_asdict"):  # of Pydantic's models and of named tuples
        if hasattr(row, method):
            return dict(getattr(row, method)())
    if hasattr(row, "keys"):  # rows of pandas and sqlite3
        names = [*row.keys()]
        if all(isinstance(name, str) for name in names):
            return {name: row[name] for name in names}
    items = row.tolist() if hasattr(row, "tolist") else row  # numpy arrays and the like
    if isinstance(items, Sequence) and not isinstance(items, bytes | bytearray):
        are_messages = all(isinstance(item, Mapping) or hasattr(item, "model_dump") for item in items)
        return {keys.messages if are_messages else keys.prompt_token_ids: items}
    way_out = "; token ids are a row together: [[1, 2, 3]]" if is_integer(items) else ""
    raise RowError(
        "not_an_object",
        f"expected a dict such as {{'prompt': …}}, a text, messages or token ids, got {show(row)}{way_out}",
    )


def as_conversation(row: Row, keys: RowKeys) -> dict[str, Any]:
    """Convert a row of `LLM.chat` to a dict; a text is a user's message. Raises as `as_row` does."""
    if isinstance(row, str):
        return {keys.messages: [{"role": "user", "content": row}]}
    values = as_row(row, keys)
    if isinstance(values, str) or keys.messages not in values:
        expected = f"messages, a text or a dict with `{keys.messages}`"
        raise RowError("missing_prompt", f"expected {expected}, got {show(row)}; llm.generate answers other rows")
    return values


def parse_row(
    row: Row, parser: RowParser, *, index: int, read: ReadRow = as_row, defaults: RowDefaults
) -> Job | JobResult:
    """Parse a row of a program. `index` counts the rows of its call from 0.

    `read` converts it to a dict, and `defaults` apply where it has no keys of its own.
    """
    where = f"rows[{index}]"
    try:
        values = _read(row, parser.keys, read)
        parsed = parser.parse(values, index=index, where=where, defaults=defaults)
        if isinstance(parsed, JobResult) and isinstance(values, dict) and "role" in values:
            return _with_hint(parsed)
        return parsed
    except RowError as error:
        problem = error
    except BaseException as error:
        problem = unexpected(error, "reading the row")
    return parser.failed(problem, index=index, where=where)


def _with_hint(failed: JobResult) -> JobResult:
    """Add a way out to the error of a message that was given as a row."""
    if failed.error is None or failed.error.type != "missing_prompt":
        return failed
    message = f"{failed.error.message}; a list of messages is one row: llm.chat(messages)"
    return msgspec.structs.replace(failed, error=msgspec.structs.replace(failed.error, message=message))


def _read(row: Row, keys: RowKeys, read: ReadRow) -> dict[str, Any] | str:
    """Return a row as a dict or a text. Raises RowError."""
    try:
        return read(row, keys)
    except RowError:
        raise
    except Exception as error:  # methods of the program's own objects may raise anything
        raise RowError("invalid_value", f"the row cannot be read: {first_line(error)}") from None


def check_rows(rows: object) -> None:
    """Raise ConfigError for something that is not rows."""
    kind = type(rows)
    library = kind.__module__.partition(".")[0]
    if kind.__name__ in ("DataFrame", "LazyFrame", "Table", "RecordBatch") and library in _ROWS_OF_TABLES:
        raise ConfigError(f"rows is a table of {library}, which iterates over columns; give {_ROWS_OF_TABLES[library]}")
    is_number = getattr(rows, "ndim", None) == 0  # of numpy or torch, which have `__iter__` all the same
    if is_number or isinstance(rows, bytes | bytearray) or not isinstance(rows, Iterable):
        raise ConfigError(f"rows is {show(rows)}; give an iterable of rows, such as a list of dicts or texts")


_ROWS_OF_TABLES = {
    "pandas": 'rows.to_dict("records")',
    "polars": "rows.iter_rows(named=True)",
    "pyarrow": "rows.to_pylist()",
}


def plain_setting(name: str, value: Any) -> Any:
    """Convert a setting for all rows to plain data, as rows hold it. Raises ConfigError."""
    try:
        return plain_value(value, name)
    except RowError as error:
        raise ConfigError(error.message) from None


class RowQueue:
    """The rows of all calls on their way to the tokenizer. `put` may be called from any number of threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._rows: list[Job | JobResult] = []
        self._num_chars = 0
        self._is_closed = False

    def put(self, row: Job | JobResult) -> bool:
        """Add a row once there is room. Returns False if the queue is closed."""
        num_chars = _num_chars(row)
        with self._changed:
            while (
                not self._is_closed
                and self._rows
                and (len(self._rows) >= MAX_QUEUED_ROWS or self._num_chars + num_chars > MAX_QUEUED_CHARS)
            ):
                self._changed.wait()
            if self._is_closed:
                return False
            self._rows.append(row)
            self._num_chars += num_chars
            self._changed.notify_all()
            return True

    def batches(self) -> Iterator[list[Job | JobResult]]:
        """Yield waiting rows, whenever there are any, until the queue is closed."""
        most = FIRST_BATCH_ROWS
        while True:
            with self._changed:
                while not self._rows and not self._is_closed:
                    most = FIRST_BATCH_ROWS
                    self._changed.wait()
                if self._is_closed:
                    return
                rows, self._rows = self._rows[:most], self._rows[most:]
                self._num_chars = sum(map(_num_chars, self._rows))
                self._changed.notify_all()
            yield rows
            most = min(2 * most, MAX_QUEUED_ROWS)

    def close(self) -> None:
        """Accept no more rows, and drop those that wait."""
        with self._changed:
            self._is_closed = True
            self._rows = []
            self._changed.notify_all()


def _num_chars(row: Job | JobResult) -> int:
    """Estimate the length of a row's prompt, in characters."""
    if isinstance(row, JobResult):
        return 0
    if row.prompt is not None:
        return len(row.prompt)
    if row.messages is not None:
        contents = (message.get("content") or "" for message in row.messages)
        return sum(len(text) if isinstance(text, str) else sum(map(_part_chars, text)) for text in contents)
    others = sum(len(prompt) if isinstance(prompt, str) else 4 * len(prompt) for prompt in row.prompts)
    return 4 * len(row.prompt_token_ids or ()) + others


def _part_chars(part: Mapping[str, Any]) -> int:
    return sum(len(value) for value in part.values() if isinstance(value, str))
