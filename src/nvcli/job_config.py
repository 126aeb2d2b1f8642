"""The `job:` section of a configuration: how the rows of a job are read, prepared and written."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from nvcli.config_types import (
    ChatChoice,
    OnTooLong,
    Order,
    PositiveInt,
    ReasoningParserName,
    SpecialTokens,
    ToolParserName,
)

PROMPT_KEY, MESSAGES_KEY = "prompt", "messages"
"""The keys of a row's prompt text and of its conversation where a job names no others."""


class MessageTemplate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message that is made of a row's columns."""

    role: str
    content: str
    """Text with places such as `{text}` for columns of the row."""


class JobConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `job:` section: how the file is read and written."""

    order: Order = "completion"
    """completion: rows are written as they finish; input: in the order of the input."""
    on_too_long: OnTooLong = "error"
    """A prompt that leaves no room for its answer in `max_model_len`: an error row, or the prompt is cut at its left
    or right end so that `max_tokens` fit; where a row has no `max_tokens`, a quarter of `max_model_len` is left."""
    special_tokens: SpecialTokens = "allow"
    """Special tokens that the text of a row spells out: tokens, plain text, or a reason to make it an error row."""
    reasoning_parser: ReasoningParserName = "auto"
    """How thoughts are told apart in answers to conversations; auto: as the chat template marks them."""
    tool_parser: ToolParserName = "auto"
    """How tool calls are found in answers to conversations with tools; auto: as the chat template writes them."""
    max_errors: Annotated[int, Meta(ge=0)] | None = None
    """More failed rows than this in one run end it; null: it goes on to the end."""
    max_leading_errors: Annotated[int, Meta(ge=0)] = 100
    """So many rows at the beginning of a job that all fail with one cause end it, if none was answered by then; 0: it
    goes on."""
    keep_going: bool = False
    """With several copies of the model, one that dies does not end the run: the others compute its rows."""
    sync_seconds: Annotated[float, Meta(ge=0.05, le=3600)] = 2.0
    """Answered rows are on disk at most about this long after they came."""
    reorder_memory: str | PositiveInt = "256MiB"
    """The memory that answered rows may take with `order: input`, before they wait in a temporary file."""
    prompt_field: Annotated[str, Meta(min_length=1)] = PROMPT_KEY
    """The key (in a table: column) of a row's prompt text."""
    messages_field: Annotated[str, Meta(min_length=1)] | None = None
    """The key of a row's conversation; null: `messages`. Where either this key or `prompt_field` is set to another
    value than its default, it decides for rows that have both."""
    id_field: Annotated[str, Meta(min_length=1)] = "id"
    """The key of a row's id."""
    check_columns: bool = True
    """An input whose first rows all lack a prompt ends the run before anything is written; false: they are error
    rows."""
    keep_input: bool = False
    """Copy every key of an input row to its output row, those of the prompt and `sampling` too."""
    text_field: Annotated[str, Meta(min_length=1)] | None = None
    """A key of output rows for the text of the first choice; null: none, and in CSV `generated_text`."""
    prompt_template: str | None = None
    """The prompt of every native row, with places such as `{text}` for its columns; null: the row brings its prompt."""
    messages_template: list[MessageTemplate] = []
    """The conversation of every native row, made likewise; empty: the row brings its prompt."""
    chat: ChatChoice = "auto"
    """Whether texts become the message of a user, through the model's chat template. auto: those of a `prompt_field`
    that is not `prompt` and of `prompt_template`, if answers are generated and the model has a template; always: all;
    never: none."""
    system: str | None = None
    """The system message of conversations that have none; null: they stay as they are."""
    chat_template: Annotated[str, Meta(min_length=1)] | None = None
    """A file with a Jinja chat template; null: the model's own."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, such as `enable_thinking: false`; those of a row go over them."""

    plan: bool = True
    """Choose the order in which the rows that were read ahead are computed (prompts that begin alike together, long
    answers first, equal rows once), and how many run at a time, by how long answers will be. Changes no answer. false:
    every row, in the order of the input, and as many at a time as fit at that moment."""
