"""One line of the input → a `Job`, or the typed error of that row. Never raises for what a line holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from nvcli.errors import RowError
from nvcli.jobs.job import Job, JobId, JobResult, Place, failed
from nvcli.jobs.seen_ids import SeenIds
from nvcli.sampling_params import SamplingParams
from nvcli.validation import InvalidValue, convert, show

PROMPT_KEYS = ("prompt", "messages", "prompt_token_ids")
OWN_KEYS = frozenset((*PROMPT_KEYS, "id", "sampling"))
"""Keys that say something to nvcli; every other key is passed through."""

_MAX_ID = (1 << 63) - 1


class RowParser:
    """Holds what rows are judged by: the defaults of `sampling`, and the ids that were seen."""

    def __init__(self, sampling_defaults: Mapping[str, Any]) -> None:
        """The defaults are valid as SamplingParams; a row's own keys go over them."""
        self._defaults = dict(sampling_defaults)
        self._default_sampling = convert(self._defaults, SamplingParams)
        self._seen = SeenIds()
        self._decode = msgspec.json.Decoder().decode

    def parse(self, line: bytes, *, index: int, line_id: int, where: str) -> Job | JobResult:
        """`line_id` is the id of a row without one, `where` names the line in messages."""
        row_id: JobId = line_id
        extra: dict[str, Any] = {}
        try:
            row = self._decode_line(line)
            extra = {key: value for key, value in row.items() if key not in OWN_KEYS}
            row_id = _id_of(row, line_id)
            if not self._seen.add(row_id, given="id" in row):
                what = "the id" if "id" in row else "no `id` is given, and its line number"
                raise RowError("duplicate_id", f"{what} {show(row_id)} is the id of an earlier row; ids must differ")
            place = Place(id=row_id, index=index, line=where, extra=extra)
            sampling = self._sampling_of(row)
            return _job_of(row, place, sampling)
        except RowError as error:
            if row_id == line_id:
                self._seen.add(line_id, given=False)
            return failed(Place(id=row_id, index=index, line=where, extra=extra), error)

    def _decode_line(self, line: bytes) -> dict[str, Any]:
        try:
            row = self._decode(line)
        except UnicodeDecodeError as error:
            raise RowError("invalid_json", f"not UTF-8 text ({error.reason})") from None
        except RecursionError:
            raise RowError("invalid_json", "nested too deep") from None
        except msgspec.DecodeError as error:
            raise RowError("invalid_json", _explain_json(line, str(error))) from None
        if not isinstance(row, dict):
            raise RowError("not_an_object", f'expected an object with keys, such as {{"prompt": …}}, got {show(row)}')
        return row

    def _sampling_of(self, row: dict[str, Any]) -> SamplingParams:
        own = row.get("sampling")
        if not own and "sampling" not in row:
            return self._default_sampling
        if not isinstance(own, dict):
            raise RowError("invalid_sampling", f"`sampling` is {show(own)}; expected an object with keys")
        try:
            return convert({**self._defaults, **own}, SamplingParams, under=("sampling",))
        except InvalidValue as error:
            raise RowError("invalid_sampling", error.message) from None


def _id_of(row: dict[str, Any], line_id: int) -> JobId:
    if "id" not in row:
        return line_id
    value = row["id"]
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_ID):
        return value
    raise RowError("invalid_id", f"`id` is {show(value)}; allowed: text or an integer of 64 bits")


def _job_of(row: dict[str, Any], place: Place, sampling: SamplingParams) -> Job:
    given = [key for key in PROMPT_KEYS if key in row]
    if not given:
        raise RowError("missing_prompt", "none of `prompt`, `messages` and `prompt_token_ids` is given; give one")
    if len(given) > 1:
        names = " and ".join(f"`{key}`" for key in given)
        raise RowError("conflicting_prompts", f"{names} are given; give one of them")
    try:
        match given[0]:
            case "prompt":
                prompt = convert(row["prompt"], str, under=("prompt",))
                return Job(place=place, prompt=prompt, sampling=sampling)
            case "messages":
                messages = convert(row["messages"], list[dict[str, Any]], under=("messages",))
                return Job(place=place, messages=_checked(messages), sampling=sampling)
            case _:
                ids = convert(row["prompt_token_ids"], list[int], under=("prompt_token_ids",))
                return Job(place=place, prompt_token_ids=ids, sampling=sampling)
    except InvalidValue as error:
        raise RowError("invalid_value", error.message) from None


def _checked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: a role each, and text parts of a content joined to one text."""
    if not messages:
        raise InvalidValue(("messages",), "`messages` is empty; give at least one message")
    checked = []
    for number, message in enumerate(messages):
        name = f"messages[{number}]"
        if not isinstance(message.get("role"), str):
            raise InvalidValue((), f'`{name}.role` is {show(message.get("role"))}; allowed: text such as "user"')
        content = message.get("content")
        if isinstance(content, list):
            message = {**message, "content": _join_parts(content, f"{name}.content")}
        elif not isinstance(content, str | None):
            raise InvalidValue((), f"`{name}.content` is {show(content)}; allowed: text or a list of text parts")
        elif content is None and "tool_calls" not in message:
            raise InvalidValue((), f"`{name}` has no `content`")
        checked.append(message)
    return checked


def _join_parts(parts: list[Any], name: str) -> str:
    texts = []
    for number, part in enumerate(parts):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise InvalidValue((), f'`{name}[{number}]` is {show(part)}; allowed: {{"type": "text", "text": …}}')
        texts.append(text)
    return "\n".join(texts)


def _explain_json(line: bytes, reason: str) -> str:
    """Why a line is not JSON. Python's laxer parser finds the key of a number that JSON does not have."""
    import json

    try:
        key = _find_non_finite(json.loads(line), "")
    except (ValueError, RecursionError):
        key = None
    if key is not None:
        return f"`{key}` is not a finite number"
    return f"not valid JSON: {reason.removeprefix('JSON is malformed: ')}"


def _find_non_finite(value: Any, name: str) -> str | None:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return name or "the value"
    items: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        items = [(f"{name}.{key}" if name else key, inner) for key, inner in value.items()]
    elif isinstance(value, list):
        items = [(f"{name}[{number}]", inner) for number, inner in enumerate(value)]
    return next((found for key, inner in items if (found := _find_non_finite(inner, key)) is not None), None)
