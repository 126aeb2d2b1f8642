"""Converts tokens given as text in a row's `sampling` to ids: biases and bad words.

A text of `logit_bias` is one token. A bad word is a sequence of tokens: those of the word alone, and those of the word
after a space, which are others in most vocabularies. A word that the model spells with yet other tokens is not found,
as in vLLM and transformers.
"""

from __future__ import annotations

import msgspec

from nvcli.core.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BIASED_TOKENS, SamplingParams
from nvcli.core.validation import show
from nvcli.errors import RowError
from nvcli.job.text.tokenizer import Tokenizer

_SHOWN_CHARS = 40


class TokenRules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules about tokens, by id."""

    biases: dict[int, float] = {}
    """Token id → value added to its logit."""
    forbidden_ids: list[int] = []
    """Tokens that are never chosen."""
    bad_words: list[list[int]] = []
    """Sequences of at least two tokens that the answer may not contain."""


def token_rules(sampling: SamplingParams, tokenizer: Tokenizer, *, under: str) -> TokenRules | None:
    """Return the rules of a row's sampling; None: it has none. `under` is the key of the sampling in the row.

    Raises RowError for a text that is no token, and for more tokens than a row may name.
    """
    if not sampling.logit_bias and not sampling.bad_words:
        return None
    biases = {_token_id(key, tokenizer, f"{under}.logit_bias"): value for key, value in sampling.logit_bias.items()}
    words = [ids for word in sampling.bad_words for ids in _spellings(word, tokenizer, f"{under}.bad_words")]
    forbidden = sorted({word[0] for word in words if len(word) == 1})
    # A longer word that holds a forbidden token cannot come up.
    longer = [word for word in words if len(word) > 1 and set(forbidden).isdisjoint(word)]
    num_tokens = len(biases) + len(forbidden) + sum(map(len, longer)) + len(sampling.stop_token_ids)
    if num_tokens + len(sampling.allowed_token_ids or ()) > MAX_BIASED_TOKENS:
        raise RowError(
            "invalid_sampling",
            f"`{under}.bad_words` are {sum(map(len, words)):,} tokens, and with those of `logit_bias`, "
            f"`stop_token_ids` and `allowed_token_ids` {MAX_BIASED_TOKENS:,} are allowed; give fewer words",
        )
    return TokenRules(biases=biases, forbidden_ids=forbidden, bad_words=longer)


def _token_id(key: int | str, tokenizer: Tokenizer, name: str) -> int:
    if isinstance(key, int):
        return key
    ids = _encode(key, tokenizer, name)
    if len(ids) != 1:
        raise RowError(
            "invalid_sampling",
            f"`{name}` holds {show(key, _SHOWN_CHARS)}, which is {len(ids)} tokens of this model; give a text that is "
            "one (often with the space before a word), or the ids of tokens",
        )
    return ids[0]


def _spellings(word: str | list[int], tokenizer: Tokenizer, name: str) -> list[list[int]]:
    """Return the tokens of a word alone and after a space, or those that it is given in."""
    if isinstance(word, list):
        return [word]
    bare = word.strip()
    spelled = [_encode(text, tokenizer, name) for text in ((bare, f" {bare}") if bare else (word,))]
    for ids in spelled:
        if len(ids) > MAX_BAD_WORD_TOKENS:
            raise RowError(
                "invalid_sampling",
                f"`{name}` holds {show(word, _SHOWN_CHARS)}, which is {len(ids)} tokens of this model; allowed: at "
                f"most {MAX_BAD_WORD_TOKENS}",
            )
    return [ids for number, ids in enumerate(spelled) if ids and ids not in spelled[:number]]


def _encode(text: str, tokenizer: Tokenizer, name: str) -> list[int]:
    (ids,) = tokenizer.encode([text], add_special_tokens=False)
    if isinstance(ids, RowError):
        raise RowError("invalid_sampling", f"`{name}` holds {show(text, _SHOWN_CHARS)}: {ids.message}")
    return ids
