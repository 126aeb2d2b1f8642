"""SamplingParams: how the tokens of one row are chosen. Used everywhere, depends only on `structured`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from nvcli.core.config_types import MAX_INT64
from nvcli.core.flags import SAMPLING, Flag
from nvcli.core.structured import Structured

MAX_LOGPROBS = 20
"""Maximum alternatives per token with log-probabilities; bounds the size of a step's output."""

MAX_BIASED_TOKENS = 1024
"""Maximum tokens in a row's `logit_bias`, `stop_token_ids`, `allowed_token_ids` and `bad_words` together; bounds
the size of a step's input."""

MAX_BAD_WORD_TOKENS = 32
"""Maximum tokens in one of the `bad_words`."""

MAX_STOP_STRINGS = 1024
"""Maximum stop strings per row."""

MAX_STOP_CHARS = 65_536
"""Maximum characters of a row's stop strings together; each character takes about 200 bytes of memory."""

MAX_ANSWER_NUMBERS = 1 << 24
"""Maximum token ids and log-probabilities in the answers of one row. Each takes about 70 bytes of memory, in the
engine and in the parent."""

_GREEDY_BELOW = 1e-5
"""Temperatures below this mean greedy (as in vLLM): logits divided by them would overflow."""


class StopRepetition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rule for an answer that loops: it ends with one pattern of tokens over and over."""

    max_pattern_size: Annotated[int, Meta(ge=1, le=4096)] = 256
    """Maximum tokens of the pattern."""
    min_count: Annotated[int, Meta(ge=2, le=MAX_INT64)] = 4
    """Minimum number of repetitions."""
    min_tokens: Annotated[int, Meta(ge=2, le=MAX_INT64)] = 256
    """Minimum tokens of all repetitions together."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The `sampling` object of a row, and of the configuration's defaults."""

    max_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Flag(
            "--max-tokens",
            SAMPLING,
            "Maximum tokens of an answer [default: the checkpoint's, else what --max-model-len leaves]",
        ),
    ] = None
    temperature: Annotated[
        float,
        Meta(ge=0, le=100),
        Flag("--temperature", SAMPLING, "0: always the likeliest token [default: the checkpoint's, else 1]", "T"),
    ] = 1.0
    top_p: Annotated[
        float,
        Meta(gt=0, le=1),
        Flag(
            "--top-p",
            SAMPLING,
            "Choose among the likeliest tokens with this total probability; 1: off [default: the checkpoint's, else 1]",
            "P",
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        Meta(ge=-1),
        Flag(
            "--top-k", SAMPLING, "Choose among the K likeliest tokens; 0: off [default: the checkpoint's, else 0]", "K"
        ),
    ] = 0
    """-1 also means off."""
    min_p: Annotated[
        float,
        Meta(ge=0, le=1),
        Flag(
            "--min-p",
            SAMPLING,
            "Leave out tokens below this share of the likeliest one's probability; 0: off "
            "[default: the checkpoint's, else 0]",
            "P",
        ),
    ] = 0.0
    seed: Annotated[int, Meta(ge=-MAX_INT64 - 1, le=MAX_INT64)] | None = None
    """A row's own seed: its tokens then depend only on the row; null or -1: on the run's seed and the row's index."""
    n: Annotated[int, Meta(ge=1, le=1024), Flag("-n", SAMPLING, "Answers per row.")] = 1
    best_of: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """Number of answers to compute, of which the `n` best by log-probability are returned; null: `n`, unranked."""
    rank_by: Literal["mean", "sum"] = "mean"
    """Measure by which `best_of` ranks answers: the mean or the sum of their tokens' log-probabilities."""
    stop: Annotated[str | list[str], Flag("--stop", SAMPLING, "Text that ends an answer; may be repeated.")] = []
    stop_token_ids: list[Annotated[int, Meta(ge=0)]] = []
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    thinking_budget: Annotated[int, Meta(ge=0, le=MAX_INT64)] | None = None
    """Maximum tokens of reasoning, which is then closed; null: no limit."""
    ignore_eos: Annotated[
        bool, Flag("--ignore-eos", SAMPLING, "Continue past end-of-sequence tokens, up to --max-tokens.")
    ] = False
    include_stop_str_in_output: bool = False
    """Whether an answer includes the stop string, or the stop token's text, that ended it."""
    stop_repetition: bool | StopRepetition = False
    """Whether an answer that loops ends, with the finish reason `repetition`."""
    presence_penalty: Annotated[
        float,
        Meta(ge=-2, le=2),
        Flag("--presence-penalty", SAMPLING, "Subtracted from the logits of tokens already in the answer, -2 to 2."),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Meta(ge=-2, le=2),
        Flag(
            "--frequency-penalty",
            SAMPLING,
            "Subtracted from a token's logit for each time it is in the answer, -2 to 2.",
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Meta(ge=0.01, le=100),
        Flag(
            "--repetition-penalty",
            SAMPLING,
            "Above 1: tokens of the prompt and the answer become less likely; 1: off "
            "[default: the checkpoint's, else 1]",
        ),
    ] = 1.0
    """Logits are divided by it and by the temperature in float32; neither may make them infinite."""
    logit_bias: dict[Annotated[int, Meta(ge=0)] | str, Annotated[float, Meta(ge=-100, le=100)]] = {}
    """Token → number added to its logit. Tokens are ids, in JSON as a string of digits, or texts of a single token."""
    allowed_token_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)] | None = None
    """The only tokens that may be chosen; null: all."""
    bad_words: list[
        Annotated[str, Meta(min_length=1)]
        | Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1, max_length=MAX_BAD_WORD_TOKENS)]
    ] = []
    """Texts kept out of answers, in the tokens that they have by themselves or after a space, or lists of tokens."""
    logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None,
        Flag(
            "--logprobs",
            SAMPLING,
            "Log-probability of each token of an answer, and of the N likeliest at its position.",
        ),
    ] = None
    """Log-probability of each chosen token, with `echo` of each token of the prompt too, and of this many alternatives;
    null: none."""
    return_token_ids: bool = False
    structured: Structured | None = None
    """The form that the answer must have; null: any."""
    echo: bool = False
    """Whether the text of the answer begins with the prompt."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    """Number of tokens kept from the prompt's end; -1: as many as leave room for the answer."""
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """Log-probability of each token of the prompt and of this many alternatives; null: none."""

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def num_samples(self) -> int:
        """Number of answers to compute."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_ranked(self) -> bool:
        """Whether the answers are ranked by their log-probabilities."""
        return self.best_of is not None and self.best_of > 1

    @property
    def loop_rule(self) -> StopRepetition | None:
        """Rule for answers that loop; None: answers are not checked."""
        if isinstance(self.stop_repetition, bool):
            return StopRepetition() if self.stop_repetition else None
        return self.stop_repetition

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def numbers_per_token(self) -> int:
        """Number of token ids and log-probabilities that an answer holds per token."""
        return self.return_token_ids + (int(self.is_ranked) if self.logprobs is None else 1 + self.logprobs)

    def __post_init__(self) -> None:
        if any(isinstance(key, str) for key in self.logit_bias):
            biases = {int(key) if _is_token_id(key) else key: value for key, value in self.logit_bias.items()}
            msgspec.structs.force_setattr(self, "logit_bias", biases)
        if self.seed == -1:  # no seed in vLLM and llama.cpp, whose clients may send it with every row
            msgspec.structs.force_setattr(self, "seed", None)
        for name in ("max_tokens", "top_k", "min_tokens", "truncate_prompt_tokens"):
            if (getattr(self, name) or 0) > MAX_INT64:
                raise ValueError(f"`{name}` is {getattr(self, name)}; allowed: an integer of 64 bits")
        if any(not s for s in self.stop_strings):
            raise ValueError("`stop` holds an empty text, which would end every answer at once; leave it out")
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise ValueError(f"`stop` holds {len(self.stop_strings):,} texts; allowed: at most {MAX_STOP_STRINGS:,}")
        if (num_chars := sum(map(len, self.stop_strings))) > MAX_STOP_CHARS:
            raise ValueError(f"`stop` holds {num_chars:,} characters; allowed: at most {MAX_STOP_CHARS:,} together")
        if self.structured is not None and self.ignore_eos:
            raise ValueError(
                "`ignore_eos` is true with `structured`, whose answers end with an end-of-sequence token; "
                "leave one of the two out"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"`min_tokens` ({self.min_tokens}) is larger than `max_tokens` ({self.max_tokens}); lower it, or set a "
                "larger `max_tokens`"
            )
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"`best_of` ({self.best_of}) is smaller than `n` ({self.n})")
        if self.truncate_prompt_tokens == 0:
            raise ValueError("`truncate_prompt_tokens` is 0; allowed: an integer of at least 1, or -1")
        num_tokens = len(self.logit_bias) + len(self.stop_token_ids)
        num_tokens += sum(1 if isinstance(word, str) else len(word) for word in self.bad_words)
        if num_tokens + len(self.allowed_token_ids or ()) > MAX_BIASED_TOKENS:
            raise ValueError(
                "`logit_bias`, `stop_token_ids`, `allowed_token_ids` and `bad_words` hold more than "
                f"{MAX_BIASED_TOKENS} tokens"
            )


def lay_over(defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `sampling` of somebody who gives `own` keys, where `defaults` hold otherwise.

    A default's `min_tokens` gives way to a smaller `max_tokens` of one's own. Neither needs to be valid.
    """
    least, most = defaults.get("min_tokens"), own.get("max_tokens")
    if "min_tokens" not in own and isinstance(least, int) and isinstance(most, int) and most < least:
        return {**defaults, "min_tokens": max(0, most), **own}
    return {**defaults, **own}


def _is_token_id(key: int | str) -> bool:
    """Tell whether a key is a token id, a string of digits in JSON, rather than any other text."""
    return isinstance(key, str) and key.isascii() and key.isdecimal() and (key == "0" or key[0] != "0")
