"""TemplateProbe: finds out what a chat template does with messages, by rendering short ones with it.

Templates differ in which form of contents they read and which messages they write; the rest they leave out without a
word, or they refuse it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from nvcli.core.validation import show
from nvcli.errors import RowError

Messages: TypeAlias = list[dict[str, Any]]

_Beside: TypeAlias = tuple[str | None, str | None]
"""The roles of the messages before and behind one; None: there is none."""
_ROLES = frozenset(("user", "assistant"))
"""Roles that every template knows."""
_SYSTEM, _DEVELOPER, _TOOL = "system", "developer", "tool"
_MAX_ROLES = 100
_PROBE = "nvcli"
_USER = {"role": "user", "content": "a"}
_BARE_TOOL = {"type": "function", "function": {"name": "a"}}
_EMPTY = {"description": "", "parameters": {"type": "object", "properties": {}}}
"""Keys that OpenAI's functions need not have, with what their absence means."""
_NUM_CALLS = 2
_OTHER_TEMPLATE = "or name a template that knows them as `job.chat_template` (--chat-template)"


class TemplateProbe:
    """Tells what a chat template does with messages. Each answer is found once, when it is first needed."""

    def __init__(self, template: str, render: Callable[[Messages, Mapping[str, Any]], str]) -> None:
        """`render` returns the prompt text of messages for variables, and raises RowError if the template refuses."""
        self._template = template
        self._render = render
        self._left_out: dict[tuple[str, _Beside], bool] = {}
        """Roles, and those beside them where that matters → whether the template leaves their messages out."""

    def as_read(self, messages: Messages) -> Messages:
        """Return messages in the form that the template reads: contents as texts or as lists of parts, and the role
        `developer`, OpenAI's newer name of `system`, as that unless the template knows it.

        Raises RowError for what the template would leave out without a word: messages of a role that it does not know,
        system messages at a place where it reads none, and calls of tools.
        """
        if not self._knows_developer:
            messages = [{**each, "role": _SYSTEM} if each["role"] == _DEVELOPER else each for each in messages]
        for number, message in enumerate(messages):
            place, role = f"messages[{number}]", message["role"]
            if role not in _ROLES and self._leaves_out(role, _beside(messages, number)):
                one = "give one system message, the first, or " if role == _SYSTEM and len(messages) > 1 else ""
                raise _left_out(
                    f"`{place}`, whose role is {show(role)}; {one}give it one that the template knows, such as user"
                )
            calls = message.get("tool_calls")
            count = len(calls) if isinstance(calls, list) else bool(calls)
            if count and self._calls_written < min(count, _NUM_CALLS):
                if self._calls_written:
                    raise _left_out(f"`{place}.tool_calls[1]`; give a message one call, {_OTHER_TEMPLATE}")
                raise _left_out(f"`{place}.tool_calls`; leave them out, {_OTHER_TEMPLATE}")
        return self._in_form(messages)

    def tools_as_read(self, tools: Any) -> Any:
        """Return tools with an empty description and no parameters where a function has none, if the template refuses
        such functions, as those of gpt-oss and Seed-OSS."""
        if not isinstance(tools, list) or all(_whole(tool) == tool for tool in tools) or not self._needs_whole_tools:
            return tools
        return [_whole(tool) for tool in tools]

    @functools.cached_property
    def _needs_whole_tools(self) -> bool:
        bare, whole = (
            self._written(self._in_form([_USER]), (), {"tools": [tool]}) for tool in (_BARE_TOOL, _whole(_BARE_TOOL))
        )
        return bare is None and whole is not None

    def _in_form(self, messages: Messages) -> Messages:
        return [_in_parts(message) for message in messages] if self._reads_parts_alone else messages

    @functools.cached_property
    def _reads_parts_alone(self) -> bool:
        """Whether the template leaves out or refuses a content that is a text, as those of LLaVA and SmolVLM."""
        message = _probe_of("user")
        for each in (message, _in_parts(message)):
            if self._written([each]):
                return each is not message
        return False

    @functools.cached_property
    def _knows_developer(self) -> bool:
        """Whether the template has a role `developer`; some only speak of developers."""
        return _DEVELOPER in self._template and bool(self._written(self._in_form([_probe_of(_DEVELOPER), _USER])))

    def _leaves_out(self, role: str, beside: _Beside) -> bool:
        """Tell whether messages of a role are missing in what the template writes: wherever they stand, but system
        messages beside others."""
        if role == _TOOL and role in self._template:
            return False  # some leave only those out that follow no call
        if role != _SYSTEM:
            beside = (None, None)
        if (role, beside) not in self._left_out:
            if len(self._left_out) == _MAX_ROLES:
                self._left_out.clear()
            found = [self._written(self._in_form(messages)) for messages in _places_of(role, beside)]
            self._left_out[role, beside] = [] in found and [_PROBE] not in found
        return self._left_out[role, beside]

    @functools.cached_property
    def _calls_written(self) -> int:
        """How many calls of a message with two the template writes; 2, too, if it refuses such messages."""
        if "tool_calls" not in self._template:
            return 0
        names = [f"{_PROBE}{number}" for number in range(_NUM_CALLS)]
        calls = [
            {"id": str(number) * 9, "type": "function", "function": {"name": name, "arguments": {}}}
            for number, name in enumerate(names)
        ]
        answers = [{"role": _TOOL, "tool_call_id": call["id"], "content": "a"} for call in calls]
        messages: Messages = [_USER, {"role": "assistant", "content": "", "tool_calls": calls}, *answers]
        for variables in ({}, {"tools": [_whole(_BARE_TOOL)]}):
            if (found := self._written(self._in_form(messages), names, variables)) is not None:
                return len(found)
        return _NUM_CALLS

    def _written(
        self, messages: Messages, texts: Sequence[str] = (_PROBE,), variables: Mapping[str, Any] | None = None
    ) -> list[str] | None:
        """Return those of some texts that are in what the template makes of messages; None if it refuses these."""
        try:
            written = self._render(messages, variables or {})
        except RowError:
            return None
        return [text for text in texts if text in written]


def _probe_of(role: str) -> dict[str, Any]:
    return {"role": role, "content": _PROBE}


def _beside(messages: Messages, number: int) -> _Beside:
    """Return the roles beside a message, of which only `system` is told from others."""
    before, behind = (
        None if not 0 <= place < len(messages) else _SYSTEM if messages[place]["role"] == _SYSTEM else "user"
        for place in (number - 1, number + 1)
    )
    return before, behind


def _places_of(role: str, beside: _Beside) -> list[Messages]:
    """Return conversations with a message of a role, at each place where it may stand."""
    probe = _probe_of(role)
    if role != _SYSTEM:
        return [[probe, _USER], [_USER, probe]]
    before, behind = ([{**_USER, "role": other}] if other else [] for other in beside)
    return [[*before, probe, *behind]]


def _whole(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return tool
    missing = {key: value for key, value in _EMPTY.items() if function.get(key) is None}
    return {**tool, "function": {**function, **missing}}


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content is a list of parts, if it is a text."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _left_out(what: str) -> RowError:
    return RowError("chat_template_error", f"the chat template leaves out {what}")
