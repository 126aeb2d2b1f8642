"""Rows as text, coloured on a terminal and plain in a pipe. Control characters in rows are made harmless."""

from __future__ import annotations

from collections.abc import Collection
from io import StringIO

import msgspec
from rich.console import Console
from rich.text import Text

from nvcli.core.system.terminal_text import harmless, one_line
from nvcli.tools.show.answers import ShownRow
from nvcli.tools.show.image_names import without_base64

_PROMPT_CHARS = 2000
"""Characters shown of a prompt, and of each value copied from the input."""
_VALUE_CHARS = 200


class Page:
    """Formats rows as text."""

    def __init__(self, *, is_coloured: bool) -> None:
        self._console = Console(
            file=StringIO(),
            force_terminal=is_coloured,
            color_system="standard" if is_coloured else None,
            highlight=False,
            markup=False,
            soft_wrap=True,
        )

    def format(self, row: ShownRow, prompt: str | None, *, prompt_keys: Collection[str] = ()) -> str:
        """Format a row: a title line, the prompt, the answers or the error, and other values.

        Values under `prompt_keys` are the prompt, and are not shown twice.
        """
        with self._console.capture() as shown:
            self._print(row, prompt, prompt_keys)
        return shown.get()

    def _print(self, row: ShownRow, prompt: str | None, prompt_keys: Collection[str]) -> None:
        show = self._console.print
        show(Text(_title(row), style="bold reverse"))
        if prompt is not None:
            cut = "…" if len(prompt) > _PROMPT_CHARS else ""
            show(Text(harmless(prompt[:_PROMPT_CHARS]) + cut, style="dim"))
        if row.error is not None:
            show(Text(f"error {harmless(row.error)}", style="red"))
        for number, choice in enumerate(row.choices):
            if len(row.choices) > 1 or prompt is not None:
                which = f" {number}" if len(row.choices) > 1 else ""
                show(Text(f"→ answer{which} ({one_line(choice.finish_reason)})", style="green"))
            if choice.reasoning:
                show(Text(harmless(choice.reasoning), style="dim italic"))
            if choice.text or not (choice.reasoning or choice.calls):
                show(Text(harmless(choice.text)))
            for call in choice.calls:
                show(Text(f"calls {harmless(call)}", style="cyan"))
        text = msgspec.Raw(msgspec.json.encode(row.choices[0].text)) if row.choices else None  # `--text-field`
        for key, raw in row.others.items():
            is_shown = (prompt is not None and key in prompt_keys) or raw == text
            if not is_shown:
                value = one_line(without_base64(bytes(raw).decode(errors="replace")), _VALUE_CHARS)
                show(Text(f"{one_line(key, 60)}: {value}", style="dim"))
        show(Text())


def _title(row: ShownRow) -> str:
    reasons = ", ".join(dict.fromkeys(choice.finish_reason for choice in row.choices)) or "failed"
    tokens = f"{row.prompt_tokens:,} + {row.completion_tokens:,} tokens"
    return f" {row.index}  id {one_line(str(row.id), 80)}  {one_line(reasons)}  {tokens} "
