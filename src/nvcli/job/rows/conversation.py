"""Reads a conversation: its `messages`, and the keys beside them, such as tools and documents.

The keys beside the messages are those of OpenAI's chat completions and of vLLM's server. In native rows they stand
beside `messages`, in rows of batch files in the body. All of them become arguments of the chat template.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from nvcli.core.validation import InvalidValue, Path, convert, is_integer, join_path, show, suggest
from nvcli.errors import RowError
from nvcli.job.job import CallRule
from nvcli.job.rows.pdf_part import PDF, pdf_pages
from nvcli.job.rows.raw_values import decode_inner, decode_list, decode_nested

TOOLS, TOOL_CHOICE, DOCUMENTS = "tools", "tool_choice", "documents"
PARALLEL_TOOL_CALLS = "parallel_tool_calls"
ADD_GENERATION_PROMPT, CONTINUE_FINAL_MESSAGE = "add_generation_prompt", "continue_final_message"

CONVERSATION_KEYS = (
    *(TOOLS, TOOL_CHOICE, PARALLEL_TOOL_CALLS, DOCUMENTS),
    *(ADD_GENERATION_PROMPT, CONTINUE_FINAL_MESSAGE),
)
"""These keys, the same in both forms of rows."""

REASONING_EFFORT = "reasoning_effort"
"""OpenAI's key for how long a model thinks; a variable of some chat templates."""

ARGUMENTS = (TOOLS, DOCUMENTS, ADD_GENERATION_PROMPT, CONTINUE_FINAL_MESSAGE, REASONING_EFFORT)
"""Arguments of chat templates that come from these keys."""

_KEYS = frozenset((*CONVERSATION_KEYS, REASONING_EFFORT))
_TEXT, _REFUSAL = "text", "refusal"
_TEXT_KEYS = {**dict.fromkeys((_TEXT, "input_text", "output_text"), _TEXT), _REFUSAL: _REFUSAL}
"""The types of parts that are text, with the key of the text. Refusals are OpenAI's, and those between are of its
responses."""
IMAGE = "image"
"""The type of a part that is an image, once it is read, and its key for what the row names."""
_IMAGE_TYPES = (IMAGE, "image_url", "input_image", "image_pil")
"""The types of such parts in Qwen's form, in OpenAI's chat completions, in its responses and in vLLM's programs."""
_NAMING_KEYS = (IMAGE, "image_url", "image_pil", "url", "path")
"""The keys under which they name the image; the last two in transformers' form."""
_TELLING_KEYS = (_TEXT, *_IMAGE_TYPES)
"""Keys that tell the type of a part without one, as in Qwen's own messages."""
DETAIL = "detail"
"""OpenAI's key for the resolution at which an image is read."""
_DETAILS = ("auto", "low", "high", "original")
_NAMED_CHOICES = ("none", "auto", "required")


def check_messages(
    value: Any, *, under: tuple[str, ...], images: Iterator[dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Return messages that each have a role, with the text parts of a content joined to one text.

    The arguments of earlier tool calls, which OpenAI's form has as JSON texts, become objects: that is what chat
    templates take. `value` may be the JSON text of the messages, and they may be in ShareGPT's form. `under`
    is where it stands in the row. A content with images stays a list of parts, of which those that name no image take
    the next of `images`. Raises InvalidValue that names the message and its key, and RowError for a part that is
    neither text nor an image.
    """
    name = ".".join(under)
    try:
        value = decode_list(value)
    except msgspec.DecodeError as error:
        raise InvalidValue(under, f"`{name}` is {show(value)}, which is not JSON: {error}") from None
    messages = convert(value, list[dict[str, Any]], under=under)
    if not messages:
        raise InvalidValue(under, f"`{name}` is empty; give at least one message")
    images = images or iter(())
    return [_check_message(message, f"{name}[{number}]", images) for number, message in enumerate(messages)]


_SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}
"""Roles by their names in ShareGPT's form."""


def _check_message(message: dict[str, Any], name: str, images: Iterator[dict[str, Any]]) -> dict[str, Any]:
    if "role" not in message and "from" in message:
        message = _from_sharegpt(message, name)
    if not isinstance(message.get("role"), str):
        raise InvalidValue((), f'`{name}.role` is {show(message.get("role"))}; allowed: text such as "user"')
    if message.get("images"):  # as in Ollama's form
        raise InvalidValue(
            (), f'`{name}.images`: images are parts of `content`, such as {{"type": "image", "image": …}}'
        )
    if isinstance(message.get("tool_calls"), list):
        message = {**message, "tool_calls": [_decode_arguments(call, name) for call in message["tool_calls"]]}
    content = message.get("content")
    if content is None and isinstance(message.get(_REFUSAL), str):
        message = {**message, "content": (content := message[_REFUSAL])}
    if isinstance(content, list):
        return {**message, "content": _read_parts(content, f"{name}.content", images)}
    if not isinstance(content, str | None):
        raise InvalidValue((), f"`{name}.content` is {show(content)}; allowed: text or a list of text parts")
    if content is None and not message.get("tool_calls"):
        raise InvalidValue((), f"`{name}` has no `content`; give it a text")
    return {**message, "content": content or ""}  # OpenAI's form has null beside calls, which Qwen3's template refuses


def _from_sharegpt(message: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a message of ShareGPT's form, `from` and `value`, as one with `role` and `content`."""
    rest = dict(message)
    speaker = rest.pop("from")
    role = _SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise InvalidValue((), f"`{name}.from` is {show(speaker)}; allowed: {', '.join(_SHAREGPT_ROLES)}")
    return {"role": role, "content": rest.pop("value", None), **rest}


def _read_parts(parts: list[Any], name: str, images: Iterator[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the texts of parts joined to one, or if there are images, each part by itself."""
    found: list[dict[str, Any]] = []
    for number, part in enumerate(parts):
        place = f"{name}[{number}]"
        if isinstance(part, str):
            found.append({"type": _TEXT, _TEXT: part})
            continue
        kind = _type_of(part) if isinstance(part, dict) else None
        if kind in _IMAGE_TYPES:
            found.append(_read_image(part, place, images))
        elif kind == PDF:
            file, pages = pdf_pages(part, place)
            image = _read_image({**part, IMAGE: file}, place, images)
            found += [{**image, **page} for page in pages]
        elif isinstance(kind, str) and isinstance(text := part.get(_TEXT_KEYS.get(kind)), str):
            found.append({"type": _TEXT, _TEXT: text})
        elif isinstance(kind, str) and kind not in _TEXT_KEYS:
            raise RowError(
                "unsupported_content",
                f"`{place}` is a part of the type {show(kind)}; messages hold text, images and pages of PDF files "
                "here, no sounds, videos or other files, so leave the part out or describe it in words",
            )
        else:
            raise InvalidValue((), f'`{place}` is {show(part)}; allowed: {{"type": "text", "text": …}}')
    if any(part["type"] == IMAGE for part in found):
        return found
    return "\n".join(part[_TEXT] for part in found)


def _type_of(part: dict[str, Any]) -> Any:
    """Return the type of a part, which its keys may tell; None if they do not."""
    named = part.get("type")
    return next((key for key in _TELLING_KEYS if part.get(key) is not None), None) if named is None else named


def _read_image(part: dict[str, Any], name: str, images: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Return a part that is an image in one form, whichever of its forms it has: what the row names under `image`, or
    the next of `images`, and what it says of its size."""
    value = next((part[key] for key in _NAMING_KEYS if part.get(key) is not None), None)
    if value is None and part.get("type") == IMAGE:
        value = next(images, {}).get(IMAGE)
    detail = part.get(DETAIL)
    if isinstance(value, dict):
        detail = value.get(DETAIL, detail)
        value = value.get("url", value.get("path"))
    if not isinstance(value, str) or not value:
        raise InvalidValue(
            (),
            f'`{name}` is {show(part)}; allowed: {{"type": "image", "image": PATH}} or {{"type": "image_url", …}}; '
            "`job.image_field` (--image-field) names a key of images beside the messages",
        )
    limits = {key: part[key] for key in ("min_pixels", "max_pixels") if part.get(key) is not None}
    for key, pixels in limits.items():
        if not is_integer(pixels, 1):
            raise InvalidValue((), f"`{name}.{key}` is {show(pixels)}; allowed: a number of pixels")
    if detail is None:
        return {"type": IMAGE, IMAGE: value, **limits}
    if detail not in _DETAILS:
        raise InvalidValue((), f"`{DETAIL}` of `{name}` is {show(detail)}; allowed: {', '.join(_DETAILS)}")
    return {"type": IMAGE, IMAGE: value, DETAIL: detail, **limits}


def image_parts(images: Any, key: str) -> list[dict[str, Any]]:
    """Return what a row has under `key` as parts: the name of an image, or a list of names, which may be JSON text.
    Raises InvalidValue."""
    with suppress(msgspec.DecodeError):  # a path may begin with a bracket
        images = decode_list(images)
    parts = []
    for number, each in enumerate(images if isinstance(images, list) else [images]):
        name = each.get("path") if isinstance(each, dict) else each
        if not isinstance(name, str) or not name:
            place = f"{key}[{number}]" if isinstance(images, list) else key
            raise InvalidValue(
                (key,),
                f"`{place}` is {show(each)}; allowed: the path of an image, its bytes in a table, or a list of these",
            )
        parts.append({"type": IMAGE, IMAGE: name})
    return parts


def with_images(messages: list[dict[str, Any]], images: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with parts that are images before the text of the last user message. Raises RowError."""
    at = next((n for n, message in reversed([*enumerate(messages)]) if message["role"] == "user"), None)
    if at is None:
        raise RowError(
            "invalid_value", "the row has images, and none of its messages is the user's, where they belong; add one"
        )
    content = messages[at].get("content") or ""
    text = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return [*messages[:at], {**messages[at], "content": [*images, *text]}, *messages[at + 1 :]]


def _decode_arguments(call: Any, name: str) -> Any:
    """Return a tool call with its arguments as an object: decoded if they are JSON text, empty if there are none."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = decode_inner(arguments) if arguments.strip() else None
        except msgspec.DecodeError:
            raise InvalidValue((), f"`{name}.tool_calls` has arguments that are not JSON: {show(arguments)}") from None
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def conversation_options(given: Mapping[str, Any], *, under: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the fields of a Job that follow from the options among the values of a row or body, which has no nulls.

    `under` is where they stand in the row. Raises InvalidValue that names the key.
    """
    if _KEYS.isdisjoint(given):
        return {}
    arguments: dict[str, Any] = {}
    tools = _tools(given.get(TOOLS, []), (*under, TOOLS))
    choice = given.get(TOOL_CHOICE, "auto")
    call_rule = _call_rule(choice, tools, (*under, TOOL_CHOICE))
    if not convert(given.get(PARALLEL_TOOL_CALLS, True), bool, under=(*under, PARALLEL_TOOL_CALLS)):
        call_rule = msgspec.structs.replace(call_rule, is_single=True)
    may_call = bool(tools) and choice != "none"
    if may_call:
        arguments[TOOLS] = tools
    if DOCUMENTS in given:
        arguments[DOCUMENTS] = convert(given[DOCUMENTS], list[dict[str, Any]], under=(*under, DOCUMENTS))
    for name in (ADD_GENERATION_PROMPT, CONTINUE_FINAL_MESSAGE):
        if name in given:
            arguments[name] = convert(given[name], bool, under=(*under, name))
    if arguments.get(ADD_GENERATION_PROMPT) and arguments.get(CONTINUE_FINAL_MESSAGE):
        one, other = (join_path((*under, name)) for name in (ADD_GENERATION_PROMPT, CONTINUE_FINAL_MESSAGE))
        raise InvalidValue(
            under, f"`{one}` and `{other}` are both true; an answer either begins or continues a message, so give one"
        )
    if REASONING_EFFORT in given:
        arguments[REASONING_EFFORT] = convert(given[REASONING_EFFORT], str, under=(*under, REASONING_EFFORT))
    if not may_call:
        return {"template_arguments": arguments or None}
    if call_rule == CallRule() and not any(tool["function"].get("strict") is True for tool in tools):
        return {"template_arguments": arguments, "tools": tools}
    for number, tool in enumerate(tools):
        _check_parameters(tool["function"].get("parameters"), (*under, TOOLS, number, "function", "parameters"))
    return {"template_arguments": arguments, "tools": tools, "call_rule": call_rule}


def _check_parameters(schema: Any, path: Path) -> None:
    """Raise InvalidValue unless `schema` describes an object, as the arguments of a call must be."""
    if schema is None:
        return
    name = join_path(path)
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise InvalidValue(path, f'`{name}` is {show(schema)}; allowed: a JSON schema of the type "object"')
    for key, kind in (("properties", dict), ("required", list)):
        if not isinstance(schema.get(key, kind()), kind):
            article = "an object" if kind is dict else "a list"
            raise InvalidValue((*path, key), f"`{name}.{key}` is {show(schema[key])}; allowed: {article}")


def _tools(value: Any, path: tuple[str, ...]) -> list[dict[str, Any]]:
    if isinstance(value, list):
        value = [_decoded_tool(tool) for tool in value]
    given = convert(value, list[dict[str, Any]], under=path)
    tools = [tool if "type" in tool else {"type": "function", **tool} for tool in given]
    for number, tool in enumerate(tools):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if tool["type"] != "function" or not isinstance(name, str) or not name:
            raise InvalidValue(
                path,
                f"`{join_path((*path, number))}` is {show(tool)}; allowed: "
                '{"type": "function", "function": {"name": …, "description": …, "parameters": …}}',
            )
        strict = tool["function"].get("strict")
        if strict is not None:
            convert(strict, bool, under=(*path, number, "function", "strict"))
    return tools


def _decoded_tool(tool: Any) -> Any:
    """Return a tool that is JSON text as an object, and any other value unchanged."""
    with suppress(msgspec.DecodeError):
        return decode_nested(tool)
    return tool


def _call_rule(choice: Any, tools: list[dict[str, Any]], path: tuple[str, ...]) -> CallRule:
    """Return the rule that `tool_choice` sets. Raises InvalidValue."""
    name = join_path(path)
    if choice in ("none", "auto"):
        return CallRule()
    is_named = isinstance(choice, dict) and choice.get("type", "function") == "function"
    named = choice.get("function") if is_named else None
    function = named.get("name") if isinstance(named, dict) else None
    if choice != "required" and not isinstance(function, str):
        raise InvalidValue(
            path,
            f"`{name}` is {show(choice)}; allowed: {', '.join(_NAMED_CHOICES)} or "
            '{"type": "function", "function": {"name": …}}',
        )
    if not tools:
        raise InvalidValue(path, f"`{name}` is {show(choice)}, and there are no tools to call; give `tools`")
    names = [tool["function"]["name"] for tool in tools]
    if function is not None and function not in names:
        raise InvalidValue(path, f"`{name}` names the function {show(function)}; {suggest(function, names)}")
    return CallRule(is_required=True, function=function)
