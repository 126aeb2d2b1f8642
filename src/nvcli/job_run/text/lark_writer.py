"""LarkWriter: a grammar in llguidance's notation (a dialect of Lark's), rule by rule.

Pieces of grammars are texts in that notation, which stand one behind the other or between `|`. A mark, such as
`<tool_call>`, is one token in most vocabularies and has no other spelling there; elsewhere it is a text like others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

_ANY_TEXT = "TEXT"
_ANY_TEXT_TERMINAL = r"TEXT: /(.|\n)*/"


class LarkWriter:
    """One grammar as it is written."""

    def __init__(self, token_id: Callable[[str], int | None]) -> None:
        """`token_id` returns the id of a mark; None: it is no token of its own."""
        self._token_id = token_id
        self._rules = [_ANY_TEXT_TERMINAL]
        self._num_names = 0
        self._terminals: dict[str, str] = {}

    def finish(self, start: str) -> str:
        """Return the whole grammar. `start` is the piece that an answer is."""
        return "\n".join(("%llguidance {}", f"start: {start}", *self._rules))

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule, and return the piece that names it."""
        return self.define(self.declare(), body, options)

    def declare(self) -> str:
        """Return the piece that names a rule which is to be defined, so that other rules, or itself, may name it."""
        self._num_names += 1
        return f"r{self._num_names}"

    def define(self, name: str, body: str, options: str = "") -> str:
        """Add the rule that was declared by this name, and return the name."""
        self._rules.append(f"{name}{f'[{options}]' if options else ''}: {body}")
        return name

    def terminal(self, regex: str) -> str:
        """Return the piece for a regular expression without `/`, which is matched as a whole."""
        return self._terminal(f"/{regex}/")

    def _terminal(self, body: str) -> str:
        if body not in self._terminals:
            name = self._terminals[body] = f"T{len(self._terminals)}"
            self._rules.append(f"{name}: {body}")
        return self._terminals[body]

    def mark(self, text: str) -> str:
        """Return the piece for a mark."""
        token = self._token_id(text)
        return self.text(text) if token is None else f"<[{token}]>"

    def text(self, text: str) -> str:
        """Return the piece for a text."""
        return json.dumps(text, ensure_ascii=False)

    def any_text(self) -> str:
        """Return the piece for any text without special tokens; it may be empty."""
        return _ANY_TEXT

    def text_until(self, mark: str, *, without: Sequence[str] = ()) -> str:
        """Return the piece for any text, and the mark that ends it. The text holds no mark, and none of the texts
        `without`."""
        excluded = "|".join(re.escape(each).replace("/", r"\/") for each in (mark, *without))
        free = self._terminal(f"/(?s:.*)/ & ~/(?s:.*)({excluded})(?s:.*)/") if without else _ANY_TEXT
        if self._token_id(mark) is not None:
            return f"{free} {self.mark(mark)}"
        return self.rule(f"{free} {self.text(mark)}", "lazy")

    def json(self, schema: Mapping[str, Any]) -> str:
        """Return the piece for JSON that a schema allows."""
        return self.rule(f"%json {json.dumps(schema, ensure_ascii=False)}")

    def one_of(self, pieces: Sequence[str]) -> str:
        """Return the piece for one of some, at least one."""
        return pieces[0] if len(pieces) == 1 else self.rule(" | ".join(pieces))

    def in_order(self, pieces: Iterable[tuple[str, bool]], separator: str) -> str:
        """Return the piece for some in this order, with a separator between those that are there.

        Each comes with whether it must be there. The whole may be empty where none must.
        """
        first, later = '""', '""'
        for piece, is_needed in reversed([*pieces]):
            begun = f"{piece} {later}"
            then = f"{separator} {begun}"
            first, later = (
                self.rule(begun if is_needed else f"{begun} | {first}"),
                self.rule(then if is_needed else f"{then} | {later}"),
            )
        return first
