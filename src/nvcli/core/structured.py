"""Structured: the form that an answer's text must have. Used everywhere, depends on no other module.

A user asks for it (`Structured`); the parent turns it into a grammar; a request carries the grammar to the ranks
(`Constraint`), which allow no token that breaks it.
"""

from __future__ import annotations

from typing import Any

import msgspec

MAX_GRAMMAR_BYTES = 512 * 1024
"""Maximum bytes of a schema, regex, list of choices or grammar, in the form of an llguidance grammar."""

MAX_MARK_IDS = 64
"""Maximum tokens of a mark around an answer's unconstrained part; bounds the size of a step's input."""

MAX_END_IDS = 64
"""Maximum end-of-sequence ids of a constraint; bounds the size of a step's input."""

MAX_FORCED_TOKENS = 15
"""Maximum forced tokens that are reported at a time; bounds the size of a step's output."""

_FORMS = ("json_schema", "json_object", "regex", "choice", "grammar")


class Structured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The `structured` object of a row's sampling. Exactly one of its keys is set."""

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
        """The name of the key that is set."""
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
    """A grammar that constrains an answer, as sent to the engine with a request."""

    grammar: str
    """The grammar, in llguidance's own form; at most `MAX_GRAMMAR_BYTES`."""
    end_ids: list[int]
    """The model's end-of-sequence ids, one of which ends a complete answer. From 1 to `MAX_END_IDS`."""
    starts_after: list[int] = []
    """Tokens of the mark after which the constraint begins, such as the end of the model's reasoning: tokens up to it
    are unconstrained. At most `MAX_MARK_IDS`; empty: the constraint begins with the answer."""
    opens_with: list[int] = []
    """Tokens of the mark that opens the unconstrained part, if the answer itself must open it: an answer that begins
    with another token is constrained from there on. At most `MAX_MARK_IDS`; empty: the answer begins inside the
    unconstrained part."""
    must_begin: bool = False
    """Whether the answer may not end in its unconstrained part."""

    @property
    def key(self) -> bytes:
        """A key that equal constraints have in common."""
        return msgspec.msgpack.encode(self)
