"""Structured: what the text of an answer must look like. Known to every room, depends on none.

A user asks for it (`Structured`); the parent makes a grammar of it; and a request carries that grammar to the ranks
(`Constraint`), which allow no token that leads away from it.
"""

from __future__ import annotations

from typing import Any

import msgspec

MAX_GRAMMAR_BYTES = 512 * 1024
"""Most bytes of a schema, regex, list of choices or grammar, once it is written as a grammar of llguidance."""

MAX_MARK_IDS = 64
"""Most tokens of a mark around the free part of an answer; bounds the size of a step's input."""

MAX_END_IDS = 64
"""Most end-of-sequence ids of a constraint; bounds the size of a step's input."""

_FORMS = ("json_schema", "json_object", "regex", "choice", "grammar")


class Structured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The `structured` object of a row's sampling. Exactly one of its keys is given."""

    json_schema: dict[str, Any] | bool | None = None
    """The answer is JSON that this schema allows."""
    json_object: bool = False
    """The answer is any JSON object."""
    regex: str | None = None
    """The whole answer matches this regular expression (syntax of Rust's `regex`, without look-around)."""
    choice: list[str] | None = None
    """The answer is one of these texts."""
    grammar: str | None = None
    """The answer follows this context-free grammar, in Lark's or GBNF's notation."""

    @property
    def form(self) -> str:
        """The name of the one key that is given."""
        return self._given()[0]

    def _given(self) -> list[str]:
        return [
            name for name in _FORMS if (self.json_object if name == "json_object" else getattr(self, name) is not None)
        ]

    def __post_init__(self) -> None:
        given = self._given()
        if len(given) != 1:
            which = " and ".join(f"`{name}`" for name in given) if given else "none of its keys"
            raise ValueError(f"`structured` holds {which}; give one of {', '.join(f'`{name}`' for name in _FORMS)}")
        if self.choice is not None and not self.choice:
            raise ValueError("`structured.choice` is an empty list; give at least one text")


class Constraint(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A grammar that an answer is held to, as the engine gets it with a request."""

    grammar: str
    """The grammar, in llguidance's own form; at most `MAX_GRAMMAR_BYTES`."""
    end_ids: list[int]
    """The model's end-of-sequence ids: one of them ends an answer that is complete. From 1 to `MAX_END_IDS`."""
    starts_after: list[int] = []
    """The tokens of the mark behind which the constraint begins, such as the end of the model's reasoning: tokens up to
    it are free. At most `MAX_MARK_IDS`; empty: the constraint begins with the answer."""
    opens_with: list[int] = []
    """The tokens of the mark that begins the free part, where that is for the answer to do: an answer that begins with
    another token is constrained from there on. At most `MAX_MARK_IDS`; empty: the answer begins inside the free
    part."""
    must_begin: bool = False
    """Whether no end-of-sequence token may end the answer in its free part."""

    @property
    def key(self) -> bytes:
        """The same for equal constraints."""
        return msgspec.msgpack.encode(self)
