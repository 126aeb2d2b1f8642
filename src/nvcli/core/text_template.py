"""Templates with placeholders for the columns of a row, such as `Translate: {text}`, written like Python's format
strings.

A placeholder is a column's name in braces; `{{` and `}}` stand for literal braces.
"""

from __future__ import annotations

from collections.abc import Callable
from string import Formatter


class TextTemplate:
    """A text with placeholders, parsed once and filled for each row."""

    def __init__(self, text: str) -> None:
        """Parse the text. Raises ValueError that says what is wrong with it."""
        parts: list[tuple[str, str | None]] = []
        try:
            for before, column, spec, conversion in Formatter().parse(text):
                if column is not None and (not column or spec or conversion):
                    raise ValueError("a placeholder is the name of a column between braces")
                parts.append((before, column))
        except ValueError as error:
            reason = str(error).removesuffix(" in format string").removesuffix(" encountered").lower()
            raise ValueError(
                f"{reason}; allowed: text with placeholders such as {{name}}, and {{{{ or }}}} for braces of the text"
            ) from None
        self._parts = parts
        self.columns = frozenset(column for _, column in parts if column is not None)
        """The columns used in the text."""

    def fill(self, value_of: Callable[[str], str]) -> str:
        """Return the text with each placeholder replaced by `value_of` its column."""
        return "".join(before if column is None else before + value_of(column) for before, column in self._parts)
