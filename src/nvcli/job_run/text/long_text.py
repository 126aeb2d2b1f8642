"""Tokenizes as much of a long text as can matter, and no more.

A text of 50 MB is 12 million tokens, which take gigabytes while they are made, and some tokenizers give up on texts of
millions of spaces. A model takes some thousands of these tokens: the first or the last ones where the prompt is to be
cut, and none where it is to be refused.
"""

from __future__ import annotations

from collections.abc import Callable

from nvcli.config_types import OnTooLong
from nvcli.errors import RowError

_CHARS_PER_TOKEN = 16
"""Texts with more characters than so many for each token that fits are long. In most languages a token has 1 to 5."""
_GROWTH = 4
_MARGIN = 64
"""The tokens at the place where a text is cut may be others than in the whole text: so many are not relied on."""


def is_long(text: str, max_model_len: int) -> bool:
    """Tell whether a text may have far more tokens than fit."""
    return len(text) > _CHARS_PER_TOKEN * max_model_len


def encode_long(
    text: str, encode: Callable[[str], list[int] | RowError], *, max_model_len: int, on_too_long: OnTooLong
) -> list[int] | RowError:
    """Return the tokens of a text, or of that end of it which is kept, which are then more than `max_model_len`.

    With `on_too_long` "error", a text that is too long becomes its error.
    """
    num_chars = _CHARS_PER_TOKEN * max_model_len
    while num_chars < len(text):
        ids = encode(text[-num_chars:] if on_too_long == "truncate-left" else text[:num_chars])
        if isinstance(ids, RowError):
            return ids
        if len(ids) > max_model_len + _MARGIN:
            if on_too_long != "error":
                return ids
            return RowError(
                "prompt_too_long",
                f"the prompt has {len(text):,} characters, and the first {num_chars:,} of them are more tokens than "
                f"`max_model_len` ({max_model_len}); shorten it, or set `job.on_too_long` to cut it",
            )
        num_chars *= _GROWTH
    return encode(text)
