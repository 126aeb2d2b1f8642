"""The limits of a model and its configuration for a row: token ids, lengths, and where a prompt is cut.

As much of a long text is tokenized as can matter, and no more. A text of 50 MB is 12 million tokens, which take
gigabytes while they are made, and some tokenizers give up on texts of millions of spaces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from nvcli.core.config_types import OnTooLong, ReasoningParserName, SpecialTokens, ToolParserName
from nvcli.core.sampling_params import MAX_ANSWER_NUMBERS, SamplingParams
from nvcli.core.structured import MAX_END_IDS
from nvcli.core.validation import show
from nvcli.errors import RowError
from nvcli.job.text.tokenizer import Tokenizer


class ModelLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a model and its configuration for a row."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    usual_max_tokens: int | None = None
    """The `max_tokens` of the checkpoint's generation_config.json; None: it has none, or the run ignores it. Where a
    prompt leaves less room, this is no error of its row, which has not asked for it."""
    on_too_long: OnTooLong = "error"
    special_tokens: SpecialTokens = "allow"
    reasoning_parser: ReasoningParserName = "auto"
    tool_parser: ToolParserName = "auto"
    embedding_size: int = 0
    """Length of an embedding."""
    why_no_images: str = "this model reads no images"
    """Why rows with images fail, if they do."""


def end_ids(tokenizer: Tokenizer, limits: ModelLimits) -> list[int]:
    """Return the end-of-sequence ids of the model's files and of its tokenizer, as in vLLM and SGLang: files of models
    that were trained further may name only those of the model before.

    Ids without a logit are left out: they can be neither sampled nor forbidden (`min_tokens`).
    """
    own = tokenizer.eos_token_id
    ids = dict.fromkeys([*limits.eos_token_ids, *(() if own is None else (own,))])
    return [token for token in ids if token < limits.vocab_size][:MAX_END_IDS]


def check_vocabulary(name: str, ids: Sequence[int], limits: ModelLimits) -> None:
    """Raise RowError if one of the ids is not a token of the model. `name` is what holds them."""
    if ids and not (min(ids) >= 0 and max(ids) < limits.vocab_size):
        wrong = next(i for i in ids if not 0 <= i < limits.vocab_size)
        allowed = f"the model's tokens are 0 to {limits.vocab_size - 1}"
        raise RowError("token_out_of_vocabulary", f"{name} holds {show(wrong)}; {allowed}")


def cut(ids: list[int], keep: int, on_too_long: OnTooLong, around: tuple[int, int]) -> list[int]:
    """Return at most `keep` tokens of a prompt, whose beginning or end is cut off, but not the special tokens around
    its text: a model needs the one that begins every text, and embeddings are those of the one that ends it.

    `around`: how many there are before and after the text.
    """
    if len(ids) <= keep:
        return ids
    before, after = around if sum(around) < keep else (0, 0)
    text, most = ids[before : len(ids) - after], keep - before - after
    text = text[-most:] if on_too_long == "truncate-left" else text[:most]
    return [*ids[:before], *text, *ids[len(ids) - after :]]


def fit_prompt(
    ids: list[int], sampling: SamplingParams, limits: ModelLimits, under: str, around: tuple[int, int] = (0, 0)
) -> tuple[list[int], int]:
    """Return the prompt, cut if needed and allowed, and the maximum length of its answer.

    `under` is the key that holds the sampling's keys in the row, `around` as in `cut`. Raises RowError.
    """
    max_len = limits.max_model_len
    asked = None if sampling.max_tokens == limits.usual_max_tokens else sampling.max_tokens
    on_too_long = limits.on_too_long
    if sampling.truncate_prompt_tokens is not None:
        if sampling.truncate_prompt_tokens > 0:
            ids = cut(ids, sampling.truncate_prompt_tokens, "truncate-left", around)
        else:
            on_too_long = "truncate-left"
    room = max_len - len(ids)
    if room < (asked or 1):
        if on_too_long == "error":
            raise _too_long(len(ids), asked, max_len, under)
        answer_len = asked or max(1, max_len // 4)
        keep = max_len - answer_len
        if keep < 1:
            raise _too_long(1, asked, max_len, under)
        ids = cut(ids, keep, on_too_long, around)
        room = answer_len
    max_tokens = min(room, sampling.max_tokens or room)
    if sampling.min_tokens > max_tokens:
        raise RowError(
            "max_tokens_too_large",
            f"`{under}.min_tokens` is {sampling.min_tokens}, and there is room for {max_tokens} tokens of answer; "
            "lower it",
        )
    if sampling.prompt_logprobs is not None and len(ids) * (1 + sampling.prompt_logprobs) > MAX_ANSWER_NUMBERS:
        raise RowError(
            "invalid_sampling",
            f"`{under}.prompt_logprobs` is {sampling.prompt_logprobs}, and a prompt of {len(ids):,} tokens has more "
            f"than {MAX_ANSWER_NUMBERS:,} numbers; lower it",
        )
    num_tokens = max_tokens + (len(ids) if sampling.echo and sampling.logprobs is not None else 0)
    if (num_numbers := sampling.num_samples * num_tokens * sampling.numbers_per_token) > MAX_ANSWER_NUMBERS:
        raise RowError(
            "invalid_sampling",
            f"{sampling.num_samples:,} answers of up to {num_tokens:,} tokens with `{under}.logprobs` or token ids "
            f"hold {num_numbers:,} numbers; allowed: {MAX_ANSWER_NUMBERS:,}; lower `{under}.max_tokens`, `{under}.n` "
            f"or `{under}.logprobs`",
        )
    return ids, max_tokens


def _too_long(num_prompt_tokens: int, asked: int | None, max_len: int, under: str) -> RowError:
    if num_prompt_tokens >= max_len:
        return RowError(
            "prompt_too_long",
            f"the prompt has {num_prompt_tokens} tokens, and `max_model_len` is {max_len} with the answer; "
            "shorten it, or set `job.on_too_long` to cut it",
        )
    tokens = "1 token" if num_prompt_tokens == 1 else f"{num_prompt_tokens} tokens"
    return RowError(
        "max_tokens_too_large",
        f"`{under}.max_tokens` is {asked}, and a prompt of {tokens} leaves room for {max_len - num_prompt_tokens} "
        f"(`max_model_len` is {max_len}); lower it or leave it out",
    )


_CHARS_PER_TOKEN = 16
"""Texts with more characters per token that fits are long. In most languages a token has 1 to 5."""
_GROWTH = 4
_MARGIN = 64
"""Tokens at the end of a cut text that may differ from those of the whole text."""


def is_long(text: str, max_model_len: int) -> bool:
    """Tell whether a text may have many more tokens than fit."""
    return len(text) > _CHARS_PER_TOKEN * max_model_len


def encode_long(
    text: str, encode: Callable[[str], list[int] | RowError], *, max_model_len: int, on_too_long: OnTooLong
) -> list[int] | RowError:
    """Return the tokens of a text, or more than `max_model_len` tokens from the end that is kept.

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
