"""Which texts of rows become messages of a user, and what the user is told of it."""

from __future__ import annotations

from enum import Enum

import msgspec


class PromptKind(Enum):
    """Where the prompt of a row comes from, where that decides or is worth telling."""

    __hash__ = object.__hash__  # Enum's own is slow, and every row asks for it
    PROMPT = "prompt"
    """The key `job.prompt_field` or `job.prompt_template`."""
    OTHER_TEXT = "other text"
    """A text under no key that the job names: an OpenAI completion; and a line of text, where the job names a key."""
    INSTRUCTION = "instruction"
    """`instruction` and `input`, the keys of Alpaca."""
    CONVERSATIONS = "conversations"
    """`conversations`, the key of ShareGPT: a conversation, and no text."""


class ChatForms(msgspec.Struct, frozen=True, kw_only=True):
    """The kinds of texts that become the message of a user, through the model's chat template."""

    prompts: bool = False
    """Those of the kind PROMPT."""
    other_texts: bool = False
    instructions: bool = False

    def includes(self, kind: PromptKind | None) -> bool:
        """Tell whether a text of this kind becomes a message. None is that of a prompt of another form."""
        return (
            (kind is PromptKind.PROMPT and self.prompts)
            or (kind is PromptKind.INSTRUCTION and self.instructions)
            or (kind is PromptKind.OTHER_TEXT and self.other_texts)
        )

    def differing(self, other: ChatForms) -> frozenset[PromptKind]:
        """Return the kinds of texts that these forms and others treat differently."""
        return frozenset(kind for kind in PromptKind if self.includes(kind) != other.includes(kind))


def describe_kind(kind: PromptKind, forms: ChatForms, *, prompt: str, has_chat_template: bool) -> str | None:
    """Return the line that says what becomes of prompts of a kind, and how to have it otherwise; None: no need to.

    `prompt` names the prompt of the kind PROMPT, such as "`question`".
    """
    if kind is PromptKind.CONVERSATIONS:
        return "`conversations` is read as `messages`, with `from` as the role and `value` as the content"
    name = {
        PromptKind.PROMPT: prompt,
        PromptKind.OTHER_TEXT: "the text of completions and of lines",
        PromptKind.INSTRUCTION: "`instruction` with `input` below it",
    }[kind]
    if forms.includes(kind):
        return f"{name} is sent as a user message, through the model's chat template (--no-chat: as it is)"
    if has_chat_template:
        return f"{name} is sent as it is, without the model's chat template (--chat: as a user message)"
    if kind is PromptKind.OTHER_TEXT or (prompt == "`prompt`" and kind is PromptKind.PROMPT):
        return None  # a model without a chat template is meant to continue texts
    return f"{name} is sent as it is: the model has no chat template (--chat-template names one)"
