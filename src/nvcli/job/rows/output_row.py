"""Makes output rows in the form of their input rows, and reads and renumbers written ones."""

from __future__ import annotations

from typing import Any

import msgspec

from nvcli.core.validation import is_utf8
from nvcli.job.job import ClassifyAnswer, EmbedAnswer, JobResult, RowContext, RowForm, ScoreAnswer
from nvcli.job.rows.openai_answer import BATCH_ID, openai_row
from nvcli.job.rows.raw_values import decode_row

CSV_TEXT_FIELD = "generated_text"
"""Default key of the text in CSV outputs, whose cells hold no lists."""
_NATIVE_KEYS = frozenset(("id", "index", "choices", "usage", "error", "prompt_logprobs"))
_OPENAI_KEYS = frozenset(("id", "index", "custom_id", "response", "error"))
"""Keys of the answer in an output row. `read_output_row` knows native rows by `index`."""
_INPUT = "input"
"""The key for the input row's own values of such keys."""


class OutputForm(msgspec.Struct, frozen=True, kw_only=True):
    """Values that all rows of an output share, in every run that continues it."""

    created: int = 0
    """When the job began, in seconds since 1970; `created` of OpenAI's objects."""
    model: str = ""
    """The model's name, for rows that name none."""
    text_field: str | None = None
    """Extra key for the text of the first choice; None: there is none."""


class WrittenRow(msgspec.Struct, frozen=True):
    """The part of an output's line that later runs need."""

    index: int
    error_type: str | None
    id: Any = None
    """Value of `id`; OpenAI rows have one made from the index."""


def output_row(result: JobResult, form: OutputForm) -> dict[str, Any]:
    """Return the output row: the keys of the answer, then those passed through from the input row."""
    return pass_through(answer_of(result, form), result.context)


def answer_of(result: JobResult, form: OutputForm) -> dict[str, Any]:
    """Return the output row without the keys passed through from the input row."""
    context = result.context
    if context.form.is_openai:
        row = openai_row(result, created=form.created, model=context.model or form.model)
    elif context.form is RowForm.NATIVE:
        row = {
            "id": context.id,
            "index": context.index,
            "choices": result.choices,
            "usage": result.usage,
            "error": result.error,
        }
        if result.prompt_logprobs is not None:
            row["prompt_logprobs"] = result.prompt_logprobs
    else:
        own = _task_answer(result)
        return {"id": context.id, "index": context.index, **own, "usage": result.usage, "error": result.error}
    if form.text_field is not None:
        row[form.text_field] = result.choices[0].text if result.choices else None
    return row


def _task_answer(result: JobResult) -> dict[str, Any]:
    """Return the keys of scores, a vector or classes, which a failed row has too."""
    answer = result.answer
    if result.context.form is RowForm.EMBEDDING:
        return {"embedding": answer.embedding if isinstance(answer, EmbedAnswer) else None}
    if result.context.form is RowForm.CLASSES:
        if not isinstance(answer, ClassifyAnswer):
            return {"label": None, "score": None, "classes": []}
        return {"label": answer.label, "score": answer.score, "classes": answer.classes}
    if not isinstance(answer, ScoreAnswer):
        return {"choices": [], "best": None}
    correct = {} if answer.correct is None else {"correct": answer.correct}
    return {"choices": answer.choices, "best": answer.best, **correct}


def pass_through(row: dict[str, Any], context: RowContext) -> dict[str, Any]:
    """Add the keys passed through from the input row to its output row, and return it.

    Keys of the input row that have the name of one of the output's go under `input`, together with its own `input`.
    """
    extra = context.extra
    if extra:
        taken = extra.keys() & (row.keys() | (_OPENAI_KEYS if context.form.is_openai else _NATIVE_KEYS))
        if taken:
            row[_INPUT] = {key: value for key, value in extra.items() if key in taken or key == _INPUT}
        for key, value in extra.items():
            if key not in taken:
                row.setdefault(key, value)
    return row


class _Line(msgspec.Struct):
    index: int | None = None
    id: Any = None
    error: Any = None


class _Error(msgspec.Struct):
    type: str | None = None
    code: str | None = None


_line_decoder = msgspec.json.Decoder(_Line)


def read_output_row(line: bytes) -> WrittenRow | None:
    """Read a line of an output; None for anything but a whole row of UTF-8 text, such as a torn line."""
    if not line.endswith(b"}") or b"\0" in line or not is_utf8(line):  # parts that are skipped are not decoded
        return None
    try:
        row = _line_decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    index = row.index
    if index is None and isinstance(row.id, str) and row.id.startswith(BATCH_ID):
        digits = row.id.removeprefix(BATCH_ID)
        index = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 19 else None
    if index is None or not 0 <= index < 1 << 48:
        return None
    return WrittenRow(index, _error_type(row.error) if row.error is not None else None, row.id)


def _error_type(error: Any) -> str:
    try:
        known = msgspec.convert(error, _Error)
    except msgspec.ValidationError:
        return "unknown"
    return known.type or known.code or "unknown"


_join = msgspec.json.Encoder().encode


def moved_row(line: bytes, index: int, name: str | None) -> bytes:
    """Return a line of an output with another index.

    `name` is the name of a row without an id of its own, which follows from its index.
    """
    row = decode_row(line)
    if "index" in row:
        row["index"] = _raw(index)
        if name is not None:
            row["id"] = _raw(name)
        return _join(row)
    row["id"] = _raw(f"{BATCH_ID}{index}")
    response = decode_row(row["response"])
    response["request_id"] = _raw(f"req_{index}")
    body = decode_row(response["body"])
    if "id" in body:  # an answer, and no error
        body["id"] = _moved_id(body["id"], index)
    if "output" in body:  # of /v1/responses
        items = [decode_row(item) for item in msgspec.json.decode(body["output"], type=list[msgspec.Raw])]
        body["output"] = msgspec.Raw(_join([{**item, "id": _moved_id(item["id"], index)} for item in items]))
    response["body"] = msgspec.Raw(_join(body))
    row["response"] = msgspec.Raw(_join(response))
    return _join(row)


def _moved_id(raw: msgspec.Raw, index: int) -> msgspec.Raw:
    kind = str(msgspec.json.decode(raw)).rpartition("-")[0]
    return _raw(f"{kind}-{index}")


def _raw(value: str | int) -> msgspec.Raw:
    return msgspec.Raw(_join(value))
