"""Grammars of constrained answers: which texts are allowed, and which tokens may come next, by llguidance.

llguidance prepares a grammar in about a millisecond and finds the allowed tokens while the answer grows, within
limits on its work, so that every row may bring a schema of its own. (xgrammar computes the tokens of all states of a
grammar before the first answer.) It is a small native library without dependencies, and is imported with the first
constrained row.

Both sides of a run use this module: the parent, to refuse what cannot be a grammar, and the processes that make masks
for the rank that chooses tokens.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from nvcli.core.structured import MAX_GRAMMAR_BYTES, Structured
from nvcli.core.validation import shorten
from nvcli.errors import is_panic

if TYPE_CHECKING:
    from llguidance import LLMatcher

CHECK_STACK_BYTES, FOLLOW_STACK_BYTES = 8 << 20, 32 << 20
"""Stack for building a grammar, which detects excessive nesting, and stack for compiling and following it later. A
grammar that passes on the first should never overflow the second."""

JSON_WHITESPACE = r" ?|\n[ \t]{0,20}"
"""White space between two tokens of JSON: a blank, or a newline and the indent of the next line. Without a bound a
model may write blanks until `max_tokens`."""

_TOKENIZER_FILE = "tokenizer.json"
_MAX_REASON = 300
_ONE_OF = "Enable 'coerce_one_of' option to approximate oneOf with anyOf"
"""An option of llguidance that it offers where the alternatives of a `oneOf` may overlap."""
_SHOWN_SOURCE = re.compile(r"\n\s*\d+ \||<state>")
_SEARCH_SECONDS = 0.5
"""Time limit for locating an error in a schema more closely."""

_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [r"[ \n\r\t]+", r"[a-z]{1,4}", *(f"{_CHARACTER}{{1,{most}}}" for most in (4, 8, 12, 30)), f"{_CHARACTER}+"]
"""Classes of tokens that a mask allows at once if the grammar allows the whole class. Short classes are for
strings that may go on for a few characters only: with llguidance's own, of up to 10 and 30 characters and of any
number, one mask in a hundred takes half as long again. Letters are for patterns such as `[a-z]{14}`."""

_MAX_LEXER_STATES = 50_000
"""A fifth of llguidance's own limit: a state takes 1 to 2 kB, and each process that makes masks has its own."""

SHARED_KEYWORDS = ("$defs", "definitions")
"""Keywords of schemas that their parts refer to."""
_KEYWORDS_OF_MAPS = (*SHARED_KEYWORDS, "properties", "patternProperties", "dependentSchemas")
_KEYWORDS_OF_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_KEYWORDS_OF_ONE = ("items", "additionalProperties", "additionalItems", "contains", "propertyNames")

_FORMATS = (
    *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"),
    *("uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer", "relative-json-pointer"),
    "regex",
)
"""Values of `format` that JSON Schema defines."""
_GBNF = re.compile(r"^[ \t]*[\w-]+\s*::=", re.MULTILINE)
"""The beginning of a rule in GBNF's notation."""

SchemaPath = tuple[str, ...]


class GrammarError(Exception):
    """A text is not a grammar, or no answer can follow it. The message is for the user, on one line."""


class Vocabulary:
    """A model's tokens as grammars see them: the bytes of each, and the ids that end an answer."""

    def __init__(self, tokenizer_json: str, *, vocab_size: int, end_ids: Sequence[int]) -> None:
        """`tokenizer_json` is the text of a tokenizer.json, `vocab_size` the number of the model's logits, and
        `end_ids`, at least one, the model's end-of-sequence ids. Raises GrammarError."""
        from llguidance import LLParserLimits, LLTokenizer

        make = functools.partial(LLTokenizer, tokenizer_json, eos_token=list(end_ids), slices=_SLICES)
        try:
            try:
                self.tokenizer = make(n_vocab=vocab_size)
            except ValueError:  # the tokenizer has more tokens than the model has logits
                self.tokenizer = make()
        except BaseException as error:
            if not isinstance(error, ValueError) and not is_panic(error):
                raise
            raise GrammarError(f"llguidance cannot use the tokenizer: {_reason(str(error))}") from None
        self.text_end_ids = [token for token in end_ids if not self.tokenizer.is_special_token(token)]
        """Ids of `end_ids` that are not special tokens: a matcher allows them as text, too."""
        self._limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)

    @classmethod
    def load(cls, model_path: Path, *, vocab_size: int, end_ids: Sequence[int]) -> Vocabulary:
        """Load the tokens of a checkpoint. Raises GrammarError."""
        file = model_path / _TOKENIZER_FILE
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise GrammarError(
                f"{file}, which constrained answers need, cannot be read: {_reason(str(error))}"
            ) from None
        return cls(text, vocab_size=vocab_size, end_ids=end_ids)

    @property
    def num_words(self) -> int:
        """Number of int32 words of a mask with a bit for each token."""
        return -(-self.tokenizer.vocab_size // 32)

    def matcher(self, grammar: str) -> LLMatcher:
        """Make a matcher that follows one answer by a grammar as returned by `grammar_of`. Raises GrammarError."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self.tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarError(_reason(matcher.get_error()))
        return matcher

    def compile(self, wanted: Structured) -> str:
        """Return the grammar of a row's `structured` object, after checking that an answer can begin.

        Raises GrammarError, which names the place in the schema.
        """
        grammar = grammar_of(wanted)
        if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
            raise GrammarError(f"it takes {len(grammar.encode()):,} bytes; allowed: {MAX_GRAMMAR_BYTES:,}")
        try:
            self._try(grammar)
        except GrammarError as error:
            path = () if wanted.json_schema is None else self._find_fault(wanted.json_schema, str(error))
            raise GrammarError(f"{error} (at {_pointer(path)})" if path else str(error)) from None
        return grammar

    def _try(self, grammar: str) -> None:
        matcher = self.matcher(grammar)
        matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError("no text can match it, or it is too complex")

    def _find_fault(self, schema: dict[str, Any] | bool, reason: str) -> SchemaPath:
        """Return the path of the innermost part of a schema that fails for the same reason as the whole schema."""
        if isinstance(schema, bool):
            return ()
        deadline = time.monotonic() + _SEARCH_SECONDS
        shared = {key: schema[key] for key in SHARED_KEYWORDS if key in schema}

        def fails(part: Any) -> bool:
            if not isinstance(part, dict) or time.monotonic() > deadline:
                return False
            try:
                self._try(grammar_of(Structured(json_schema={**shared, **part})))
            except GrammarError as error:
                return str(error) == reason
            return False

        return _innermost(schema, fails)


def check_structured(wanted: Structured) -> None:
    """Raise GrammarError if a `structured` object is not a valid grammar, whatever the model's tokens."""
    from llguidance import LLMatcher

    problem = LLMatcher.validate_grammar(grammar_of(wanted))
    if problem:
        raise GrammarError(_reason(problem))


def grammar_of(wanted: Structured) -> str:
    """Return a grammar in llguidance's own form, without checking that it can be followed. Raises GrammarError."""
    from llguidance import LLMatcher, grammar_from

    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        texts = " | ".join(msgspec.json.encode(text).decode() for text in dict.fromkeys(wanted.choice))
        return LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {texts}")  # rules, unlike terminals, end at 2,000 texts
    if wanted.grammar is not None:
        if not _GBNF.search(wanted.grammar):  # llguidance itself takes Lark's `?start:` for GBNF
            return LLMatcher.grammar_from_lark(wanted.grammar)
        try:
            return grammar_from("grammar", wanted.grammar)
        except (ValueError, RecursionError) as error:
            raise GrammarError(_reason(str(error))) from None
    schema = {"type": "object"} if wanted.json_object else wanted.json_schema
    if schema is False:
        raise GrammarError("the schema `false` allows nothing")
    if schema is True:  # llguidance wants an object
        schema = {}
    text = msgspec.json.encode(without_other_formats(schema)).decode()
    try:
        return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": JSON_WHITESPACE})
    except ValueError as error:
        raise GrammarError(_reason(str(error))) from None


def without_other_formats(schema: Any) -> Any:
    """Return a schema without values of `format` that JSON Schema does not define: they say nothing of the text, as
    those that Pydantic and OpenAPI write (`binary`, `password`, `int64`). llguidance refuses them."""
    text = msgspec.json.encode(schema)
    if b'"format"' not in text:
        return schema
    rest = [copy := msgspec.json.decode(text)]
    while rest:
        part = rest.pop()
        if isinstance(part, list):
            rest += part
        elif isinstance(part, dict):
            if isinstance(value := part.get("format"), str) and value not in _FORMATS:
                del part["format"]
            rest += (inner for _, inner in _parts(part))
    return copy


def _innermost(schema: dict[str, Any], fails: Callable[[Any], bool]) -> SchemaPath:
    path: SchemaPath = ()
    while True:
        for steps, part in _parts(schema):
            if fails(part):
                path, schema = path + steps, part
                break
        else:
            return path


def _parts(schema: dict[str, Any]) -> Iterator[tuple[SchemaPath, Any]]:
    """Yield the schemas directly inside a schema, each with its path from there."""
    for keyword in _KEYWORDS_OF_MAPS:
        inner = schema.get(keyword)
        if isinstance(inner, dict):
            yield from (((keyword, name), part) for name, part in inner.items())
    for keyword in _KEYWORDS_OF_LISTS:
        inner = schema.get(keyword)
        if isinstance(inner, list):
            yield from (((keyword, str(number)), part) for number, part in enumerate(inner))
    for keyword in _KEYWORDS_OF_ONE:
        if keyword in schema:
            yield (keyword,), schema[keyword]


def _pointer(path: SchemaPath) -> str:
    """Write a path as a JSON pointer (RFC 6901) in a URL's fragment, as `$ref` does."""
    return "#" + "".join("/" + step.replace("~", "~0").replace("/", "~1") for step in path)


def _reason(text: str) -> str:
    """Return llguidance's message on one line, without the lines of the grammar that it shows."""
    text = text.replace(_ONE_OF, "Where an answer may fit several alternatives, write anyOf")
    return shorten(" ".join(_SHOWN_SOURCE.split(text, maxsplit=1)[0].split()), _MAX_REASON)
