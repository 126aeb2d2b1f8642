"""Handles special tokens that are spelled out in the text of a row, as `job.special_tokens` says.

Special tokens structure a prompt: `<|im_end|>` ends a message. Spelled out in the text of a row, such a token would be
taken for the template's own. What counts is the tokenizer's list: its special tokens, and those of its other added
tokens (such as `<tool_call>`) that the chat template writes.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

from nvcli.core.config_types import SpecialTokens
from nvcli.errors import ConfigError, RowError
from nvcli.job.text.tokenizer import Tokenizer

T = TypeVar("T", list[dict[str, Any]], dict[str, Any])


class SpecialTokenRule:
    """The rules `allow` and `refuse`: special tokens in texts become tokens, as in transformers, or errors."""

    def __init__(self, tokenizer: Tokenizer, refused: Sequence[str] = (), refusal: str = "") -> None:
        """`refused` are tokens that texts must not spell out; `refusal` is the end of the message about one."""
        self._tokenizer = tokenizer
        self._refused = _any_of(refused)
        self._refusal = refusal

    def check(self, value: Any, name: str) -> RowError | None:
        """Return an error if a prompt or conversation is not allowed. `name` is its key in the row."""
        found = _find(self._refused, value, name) if self._refusal else None
        return found and RowError("special_token", f"`{found[0]}` holds {found[1]}, {self._refusal}")

    def to_template(self, value: T) -> T:
        """Return messages or variables of the chat template as they should be rendered."""
        return value

    def encode(self, texts: Sequence[str], *, is_rendered: bool) -> list[list[int] | RowError]:
        """Return the token ids of prompts or rendered conversations, or their errors."""
        # A chat template writes the special tokens itself.
        return self._tokenizer.encode(texts, add_special_tokens=not is_rendered)


class _Escape(SpecialTokenRule):
    """The rule `escape`: special tokens in texts stay text, and only those of the chat template become tokens.

    Rows are tokenized by a copy of the tokenizer that knows special tokens by secret names only. In a conversation
    they are put between two marks (secret digits, which templates leave alone), so that a template still sees them: it
    may look for `</think>` in an answer. What is spelled out in the rendered text without marks is the template's, and
    gets the secret name; then the marks are taken out.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ConfigError for a tokenizer that does not support this."""
        super().__init__(tokenizer)
        backend = tokenizer.backend
        if backend is None:
            raise _cannot_escape("it has no tokenizer.json")
        self._tokens = tokenizer.control_tokens
        self._numbers = {token: number for number, token in enumerate(self._tokens)}
        self._pattern = _any_of(self._tokens)
        self._open, self._close = (str(secrets.randbelow(9 * 10**23) + 10**23) for _ in range(2))
        tokens = self._pattern.pattern
        self._rendered = re.compile(f"{self._open}({tokens}){self._close}|({tokens})|{self._open}|{self._close}")
        # A character that no text has, others for private use that no attacker can guess, and the token's number.
        secret = "\ufdd0" + "".join(chr(0xE000 + secrets.randbelow(6400)) for _ in range(8))
        self._names = [
            secret + chr(0xE000 + number // 6400) + chr(0xE000 + number % 6400) for number in range(len(self._tokens))
        ]
        description = json.loads(backend.to_str())
        for token in description["added_tokens"]:
            if (number := self._numbers.get(token["content"])) is not None:
                token |= {"content": self._names[number], "normalized": False}
        renamed = type(backend).from_str(json.dumps(description))
        self._plain = Tokenizer(SimpleNamespace(backend_tokenizer=renamed))
        self._ids: dict[int, int] = {}
        """Ids of the copy that differ → the tokenizer's own ids."""
        for token_id, token in backend.get_added_tokens_decoder().items():
            number = self._numbers.get(token.content)
            there = renamed.token_to_id(token.content if number is None else self._names[number])
            if there != token_id:
                self._ids[there] = token_id
        found = _frame_of(tokenizer)
        if found is None:
            raise _cannot_escape("it does not only put tokens before and after a text")
        self._before, self._behind = found
        self._refused = _any_of([token for token in self._tokens if self._is_stubborn(backend, token)])
        self._refusal = "which this tokenizer cannot read as plain text"

    def _is_stubborn(self, backend: Any, token: str) -> bool:
        (ids,) = self._plain.encode([token], add_special_tokens=False)
        return isinstance(ids, RowError) or backend.token_to_id(token) in ids

    def to_template(self, value: T) -> T:
        replacement = rf"{self._open}\g<0>{self._close}"
        marked: T = _map_texts(lambda text: self._pattern.sub(replacement, text), value)
        return marked

    def encode(self, texts: Sequence[str], *, is_rendered: bool) -> list[list[int] | RowError]:
        if is_rendered:
            texts = [self._with_names(text) for text in texts]
        encoded = self._plain.encode(texts, add_special_tokens=False)
        return [ids if isinstance(ids, RowError) else self._translated(ids, is_rendered) for ids in encoded]

    def _with_names(self, text: str) -> str:
        def name(match: re.Match[str]) -> str:
            marked, token = match.groups()
            return self._names[self._numbers[token]] if token is not None else marked or ""

        return self._rendered.sub(name, text)

    def _translated(self, ids: list[int], is_rendered: bool) -> list[int]:
        if self._ids:
            ids = [self._ids.get(token_id, token_id) for token_id in ids]
        return ids if is_rendered else [*self._before, *ids, *self._behind]


def special_token_rule(choice: SpecialTokens, tokenizer: Tokenizer) -> SpecialTokenRule:
    """Return the rule of `job.special_tokens` for a tokenizer. Raises ConfigError if the tokenizer cannot follow it."""
    if choice == "escape":
        return _Escape(tokenizer)
    if choice == "allow":
        return SpecialTokenRule(tokenizer)
    return SpecialTokenRule(
        tokenizer,
        tokenizer.control_tokens,
        "a special token of the model; take it out, or let `job.special_tokens` be `escape` (it is text then) or "
        "`allow`",
    )


def start_of(tokenizer: Tokenizer) -> str:
    """Return the tokens that a tokenizer puts before a text, spelled out, such as `<s>`; empty if there are none."""
    before, _ = _frame_of(tokenizer) or ((), ())
    return "".join(map(tokenizer.token_text, before))


def _frame_of(tokenizer: Tokenizer) -> tuple[Sequence[int], Sequence[int]] | None:
    """Return the tokens that a tokenizer puts before and after a text; None if it does something else."""
    framed, bare = (tokenizer.encode(["a"], add_special_tokens=adds)[0] for adds in (True, False))
    return frame(framed, bare) if isinstance(framed, list) and isinstance(bare, list) else None


def frame(framed: Sequence[int], bare: Sequence[int]) -> tuple[Sequence[int], Sequence[int]] | None:
    """Return the tokens before and after `bare` in `framed`; None if it does not contain `bare`."""
    starts = range(len(framed) - len(bare) + 1)
    start = next((at for at in starts if bare and framed[at : at + len(bare)] == bare), None)
    return None if start is None else (framed[:start], framed[start + len(bare) :])


def _cannot_escape(reason: str) -> ConfigError:
    return ConfigError(f"`job.special_tokens` is escape, and the model's tokenizer cannot: {reason}; use refuse")


def _any_of(tokens: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern for any of these texts, the longest first, in the order of tokenizers."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")


def _find(pattern: re.Pattern[str], value: Any, name: str) -> tuple[str, str] | None:
    """Return the first match of a pattern in the texts and keys of decoded JSON, with its place."""
    if isinstance(value, str):
        found = pattern.search(value)
        return (name, found[0]) if found else None
    items: list[tuple[Any, str]] = []
    if isinstance(value, dict):
        items = [(key, name) for key in value] + [(inner, f"{name}.{key}") for key, inner in value.items()]
    elif isinstance(value, list):
        items = [(inner, f"{name}[{number}]") for number, inner in enumerate(value)]
    return next((place for inner, where in items if (place := _find(pattern, inner, where)) is not None), None)


def _map_texts(change: Callable[[str], str], value: Any) -> Any:
    """Return decoded JSON with all its texts and keys changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _map_texts(change, inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_map_texts(change, inner) for inner in value]
    return value
