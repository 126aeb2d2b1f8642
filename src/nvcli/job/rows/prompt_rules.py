"""Rules for the prompts of all rows of a job: templates over columns, texts that become user messages, a system
message, template variables.

A template makes the prompt of every native row. The system message and the variables of the chat template are for
conversations of every form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import msgspec

from nvcli.core.chat_template import reserved_variable
from nvcli.core.text_template import TextTemplate
from nvcli.core.validation import InvalidValue, convert, join_path, list_some, shorten
from nvcli.errors import RowError, first_line
from nvcli.job.rows.bad_json import explain_bad_utf8, find_non_json
from nvcli.job.rows.raw_values import as_text, is_null

_SYSTEM_ROLES = ("system", "developer")


class PromptKind(Enum):
    """The source of a row's prompt."""

    __hash__ = object.__hash__  # Enum's own is slow, and every row asks for it
    PROMPT = "prompt"
    """`job.prompt_field` or `job.prompt_template`."""
    OTHER_TEXT = "other text"
    """A text from elsewhere: an OpenAI completion, or a line of text where the job names a key."""
    INSTRUCTION = "instruction"
    """`instruction` and `input`, the keys of Alpaca."""
    CONVERSATIONS = "conversations"
    """`conversations`, the key of ShareGPT, which holds messages."""


TextKinds = frozenset[PromptKind]
"""Kinds of texts, such as those that become user messages, through the model's chat template."""


class PromptRules(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of one job. At most one of the two templates is given."""

    prompt_template: TextTemplate | None = None
    messages_template: tuple[tuple[str, TextTemplate], ...] = ()
    """The role and the content of each message."""
    chat: TextKinds = frozenset()
    """The texts that become conversations."""
    has_chat_template: bool = True
    """Whether the model has one, so that conversations can be answered."""
    system: str | None = None
    """The system message of conversations that have none."""
    chat_template_kwargs: Mapping[str, Any] = {}
    """Variables of the chat template; those of a row go over them."""

    @property
    def has_template(self) -> bool:
        """Whether the prompts of native rows are made from their columns."""
        return self.prompt_template is not None or bool(self.messages_template)

    @property
    def is_for_conversations(self) -> bool:
        """Whether some rules only affect conversations."""
        return self.system is not None or bool(self.chat_template_kwargs)

    @property
    def columns(self) -> frozenset[str]:
        """The columns that the templates name."""
        templates = [template for _, template in self.messages_template]
        if self.prompt_template is not None:
            templates.append(self.prompt_template)
        return frozenset().union(*(template.columns for template in templates))

    def fill(self, row: Mapping[str, Any]) -> str | list[dict[str, Any]]:
        """Return the prompt or the messages that the template makes from a row. Raises RowError."""

        def value_of(column: str) -> str:
            value = row.get(column)
            if is_null(value):
                raise RowError("missing_column", f"no column `{shorten(column)}`, which `{key}` names; {_shown(row)}")
            try:
                return as_text(value)
            except UnicodeDecodeError as error:
                problem = f"`{shorten(column)}` is {explain_bad_utf8(error.object, error.reason)}"
            except Exception as error:  # an object of a program may be anything
                found = find_non_json(value, column, str)
                problem = found or f"`{shorten(column)}` cannot be read: {first_line(error)}"
            raise RowError("invalid_value", f"{problem}; `{key}` names it")

        if self.prompt_template is not None:
            key = "job.prompt_template"
            return self.prompt_template.fill(value_of)
        key = "job.messages_template"
        messages = [{"role": role, "content": content.fill(value_of)} for role, content in self.messages_template]
        return self.with_system(messages)

    def conversation(self, text: str) -> list[dict[str, Any]]:
        """Return the conversation that a text becomes."""
        return self.with_system([{"role": "user", "content": text}])

    def with_system(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return a conversation that begins with the job's system message, unless it has its own."""
        if self.system is None or any(message["role"] in _SYSTEM_ROLES for message in messages):
            return messages
        return [{"role": "system", "content": self.system}, *messages]

    def variables(self, own: Any, *, under: tuple[str, ...]) -> dict[str, Any]:
        """Return the chat template's variables for a row. `own` are those of the row, which stand `under` a key of it;
        None: it has none. Raises InvalidValue."""
        if own is None:
            return dict(self.chat_template_kwargs) if self.chat_template_kwargs else {}
        variables = convert(own, dict[str, Any], under=under)
        problem = reserved_variable(variables)
        if problem is not None:
            raise InvalidValue(under, f"`{join_path(under)}`: {problem}")
        return {**self.chat_template_kwargs, **variables}


def _shown(row: Mapping[str, Any]) -> str:
    """List the columns of a row."""
    columns = [str(key) for key, value in row.items() if not is_null(value)]
    return f"the row has {shown_columns(columns)}" if columns else "the row has none"


def shown_columns(columns: Sequence[str]) -> str:
    """Return the names of columns as text, cut off after the first few."""
    return list_some([f"`{shorten(column)}`" for column in columns], 12)


def describe_kind(kind: PromptKind, chat: TextKinds, *, prompt: str, has_chat_template: bool) -> str | None:
    """Return the line that says how prompts of a kind are sent and how to change that; None if that is obvious.

    `prompt` names the prompt of the kind PROMPT, such as "`question`".
    """
    if kind is PromptKind.CONVERSATIONS:
        return "`conversations` is read as `messages`, with `from` as the role and `value` as the content"
    name = {
        PromptKind.PROMPT: prompt,
        PromptKind.OTHER_TEXT: "the text of completions and of lines",
        PromptKind.INSTRUCTION: "`instruction` with `input` below it",
    }[kind]
    if kind in chat:
        return f"{name} is sent as a user message, through the model's chat template (--no-chat: as it is)"
    if has_chat_template:
        return f"{name} is sent as it is, without the model's chat template (--chat: as a user message)"
    if kind is PromptKind.OTHER_TEXT or (prompt == "`prompt`" and kind is PromptKind.PROMPT):
        return None  # a model without a chat template is meant to continue texts
    return f"{name} is sent as it is: the model has no chat template (--chat-template names one)"
