"""Decides which texts of a job become user messages, and sticks to the choice that an existing output was begun with.

The choice is a fact of the job. An output that was begun with another choice is continued if it makes no difference to
any prompt of the inputs; `job.chat: auto` keeps the output's choice, made by an earlier version of nvcli or --no-chat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from nvcli.core.config import JobConfig, RunConfig
from nvcli.core.job_config import PROMPT_KEY
from nvcli.errors import ConfigError
from nvcli.job.output.manifest import CHAT_FACT
from nvcli.job.rows.prompt_rules import PromptKind, TextKinds
from nvcli.job.run.settings import SetterOf

_ALWAYS = frozenset((PromptKind.PROMPT, PromptKind.OTHER_TEXT, PromptKind.INSTRUCTION))
_FACTS = {
    "user messages": frozenset((PromptKind.PROMPT, PromptKind.INSTRUCTION)),
    "user messages, of completions too": _ALWAYS,
    "prompts as they are": frozenset[PromptKind](),
}
"""Choices by their facts. Earlier versions have none, as they sent prompts as they are."""


def choose_chat(run: RunConfig, *, is_task: bool, has_chat_template: bool, setter_of: SetterOf) -> TextKinds:
    """Return which texts become messages. Raises ConfigError if all should and the model has no chat template.

    `is_task` says that something else is made of rows than answers: what is scored or embedded is the text itself.
    """
    job = run.job
    if job.chat == "always":
        if not has_chat_template:
            setter = setter_of(("job", "chat"))
            raise ConfigError(
                f"{f'{setter}: ' if setter else ''}`job.chat` is always, and {run.model} has no chat template; name "
                "one as `job.chat_template` (--chat-template), or let prompts go to the model as they are: never "
                "(--no-chat)"
            )
        return _ALWAYS
    if job.chat == "never" or not has_chat_template or is_task:
        return frozenset()
    if names_prompt(job) or job.image_field is not None:  # images are parts of messages, so all prompts are some
        return _FACTS["user messages"]
    return frozenset((PromptKind.INSTRUCTION,))


def names_prompt(job: JobConfig) -> bool:
    """Tell whether the job names the source of prompts."""
    return job.prompt_field != PROMPT_KEY or job.prompt_template is not None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A choice and its record in the manifest."""

    kinds: TextKinds
    fact: str | None
    """The fact in the manifest; None: there is none."""
    note: str | None = None
    """A line for the user if the output goes on as it was begun."""


def keep_choice(
    job: JobConfig,
    wanted: TextKinds,
    begun: Mapping[str, Any] | None,
    *,
    makes_messages: bool,
    has_rows: Callable[[TextKinds], bool],
) -> ChatChoice:
    """Return the choice of a job. `begun` holds the facts of its existing output; None: it has none.

    `makes_messages` says that `job.chat: auto` makes messages of rows of Alpaca's form. `has_rows` tells whether the
    inputs have a row whose prompt differs between two choices; it may read them all, and is asked only where an output
    was begun with another choice.
    """
    # Rows of Alpaca's form are those of a job that names no prompt.
    unnamed = frozenset((PromptKind.INSTRUCTION,) if makes_messages else ())
    is_usual = wanted <= {PromptKind.INSTRUCTION} and (names_prompt(job) or wanted == unnamed)
    fact = None if is_usual else next(text for text, kinds in _FACTS.items() if kinds == wanted)
    choice = ChatChoice(kinds=wanted, fact=fact)
    if begun is None or begun.get(CHAT_FACT) == fact:
        return choice
    old_fact = begun.get(CHAT_FACT)
    old = unnamed if old_fact is None else _FACTS.get(old_fact)
    if old is None:  # of a later version
        return choice
    if not has_rows(old ^ wanted):
        return ChatChoice(kinds=old, fact=old_fact)
    if job.chat == "auto" and old_fact is None:
        note = (
            "the output was begun with prompts as they are, without the model's chat template, and continues so; "
            "--overwrite starts over with user messages"
        )
        return ChatChoice(kinds=old, fact=None, note=note)
    return choice
