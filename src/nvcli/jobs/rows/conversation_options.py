"""Reads what a row says about its conversation beside the messages: tools, documents, and where the answer begins.

The keys are those of OpenAI's chat completions and of vLLM's server. In native rows they stand beside `messages`, in
rows of batch files in the body. All of them become arguments of the chat template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from nvcli.jobs.job import CallRule
from nvcli.validation import InvalidValue, Path, convert, join_path, show, suggest

TOOLS, TOOL_CHOICE, DOCUMENTS = "tools", "tool_choice", "documents"
PARALLEL_TOOL_CALLS = "parallel_tool_calls"
ADD_GENERATION_PROMPT, CONTINUE_FINAL_MESSAGE = "add_generation_prompt", "continue_final_message"

CONVERSATION_KEYS = (
    *(TOOLS, TOOL_CHOICE, PARALLEL_TOOL_CALLS, DOCUMENTS),
    *(ADD_GENERATION_PROMPT, CONTINUE_FINAL_MESSAGE),
)
"""The keys, in either form of rows."""

REASONING_EFFORT = "reasoning_effort"
"""OpenAI's key for how long a model thinks; a variable of some chat templates."""

ARGUMENTS = (TOOLS, DOCUMENTS, ADD_GENERATION_PROMPT, CONTINUE_FINAL_MESSAGE, REASONING_EFFORT)
"""The arguments that a chat template may be given by them."""

_KEYS = frozenset((*CONVERSATION_KEYS, REASONING_EFFORT))
_NAMED_CHOICES = ("none", "auto", "required")


class ConversationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one conversation."""

    arguments: dict[str, Any] | None = None
    """Arguments of the chat template by name; None: none."""
    tools: Sequence[dict[str, Any]] = ()
    """The tools that the answer may call; empty: tool calls are not looked for in the answer."""
    call_rule: CallRule | None = None
    """What those calls are held to while the answer is generated; None: nothing."""


NO_OPTIONS = ConversationOptions()


def conversation_options(given: Mapping[str, Any], *, under: tuple[str, ...] = ()) -> ConversationOptions:
    """Return the options among the values of a row or body, which has no nulls. `under` is where they stand in the row.

    Raises InvalidValue that names the key.
    """
    if _KEYS.isdisjoint(given):
        return NO_OPTIONS
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
        raise InvalidValue(under, f"`{one}` and `{other}` are both true; an answer begins anew or goes on, so give one")
    if REASONING_EFFORT in given:
        arguments[REASONING_EFFORT] = convert(given[REASONING_EFFORT], str, under=(*under, REASONING_EFFORT))
    if not may_call:
        return ConversationOptions(arguments=arguments or None)
    if call_rule == CallRule() and not any(tool["function"].get("strict") is True for tool in tools):
        return ConversationOptions(arguments=arguments, tools=tools)
    for number, tool in enumerate(tools):
        _check_parameters(tool["function"].get("parameters"), (*under, TOOLS, number, "function", "parameters"))
    return ConversationOptions(arguments=arguments, tools=tools, call_rule=call_rule)


def _check_parameters(schema: Any, path: Path) -> None:
    """Raise InvalidValue for what is no schema of an object, which the arguments of a call are."""
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
        strict = tool["function"].get("strict")
        if strict is not None:
            convert(strict, bool, under=(*path, number, "function", "strict"))
    return tools


def _call_rule(choice: Any, tools: list[dict[str, Any]], path: tuple[str, ...]) -> CallRule:
    """Return what `tool_choice` asks of calls. Raises InvalidValue."""
    name = join_path(path)
    if choice in ("none", "auto"):
        return CallRule()
    named = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
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
