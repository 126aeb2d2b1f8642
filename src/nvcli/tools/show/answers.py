"""Output rows as shown: in nvcli's own format, in OpenAI's, and from tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from nvcli.job.rows.output_row import read_output_row
from nvcli.job.rows.raw_values import decode_row, is_null

_OWN_KEYS = frozenset(("id", "index", "custom_id", "choices", "usage", "error", "response", "embedding"))
_NESTED_KEYS = frozenset(("index", "choices", "usage", "error", "response"))
"""Keys whose values are nested, which tables hold as JSON."""
_EMBEDDING_CHARS = 100
"""Characters shown of an embedding."""
_OF_CLASSES = frozenset(("label", "score", "classes"))
"""Keys of a row that was classified."""


class ShownChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a row."""

    text: str
    finish_reason: str
    reasoning: str = ""
    """The reasoning, if it is separate from the text."""
    calls: list[str] = []
    """Tool calls, such as `look({"at": 1})`."""


class ShownRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of an output."""

    id: str | int | None
    index: int
    choices: list[ShownChoice]
    error: str | None
    """The error's type and message; None if the row was answered."""
    prompt_tokens: int
    completion_tokens: int
    others: dict[str, msgspec.Raw]
    """Values copied from the input row, as JSON by key."""

    @property
    def is_cut(self) -> bool:
        """Whether an answer was cut at its length limit."""
        return any(choice.finish_reason == "length" for choice in self.choices)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    """Responses use these two names instead."""


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _Call(msgspec.Struct):
    function: _Function


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    message: _Message | None = None
    finish_reason: str | None = None
    logprob: float | None = None
    """The log-probability of a scored text."""
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


class _Error(msgspec.Struct):
    message: str | None = None
    type: str | None = None
    code: str | None = None


class _Embedding(msgspec.Struct):
    embedding: msgspec.Raw


class _Part(msgspec.Struct):
    text: str = ""


class _Item(msgspec.Struct):
    """A part of a response: the thought or the message."""

    type: str
    content: list[_Part] = []


class _Body(msgspec.Struct):
    choices: list[_Choice] = []
    output: list[_Item] = []
    status: str = ""
    usage: _Usage | None = None
    data: list[_Embedding] = []


class _Response(msgspec.Struct):
    body: _Body


def line_of(row: Mapping[str, Any]) -> bytes:
    """Return a table's row as the line of JSON from which it was made; the table holds nested values as texts."""
    values = {"error": None} | {key: value for key, value in row.items() if value is not None}
    for key in values.keys() & _NESTED_KEYS:
        if isinstance(values[key], str):
            values[key] = msgspec.Raw(values[key].encode())
    return msgspec.json.encode(values)


def read_shown_row(line: bytes) -> ShownRow | None:
    """Read an output row from JSON; None for anything else, such as a torn line or an input row."""
    written = read_output_row(line)
    if written is None:
        return None
    try:
        values, own_keys = decode_row(line), _OWN_KEYS
        if "response" in values:
            body = msgspec.json.decode(values["response"], type=_Response).body
            body.choices += [_embedding(each.embedding) for each in body.data]
            if body.output:
                body.choices.append(_response(body))
        elif "choices" in values or "embedding" in values or "classes" in values:
            if "choices" in values:
                choices = msgspec.json.decode(values["choices"], type=list[_Choice])
            elif "embedding" in values:
                choices = [] if is_null(values["embedding"]) else [_embedding(values["embedding"])]
            else:
                own_keys |= _OF_CLASSES
                choices = [_class(values["label"], values["score"])] if not is_null(values.get("label")) else []
            usage = msgspec.json.decode(values["usage"], type=_Usage | None) if "usage" in values else None
            body = _Body(choices, usage=usage)
        else:
            return None
        raw_id = values.get("custom_id") or values.get("id")
        row_id = None if raw_id is None else msgspec.json.decode(raw_id)
        error = msgspec.json.decode(values["error"], type=_Error | None) if "error" in values else None
    except msgspec.DecodeError:  # unexpected values under these keys; includes ValidationError
        return None
    usage = body.usage or _Usage()
    return ShownRow(
        id=row_id if isinstance(row_id, str | int) else None,
        index=written.index,
        choices=[_shown(choice) for choice in body.choices],
        error=None if error is None else f"{error.type or error.code or 'error'}: {error.message or ''}",
        prompt_tokens=usage.prompt_tokens or usage.input_tokens,
        completion_tokens=usage.completion_tokens or usage.output_tokens,
        others={key: value for key, value in values.items() if key not in own_keys},
    )


def _shown(choice: _Choice) -> ShownChoice:
    text = choice.text if choice.message is None else choice.message.content
    parts = choice.message or choice
    reason = choice.finish_reason if choice.logprob is None else f"log-probability {choice.logprob:,.4f}"
    return ShownChoice(
        text=text or "",
        finish_reason=reason or "",
        reasoning=parts.reasoning_content or "",
        calls=[f"{call.function.name}({call.function.arguments})" for call in parts.tool_calls or ()],
    )


def _response(body: _Body) -> _Choice:
    """Join a response's parts into one answer."""
    texts = {item.type: "".join(part.text for part in item.content) for item in body.output}
    reason = "length" if body.status == "incomplete" else "stop"
    return _Choice(text=texts.get("message"), reasoning_content=texts.get("reasoning"), finish_reason=reason)


def _embedding(raw: msgspec.Raw) -> _Choice:
    """Return the start of an embedding as an answer."""
    text = bytes(raw).decode(errors="replace")
    shown = text if len(text) <= _EMBEDDING_CHARS else f"{text[:_EMBEDDING_CHARS]}…"
    return _Choice(text=shown, finish_reason="embedding")


def _class(label: msgspec.Raw, score: msgspec.Raw) -> _Choice:
    """Return the class of a row as an answer. In a table of texts its score is one, too."""
    number = msgspec.json.decode(score, type=float, strict=False)
    return _Choice(text=msgspec.json.decode(label, type=str), finish_reason=f"score {number:,.4f}")
