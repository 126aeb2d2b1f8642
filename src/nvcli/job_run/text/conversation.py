"""A conversation as a chat template is given it."""

from __future__ import annotations

from typing import Any

import msgspec


class Conversation(msgspec.Struct, frozen=True):
    """The messages of a row, and what else its template is told."""

    messages: list[dict[str, Any]]
    variables: dict[str, Any] = {}
    """Variables of the chat template by name (`chat_template_kwargs`)."""
