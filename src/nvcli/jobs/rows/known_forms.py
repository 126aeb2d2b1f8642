"""Recognises rows of well-known data sets that have no `prompt` and no `messages`: ShareGPT and Alpaca."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from nvcli.jobs.rows.nesting import decode_inner
from nvcli.jobs.rows.prompt_forms import PromptKind
from nvcli.jobs.rows.raw_values import decode, is_null

CONVERSATIONS = "conversations"
"""ShareGPT's key of a conversation."""
INSTRUCTION, INPUT = "instruction", "input"
"""Alpaca's keys of a task and of what it is about, which may be empty."""
_OUTPUT = "output"
"""Alpaca's key of the answer that the data set has, which is copied."""

KNOWN_KEYS = frozenset((CONVERSATIONS, INSTRUCTION, INPUT))
"""The keys that make a prompt in these forms."""
KEYS_OF_KIND = {
    PromptKind.CONVERSATIONS: frozenset((CONVERSATIONS,)),
    PromptKind.INSTRUCTION: frozenset((INSTRUCTION, INPUT)),
}


def known_form(row: Mapping[str, Any]) -> PromptKind | None:
    """Return the kind of prompt that a row without `prompt` and `messages` has; None: it has none that is known."""
    if CONVERSATIONS in row and _is_conversation(row[CONVERSATIONS]):
        return PromptKind.CONVERSATIONS
    # Without its other keys, `instruction` may be one part of a prompt whose other parts nobody knows.
    if INSTRUCTION in row and (INPUT in row or _OUTPUT in row):
        texts = [_decoded(row.get(key)) for key in (INSTRUCTION, INPUT)]
        if isinstance(texts[0], str) and texts[0] and isinstance(texts[1], str | None):
            return PromptKind.INSTRUCTION
    return None


def instruction_prompt(row: Mapping[str, Any]) -> str:
    """Return the prompt of a row of the kind INSTRUCTION, whose values are objects."""
    given = row.get(INPUT)
    return f"{row[INSTRUCTION]}\n\n{given}" if given else str(row[INSTRUCTION])


def _is_conversation(value: Any) -> bool:
    messages = _decoded(value)
    if isinstance(messages, str) and messages.lstrip().startswith("["):
        try:
            messages = decode_inner(messages)
        except (msgspec.DecodeError, UnicodeEncodeError):
            return True  # the row's error says what is the matter
    first = messages[0] if isinstance(messages, list) and messages else None
    return isinstance(first, dict) and ("from" in first or "role" in first)


def _decoded(value: Any) -> Any:
    """Return a value as an object; None for JSON that cannot be held."""
    if not isinstance(value, msgspec.Raw):
        return None if is_null(value) else value
    try:
        return decode(value)
    except (msgspec.DecodeError, RecursionError):
        return None
