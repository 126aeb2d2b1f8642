"""The `job:` section of a configuration: how the rows of a job are read, prepared and written."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from nvcli.config_types import (
    ChatChoice,
    Name,
    OnTooLong,
    Order,
    PositiveInt,
    ReasoningParserName,
    SpecialTokens,
    ToolParserName,
)
from nvcli.flags import MODEL, PROMPTS, ROWS, Flag

PROMPT_KEY, MESSAGES_KEY = "prompt", "messages"
"""The keys of a row's prompt text and of its conversation where a job names no others."""


class MessageTemplate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message that is made of a row's columns."""

    role: str
    content: str
    """Text with places such as `{text}` for columns of the row."""


class JobConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `job:` section: how the file is read and written."""

    order: Annotated[Order, Flag("--order", ROWS, "Order of the output's rows.")] = "completion"
    """completion: rows are written as they finish."""
    on_too_long: OnTooLong = "error"
    """A prompt that leaves no room for its answer in `max_model_len`: an error row, or the prompt is cut at its left
    or right end so that `max_tokens` fit; where a row has no `max_tokens`, a quarter of `max_model_len` is left."""
    special_tokens: SpecialTokens = "allow"
    """Special tokens that the text of a row spells out: tokens, plain text, or a reason to make it an error row."""
    reasoning_parser: ReasoningParserName = "auto"
    """How thoughts are told apart in answers to conversations; auto: as the chat template marks them."""
    tool_parser: ToolParserName = "auto"
    """How tool calls are found in answers to conversations with tools; auto: as the chat template writes them."""
    max_errors: Annotated[
        Annotated[int, Meta(ge=0)] | None, Flag("--max-errors", ROWS, "Stop once more than N rows have failed.")
    ] = None
    max_leading_errors: Annotated[int, Meta(ge=0)] = 100
    """So many rows at the beginning of a job that all fail with one cause end it, if none was answered by then; 0: it
    goes on."""
    keep_going: Annotated[
        bool, Flag("--keep-going", MODEL, "When a copy of the model dies, the others take over its rows.")
    ] = False
    sync_seconds: Annotated[float, Meta(ge=0.05, le=3600)] = 2.0
    """Answered rows are on disk at most about this long after they came."""
    reorder_memory: str | PositiveInt = "256MiB"
    """The memory that answered rows may take with `order: input`, before they wait in a temporary file."""
    prompt_field: Annotated[Name, Flag("--prompt-field", PROMPTS, "Key (column) of the prompts.", "COLUMN")] = (
        PROMPT_KEY
    )
    messages_field: Annotated[
        Name | None, Flag("--messages-field", PROMPTS, "Key (column) of the conversations.", "COLUMN")
    ] = None
    """null: `messages`. Where either this key or `prompt_field` is set to another value than its default, it decides
    for rows that have both."""
    id_field: Annotated[Name, Flag("--id-field", ROWS, "Key (column) of the ids.", "COLUMN")] = "id"
    check_columns: bool = True
    """An input whose first rows all lack a prompt ends the run before anything is written; false: they are error
    rows."""
    keep_input: Annotated[bool, Flag("--keep-input", ROWS, "Copy the prompt and all else of a row to the output.")] = (
        False
    )
    text_field: Annotated[
        Name | None,
        Flag(
            "--text-field",
            ROWS,
            "Key (column) for the answer's text alone [default: none; CSV: generated_text]",
            "COLUMN",
        ),
    ] = None
    """Holds the text of the first choice."""
    prompt_template: Annotated[
        str | None, Flag("--prompt-template", PROMPTS, "Prompts made of columns, such as 'Translate: {text}'.")
    ] = None
    """Makes the prompt of every native row; null: the row brings its prompt."""
    messages_template: list[MessageTemplate] = []
    """The conversation of every native row, made likewise; empty: the row brings its prompt."""
    chat: Annotated[
        ChatChoice,
        Flag(
            "--chat/--no-chat",
            PROMPTS,
            "Send prompts as user messages, through the chat template, or as they are [default: as user messages "
            "those of --prompt-field and --prompt-template, if the model has a chat template]",
            switch=("always", "never"),
        ),
    ] = "auto"
    """auto: those of a `prompt_field` that is not `prompt` and of `prompt_template` are messages, if answers are
    generated and the model has a template."""
    system: Annotated[str | None, Flag("--system", PROMPTS, "System message of conversations that have none.")] = None
    chat_template: Annotated[
        Name | None, Flag("--chat-template", PROMPTS, "Jinja chat template instead of the model's own.", "FILE")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any],
        Flag("--chat-template-kwargs", PROMPTS, "Variables of the chat template", example='{"enable_thinking": false}'),
    ] = {}
    """A row's own go over them."""
    plan: bool = True
    """Choose the order in which the rows that were read ahead are computed (prompts that begin alike together, long
    answers first, equal rows once), and how many run at a time, by how long answers will be. Changes no answer. false:
    every row, in the order of the input, and as many at a time as fit at that moment."""
