"""Texts with places for the columns of a row, such as `Translate: {text}`, in the form of Python's format strings.

A place is the name of a column between braces and nothing else; `{{` and `}}` are braces of the text.
"""

from __future__ import annotations

from collections.abc import Callable
from string import Formatter


class TextTemplate:
    """A text with places, taken apart once and filled for each row."""

    def __init__(self, text: str) -> None:
        """Raises ValueError that says what is wrong with the text."""
        parts: list[tuple[str, str | None]] = []
        try:
            for before, column, spec, conversion in Formatter().parse(text):
                if column is not None and (not column or spec or conversion):
                    raise ValueError("a place is the name of a column between braces")
                parts.append((before, column))
        except ValueError as error:
            reason = str(error).removesuffix(" in format string").removesuffix(" encountered").lower()
            raise ValueError(
                f"{reason}; allowed: text with places such as {{name}}, and {{{{ or }}}} for braces of the text"
            ) from None
        self._parts = parts
        self.columns = frozenset(column for _, column in parts if column is not None)
        """The columns that the text names."""

    def fill(self, value_of: Callable[[str], str]) -> str:
        """Return the text with each place filled by what `value_of` returns for its column."""
        return "".join(before if column is None else before + value_of(column) for before, column in self._parts)
