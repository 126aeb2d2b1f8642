"""LarkWriter: builds a grammar in llguidance's notation (a dialect of Lark's), rule by rule.

Pieces of grammars are texts in that notation, put in sequence or between `|`. A mark, such as `<tool_call>`, is a
single token in most vocabularies and has no other spelling there; elsewhere it is ordinary text.

Values of JSON schemas can also be written in notations other than JSON (`ValueNotation`). These follow the types,
enumerations, properties, items and references of a schema and ignore the rest: bounds of numbers and lengths, patterns
and formats are left to llguidance, which only knows JSON.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from nvcli.core.validation import is_text

_ANY_TEXT = "TEXT"
_ANY_TEXT_TERMINAL = r"TEXT: /(.|\n)*/"


class LarkWriter:
    """Builds one grammar."""

    def __init__(self, token_id: Callable[[str], int | None]) -> None:
        """`token_id` returns the id of a mark; None: it is no token of its own."""
        self._token_id = token_id
        self._rules = [_ANY_TEXT_TERMINAL]
        self._num_names = 0
        self._terminals: dict[str, str] = {}

    def finish(self, start: str) -> str:
        """Return the complete grammar. `start` is the piece for an answer."""
        return "\n".join(("%llguidance {}", f"start: {start}", *self._rules))

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule, and return the piece that names it."""
        return self.define(self.declare(), body, options)

    def declare(self) -> str:
        """Return the piece that names a rule to be defined later, so that it may be recursive."""
        self._num_names += 1
        return f"r{self._num_names}"

    def define(self, name: str, body: str, options: str = "") -> str:
        """Add the rule declared by this name, and return the name."""
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
        """Return the piece for any text up to and including a mark. The text contains none of the texts `without`."""
        excluded = "|".join(re.escape(each).replace("/", r"\/") for each in (mark, *without))
        free = self._terminal(f"/(?s:.*)/ & ~/(?s:.*)({excluded})(?s:.*)/") if without else _ANY_TEXT
        if self._token_id(mark) is not None:
            return f"{free} {self.mark(mark)}"
        return self.rule(f"{free} {self.text(mark)}", "lazy")

    def json(self, schema: Mapping[str, Any]) -> str:
        """Return the piece for JSON that a schema allows."""
        return self.rule(f"%json {json.dumps(schema, ensure_ascii=False)}")

    def one_of(self, pieces: Sequence[str]) -> str:
        """Return the piece for a choice of pieces, at least one."""
        return pieces[0] if len(pieces) == 1 else self.rule(" | ".join(pieces))

    def in_order(self, pieces: Iterable[tuple[str, bool]], separator: str) -> str:
        """Return the piece for optional pieces in this order, with a separator between those present.

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


_INTEGER = "-?(0|[1-9][0-9]{0,15})"
_NUMBER = rf"{_INTEGER}(\.[0-9]{{1,15}})?"
_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")


class ValueNotation(ABC):
    """A notation for values, in one grammar."""

    true: str
    false: str
    null: str
    colon: str
    comma: str

    def __init__(self, lark: LarkWriter, definitions: Mapping[str, Any]) -> None:
        """`definitions` is the schema that references (`#/…`) point into."""
        self.lark = lark
        self._root = definitions
        self._referred: dict[str, str] = {}
        """Rules by reference; that of any value is under the empty text."""

    @abstractmethod
    def any_string(self) -> str:
        """Return the piece for any string."""

    @abstractmethod
    def string(self, value: str) -> str:
        """Return the piece for one string."""

    def key(self, name: str) -> str | None:
        """Return the piece for a property's name, as a string; None: the notation cannot write it."""
        return self.string(name)

    def any_key(self) -> str:
        """Return the piece for any property's name."""
        return self.any_string()

    def value(self, schema: Any) -> str:
        """Return the piece for the values that a schema allows."""
        if not isinstance(schema, dict):
            return self.any_value()
        if isinstance(reference := schema.get("$ref"), str):
            return self._rule_of(reference, lambda: self.value(self._resolve(reference)))
        for keyword in ("enum", "const"):
            if keyword in schema:
                values = schema[keyword] if keyword == "enum" else [schema[keyword]]
                if isinstance(values, list) and values and all(_is_plain(each) for each in values):
                    return self.lark.one_of([self._plain(each) for each in values])
        for keyword in ("anyOf", "oneOf"):
            choices = schema.get(keyword)
            if isinstance(choices, list) and choices:
                return self.lark.one_of([self.value(choice) for choice in choices])
        kinds = schema.get("type")
        kinds = [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind in _TYPES]
        return self.lark.one_of([self._of_type(kind, schema) for kind in kinds]) if kinds else self.any_value()

    def any_value(self) -> str:
        """Return the piece for any value."""
        return self._rule_of("", lambda: " | ".join(self._of_type(kind, {}) for kind in _TYPES if kind != "integer"))

    def members(self, schema: Mapping[str, Any]) -> str:
        """Return the piece for an object's properties, without braces."""
        return self._pairs(schema, self.key, self.any_key, self.colon)

    def _pairs(
        self,
        schema: Mapping[str, Any],
        write_key: Callable[[str], str | None],
        any_key: Callable[[], str],
        colon: str,
    ) -> str:
        properties, required = schema.get("properties"), schema.get("required")
        required = required if isinstance(required, list) else []
        pieces = []
        if isinstance(properties, dict):
            for name, each in properties.items():
                key = write_key(name)
                if key is not None:
                    pieces.append((f"{key} {self.lark.text(colon)} {self.value(each)}", name in required))
        comma = self.lark.text(self.comma)
        if not pieces and schema.get("additionalProperties") is not False:
            pair = self.lark.rule(f"{any_key()} {self.lark.text(colon)} {self.any_value()}")
            return self.lark.rule(f'"" | {pair} ({comma} {pair})*')
        return self.lark.in_order(pieces, comma)

    def _rule_of(self, reference: str, write: Callable[[], str]) -> str:
        """Return the piece that names the rule of a reference, whose body `write` gives the first time."""
        if reference not in self._referred:
            name = self._referred[reference] = self.lark.declare()
            self.lark.define(name, write())
        return self._referred[reference]

    def _of_type(self, kind: str, schema: Mapping[str, Any]) -> str:
        lark = self.lark
        match kind:
            case "string":
                return self.any_string()
            case "integer":
                return lark.terminal(_INTEGER)
            case "number":
                return lark.terminal(_NUMBER)
            case "boolean":
                return lark.one_of([lark.text(self.true), lark.text(self.false)])
            case "null":
                return lark.text(self.null)
            case "array":
                item = self.value(schema.get("items"))
                least = schema.get("minItems")
                is_empty = not (isinstance(least, int) and least > 0)
                items = f"{item} ({lark.text(self.comma)} {item})*"
                return lark.rule(f'"[" {f"({items})?" if is_empty else items} "]"')
            case _:
                return lark.rule(f'"{{" {self.members(schema)} "}}"')

    def _plain(self, value: Any) -> str:
        if isinstance(value, str):
            return self.string(value)
        if isinstance(value, bool):
            return self.lark.text(self.true if value else self.false)
        return self.lark.text(self.null if value is None else repr(value))

    def _resolve(self, reference: str) -> Any:
        """Return the part of the root that a reference points to; an empty schema if there is none."""
        part: Any = self._root
        for step in reference.removeprefix("#").split("/")[1:]:
            part = part.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(part, dict) else None
        return {} if part is None or part is self._root else part


class PythonNotation(ValueNotation):
    """Python literals."""

    true, false, null = "True", "False", "None"
    colon, comma = ": ", ", "

    def any_string(self) -> str:
        # Quotes of either kind, and the escapes that stand for one character each.
        return self.lark.terminal(
            r'"([^"\\\x00-\x1F]|\\["\'\\nrt])*"' + "|" + r"'([^'\\\x00-\x1F]|\\[" + '"' + r"'\\nrt])*'"
        )

    def string(self, value: str) -> str:
        return self.lark.one_of([self.lark.text(repr(value)), self.lark.text(json.dumps(value, ensure_ascii=False))])

    def keyword_arguments(self, schema: Mapping[str, Any]) -> str:
        """Return the piece for the properties of an object as the arguments of a call."""

        def name_of(name: str) -> str | None:
            return self.lark.text(name) if name.isidentifier() else None

        return self._pairs(schema, name_of, lambda: self.lark.terminal("[A-Za-z_][A-Za-z0-9_]{0,40}"), "=")


class GemmaNotation(ValueNotation):
    """Gemma 4's notation: keys without quotes, and strings between marks."""

    true, false, null = "true", "false", "null"
    colon, comma = ":", ","
    quote = '<|"|>'
    tags = ("<|tool_call>", "<tool_call|>")
    """Marks that no string may contain, because they would begin or end a call."""

    def any_string(self) -> str:
        return f"{self.lark.mark(self.quote)} {self.lark.text_until(self.quote, without=self.tags)}"

    def string(self, value: str) -> str:
        quote = self.lark.mark(self.quote)
        return f"{quote} {self.lark.text(value)} {quote}" if value else f"{quote} {quote}"

    def key(self, name: str) -> str | None:
        return self.lark.text(name) if re.fullmatch(r"[A-Za-z_][\w.\-]*", name, re.ASCII) else None

    def any_key(self) -> str:
        return self.lark.terminal(r"[A-Za-z_][A-Za-z0-9_]{0,40}")


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float) or (isinstance(value, str) and is_text(value))
