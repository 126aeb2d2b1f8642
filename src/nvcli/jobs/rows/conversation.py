"""Checks `messages` and brings them into the form that chat templates expect."""

from __future__ import annotations

from typing import Any

import msgspec

from nvcli.errors import RowError
from nvcli.jobs.rows.nesting import decode_inner
from nvcli.validation import InvalidValue, convert, show


def check_messages(value: Any, *, under: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return messages that each have a role, with the text parts of a content joined to one text.

    The arguments of earlier tool calls, which OpenAI's form has as JSON texts, become objects: that is what chat
    templates take. `value` may be the JSON text of the messages, and they may be in ShareGPT's form. `under`
    is where it stands in the row. Raises InvalidValue that names the message and its key, and RowError for a part that
    is no text, such as an image.
    """
    name = ".".join(under)
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = decode_inner(value)
        except msgspec.DecodeError as error:
            raise InvalidValue(under, f"`{name}` is {show(value)}, which is no JSON: {error}") from None
    messages = convert(value, list[dict[str, Any]], under=under)
    if not messages:
        raise InvalidValue(under, f"`{name}` is empty; give at least one message")
    return [_checked(message, f"{name}[{number}]") for number, message in enumerate(messages)]


_SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}
"""The roles of chat templates by the names that ShareGPT's form has for them."""


def _checked(message: dict[str, Any], name: str) -> dict[str, Any]:
    if "role" not in message and "from" in message:
        message = _from_sharegpt(message, name)
    if not isinstance(message.get("role"), str):
        raise InvalidValue((), f'`{name}.role` is {show(message.get("role"))}; allowed: text such as "user"')
    if isinstance(message.get("tool_calls"), list):
        message = {**message, "tool_calls": [_with_object(call, name) for call in message["tool_calls"]]}
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": _join_parts(content, f"{name}.content")}
    if not isinstance(content, str | None):
        raise InvalidValue((), f"`{name}.content` is {show(content)}; allowed: text or a list of text parts")
    if content is None and "tool_calls" not in message:
        raise InvalidValue((), f"`{name}` has no `content`")
    return message


def _from_sharegpt(message: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a message of ShareGPT's form, `from` and `value`, as one with `role` and `content`."""
    rest = dict(message)
    speaker = rest.pop("from")
    role = _SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise InvalidValue((), f"`{name}.from` is {show(speaker)}; allowed: {', '.join(_SHAREGPT_ROLES)}")
    return {"role": role, "content": rest.pop("value", None), **rest}


def _join_parts(parts: list[Any], name: str) -> str:
    texts = []
    for number, part in enumerate(parts):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise RowError(
                "unsupported_content",
                f"`{name}[{number}]` is a part of the type {show(kind)}; messages hold text alone here, no images, "
                "sounds or files, so leave the part out or describe it in words",
            )
        if not isinstance(text, str):
            raise InvalidValue((), f'`{name}[{number}]` is {show(part)}; allowed: {{"type": "text", "text": …}}')
        texts.append(text)
    return "\n".join(texts)


def _with_object(call: Any, name: str) -> Any:
    """Return a tool call whose arguments are an object, if they are given as a text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments := function.get("arguments"), str):
        return call
    try:
        decoded = decode_inner(arguments) if arguments.strip() else {}
    except msgspec.DecodeError:
        raise InvalidValue((), f"`{name}.tool_calls` has arguments that are no JSON: {show(arguments)}") from None
    return {**call, "function": {**function, "arguments": decoded}}
