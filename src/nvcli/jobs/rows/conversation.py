"""Checks `messages` and brings them into the form that chat templates expect."""

from __future__ import annotations

from typing import Any

from nvcli.validation import InvalidValue, convert, show


def check_messages(value: Any, *, under: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return messages that each have a role, with the text parts of a content joined to one text.

    `under` is where `value` stands in the row. Raises InvalidValue that names the message and its key.
    """
    messages = convert(value, list[dict[str, Any]], under=under)
    name = ".".join(under)
    if not messages:
        raise InvalidValue(under, f"`{name}` is empty; give at least one message")
    return [_checked(message, f"{name}[{number}]") for number, message in enumerate(messages)]


def _checked(message: dict[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise InvalidValue((), f'`{name}.role` is {show(message.get("role"))}; allowed: text such as "user"')
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": _join_parts(content, f"{name}.content")}
    if not isinstance(content, str | None):
        raise InvalidValue((), f"`{name}.content` is {show(content)}; allowed: text or a list of text parts")
    if content is None and "tool_calls" not in message:
        raise InvalidValue((), f"`{name}` has no `content`")
    return message


def _join_parts(parts: list[Any], name: str) -> str:
    texts = []
    for number, part in enumerate(parts):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise InvalidValue((), f'`{name}[{number}]` is {show(part)}; allowed: {{"type": "text", "text": …}}')
        texts.append(text)
    return "\n".join(texts)
