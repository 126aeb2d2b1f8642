"""Reads what a row says about its conversation beside the messages: tools, documents, and where the answer begins.

The keys are those of OpenAI's chat completions and of vLLM's server. In native rows they stand beside `messages`, in
rows of batch files in the body. All of them become arguments of the chat template.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from nvcli.errors import RowError
from nvcli.validation import InvalidValue, convert, join_path, show

TOOLS, TOOL_CHOICE, DOCUMENTS = "tools", "tool_choice", "documents"
ADD_GENERATION_PROMPT, CONTINUE_FINAL_MESSAGE = "add_generation_prompt", "continue_final_message"

CONVERSATION_KEYS = (TOOLS, TOOL_CHOICE, DOCUMENTS, ADD_GENERATION_PROMPT, CONTINUE_FINAL_MESSAGE)
"""The keys, in either form of rows."""

REASONING_EFFORT = "reasoning_effort"
"""OpenAI's key for how long a model thinks; a variable of some chat templates."""

ARGUMENTS = (TOOLS, DOCUMENTS, ADD_GENERATION_PROMPT, CONTINUE_FINAL_MESSAGE, REASONING_EFFORT)
"""The arguments that a chat template may be given by them."""

_NAMED_CHOICES = ("none", "auto", "required")


class ConversationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one conversation."""

    arguments: dict[str, Any] = {}
    """Arguments of the chat template by name."""
    tools: list[dict[str, Any]] = []
    """The tools that the answer may call; empty: tool calls are not looked for in the answer."""


NO_OPTIONS = ConversationOptions()


def conversation_options(given: Mapping[str, Any], *, under: tuple[str, ...] = ()) -> ConversationOptions:
    """Return the options among the values of a row or body, which has no nulls. `under` is where they stand in the row.

    Raises RowError and InvalidValue that name the key.
    """
    if given.keys().isdisjoint((*CONVERSATION_KEYS, REASONING_EFFORT)):
        return NO_OPTIONS
    arguments: dict[str, Any] = {}
    tools = _tools(given.get(TOOLS, []), (*under, TOOLS))
    may_call = _may_call(given.get(TOOL_CHOICE, "auto"), tools, (*under, TOOL_CHOICE))
    if tools and may_call:
        arguments[TOOLS] = tools
    if DOCUMENTS in given:
        arguments[DOCUMENTS] = convert(given[DOCUMENTS], list[dict[str, Any]], under=(*under, DOCUMENTS))
    for name in (ADD_GENERATION_PROMPT, CONTINUE_FINAL_MESSAGE):
        if name in given:
            arguments[name] = convert(given[name], bool, under=(*under, name))
    if arguments.get(ADD_GENERATION_PROMPT) and arguments.get(CONTINUE_FINAL_MESSAGE):
        one, other = (join_path((*under, name)) for name in (ADD_GENERATION_PROMPT, CONTINUE_FINAL_MESSAGE))
        raise InvalidValue(under, f"`{one}` and `{other}` are both true; an answer begins anew or goes on, so give one")
    if REASONING_EFFORT in given:
        arguments[REASONING_EFFORT] = convert(given[REASONING_EFFORT], str, under=(*under, REASONING_EFFORT))
    return ConversationOptions(arguments=arguments, tools=tools if may_call else [])


def _tools(value: Any, path: tuple[str, ...]) -> list[dict[str, Any]]:
    tools = convert(value, list[dict[str, Any]], under=path)
    for number, tool in enumerate(tools):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if tool.get("type") != "function" or not isinstance(name, str) or not name:
            raise InvalidValue(
                path,
                f"`{join_path((*path, number))}` is {show(tool)}; allowed: "
                '{"type": "function", "function": {"name": …, "description": …, "parameters": …}}',
            )
    return tools


def _may_call(choice: Any, tools: list[dict[str, Any]], path: tuple[str, ...]) -> bool:
    """Tell whether the answer may call tools. Raises RowError for a call that would have to be forced."""
    name = join_path(path)
    if choice in ("none", "auto"):
        return bool(choice == "auto")
    named = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if choice != "required" and not (isinstance(named, dict) and isinstance(named.get("name"), str)):
        raise InvalidValue(
            path,
            f"`{name}` is {show(choice)}; allowed: {', '.join(_NAMED_CHOICES)} or "
            '{"type": "function", "function": {"name": …}}',
        )
    if not tools:
        raise InvalidValue(path, f"`{name}` is {show(choice)}, and there are no tools to call; give `tools`")
    raise RowError(
        "unsupported_parameter",
        f'`{name}` is {show(choice)}, which forces a call, and that is not supported; give "auto", and say in a '
        "message which tool is to be called",
    )
