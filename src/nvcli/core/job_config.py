"""The `job:` section of a configuration: how the rows of a job are read, prepared and written."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from nvcli.core.config_types import (
    ChatChoice,
    Name,
    OnTooLong,
    Order,
    PositiveInt,
    ReasoningParserName,
    SpecialTokens,
    ToolParserName,
)
from nvcli.core.flags import MODEL, PROMPTS, ROWS, Flag

PROMPT_KEY, MESSAGES_KEY = "prompt", "messages"
"""Default keys of a row's prompt text and of its conversation."""


class MessageTemplate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message made from a row's columns."""

    role: str
    content: str
    """Text with placeholders such as `{text}` for columns of the row."""


class JobConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `job:` section: how rows are read, prepared and written."""

    order: Annotated[Order, Flag("--order", ROWS, "Order of the output's rows.")] = "completion"
    """completion: rows are written as they finish."""
    on_too_long: OnTooLong = "error"
    """Handling of a prompt that leaves no room for its answer in `max_model_len`: an error row, or the prompt is cut at
    its left or right end so that `max_tokens` fit; for a row without `max_tokens`, a quarter of `max_model_len` is left
    free."""
    special_tokens: SpecialTokens = "allow"
    """Handling of special tokens spelled out in a row's text: as tokens, as plain text, or as an error row."""
    reasoning_parser: ReasoningParserName = "auto"
    """Format of reasoning in answers to conversations; auto: as the chat template marks it."""
    tool_parser: ToolParserName = "auto"
    """Format of tool calls in answers to conversations with tools; auto: as the chat template writes them."""
    max_errors: Annotated[
        Annotated[int, Meta(ge=0)] | None, Flag("--max-errors", ROWS, "Stop once more than N rows have failed.")
    ] = None
    max_leading_errors: Annotated[int, Meta(ge=0)] = 100
    """Rows that end the job if they are its first, all fail with one cause, and none is answered; 0: never."""
    keep_going: Annotated[
        bool, Flag("--keep-going", MODEL, "When a copy of the model dies, the others take over its rows.")
    ] = False
    sync_seconds: Annotated[float, Meta(ge=0.05, le=3600)] = 2.0
    """Answered rows are on disk after about this many seconds at most."""
    reorder_memory: str | PositiveInt = "256MiB"
    """Memory for answered rows that wait for their turn with `order: input`; more of them wait in a temporary file."""
    prompt_field: Annotated[Name, Flag("--prompt-field", PROMPTS, "Key (column) of the prompts.", "COLUMN")] = (
        PROMPT_KEY
    )
    messages_field: Annotated[
        Name | None, Flag("--messages-field", PROMPTS, "Key (column) of the conversations.", "COLUMN")
    ] = None
    """null: `messages`. If either this key or `prompt_field` differs from its default, it decides
    for rows that have both."""
    image_field: Annotated[
        Name | None,
        Flag("--image-field", PROMPTS, "Key (column) of images: paths or bytes, or lists of them.", "COLUMN"),
    ] = None
    """They stand before the text of the prompt, which is a user message then, or of the last user message. null:
    images are parts of messages alone."""
    min_pixels: PositiveInt | None = None
    max_pixels: PositiveInt | None = None
    """Limits of the size that the model gets of an image, in pixels; null: those of the checkpoint. `max_pixels` raises
    neither those nor is it raised by those of single images."""
    media_roots: list[str] = []
    """Folders below which the images of rows may be, besides those of the inputs."""
    media_domains: list[str] = []
    """Domains from which images are fetched that rows name by https URLs: `images.example.com`, `*.example.com`."""
    id_field: Annotated[Name, Flag("--id-field", ROWS, "Key (column) of the ids.", "COLUMN")] = "id"
    check_columns: bool = True
    """An input whose first rows all lack a prompt ends the run before anything is written; false: they become error
    rows."""
    keep_input: Annotated[
        bool, Flag("--keep-input", ROWS, "Copy the prompt and everything else in a row to the output.")
    ] = False
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
        str | None, Flag("--prompt-template", PROMPTS, "Prompts made from columns, such as 'Translate: {text}'.")
    ] = None
    """Template of every native row's prompt; null: the row brings its prompt."""
    messages_template: list[MessageTemplate] = []
    """Template of every native row's conversation; empty: the row brings its prompt."""
    chat: Annotated[
        ChatChoice,
        Flag(
            "--chat/--no-chat",
            PROMPTS,
            "Send prompts as user messages, through the chat template, or as they are [default: as user messages "
            "those of --prompt-field and --prompt-template, or all with --image-field, if the model has a chat "
            "template; as they are for `score`, `embed` and `classify`]",
            switch=("always", "never"),
        ),
    ] = "auto"
    """auto: those of a `prompt_field` that is not `prompt` and of `prompt_template`, or all where there is an
    `image_field`, are messages, if answers are generated and the model has a template."""
    system: Annotated[str | None, Flag("--system", PROMPTS, "System message for conversations without one.")] = None
    chat_template: Annotated[
        Name | None, Flag("--chat-template", PROMPTS, "Jinja chat template instead of the model's own.", "FILE")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any],
        Flag("--chat-template-kwargs", PROMPTS, "Variables of the chat template", example='{"enable_thinking": false}'),
    ] = {}
    """A row's own variables override these."""
    plan: bool = True
    """Choose the order of computing rows that were read ahead (prompts that begin alike together, long
    answers first, equal rows once), and how many run at a time, by forecast answer lengths. Changes no answer. false:
    compute every row, in input order, with as many at a time as fit at that moment."""
