"""SamplingParams: how one row wants its tokens chosen. Known to every room, depends on `structured` alone."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from nvcli.flags import SAMPLING, Flag
from nvcli.structured import Structured

MAX_LOGPROBS = 20
"""Most alternatives a row may ask log-probabilities for; bounds the size of a step's output."""

MAX_BIASED_TOKENS = 1024
"""Most tokens that `logit_bias`, `stop_token_ids`, `allowed_token_ids` and `bad_words` of one row hold together; bounds
the size of a step's input."""

MAX_BAD_WORD_TOKENS = 32
"""Most tokens of one of the `bad_words`."""

MAX_STOP_STRINGS = 1024
"""Most stop strings of one row."""

MAX_STOP_CHARS = 65_536
"""Most characters of all stop strings of one row together; they take about 200 bytes of memory each."""

MAX_ANSWER_NUMBERS = 1 << 24
"""Most token ids and log-probabilities that the answers of one row may hold. One takes about 70 bytes of memory, in the
engine and in the parent."""

MAX_INT = (1 << 63) - 1
"""Whatever carries a number to an engine holds no larger one."""

_GREEDY_BELOW = 1e-5
"""Temperatures under it mean greedy (as in vLLM): logits divided by them would overflow."""


class StopRepetition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """When an answer counts as a loop: its end is one pattern of tokens again and again."""

    max_pattern_size: Annotated[int, Meta(ge=1, le=4096)] = 256
    """Most tokens of the pattern."""
    min_count: Annotated[int, Meta(ge=2, le=MAX_INT)] = 4
    """How often the pattern stands there at least."""
    min_tokens: Annotated[int, Meta(ge=2, le=MAX_INT)] = 256
    """How many tokens the repetitions have together at least."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The `sampling` object of a row, and of the config's defaults."""

    max_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Flag("--max-tokens", SAMPLING, "Maximum tokens of an answer [default: what --max-model-len leaves]"),
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
            "Choose among the likeliest tokens of this probability together; 1: off "
            "[default: the checkpoint's, else 1]",
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
    """-1: off, too."""
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
    seed: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    """With a seed a row's tokens depend on nothing but the row; without, on the run's seed and the row's index."""
    n: Annotated[int, Meta(ge=1, le=1024), Flag("-n", SAMPLING, "Answers to each row.")] = 1
    best_of: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """Answers that are computed, of which the `n` best by log-probability are returned; null: `n`, as they come."""
    rank_by: Literal["mean", "sum"] = "mean"
    """The measure by which `best_of` ranks answers: the mean log-probability of their tokens, or the sum."""
    stop: Annotated[str | list[str], Flag("--stop", SAMPLING, "Text that ends an answer; may be repeated.")] = []
    stop_token_ids: list[Annotated[int, Meta(ge=0)]] = []
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    thinking_budget: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    """Most tokens of an answer's thought, which is then ended; null: as many as it takes."""
    ignore_eos: Annotated[
        bool, Flag("--ignore-eos", SAMPLING, "Answers go on behind end-of-sequence tokens, to --max-tokens.")
    ] = False
    include_stop_str_in_output: bool = False
    """The stop string, or the stop token's text, that ended an answer is part of it."""
    stop_repetition: bool | StopRepetition = False
    """An answer that has become a loop ends with the finish reason `repetition`."""
    presence_penalty: Annotated[
        float,
        Meta(ge=-2, le=2),
        Flag("--presence-penalty", SAMPLING, "Taken from the logits of tokens that the answer has, -2 to 2."),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Meta(ge=-2, le=2),
        Flag("--frequency-penalty", SAMPLING, "The same, times how often the answer has them, -2 to 2."),
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
    """Logits are divided by it and by the temperature, in float32, which neither may make infinite."""
    logit_bias: dict[Annotated[int, Meta(ge=0)] | str, Annotated[float, Meta(ge=-100, le=100)]] = {}
    """Token → what is added to its logit. Tokens are ids, in JSON as a text of digits, or texts that are one token."""
    allowed_token_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)] | None = None
    """The only tokens that may be chosen; null: all."""
    bad_words: list[Annotated[str, Meta(min_length=1)]] = []
    """Texts that no answer holds, as far as they are spelled with the tokens that they have alone or behind a space."""
    logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None,
        Flag(
            "--logprobs", SAMPLING, "Log-probability of each token of an answer, and of the N likeliest in its place."
        ),
    ] = None
    """Log-probability of each chosen token, with `echo` of each token of the prompt too, and of this many alternatives;
    null: none."""
    return_token_ids: bool = False
    structured: Structured | None = None
    """The form that the answer must have; null: any."""
    echo: bool = False
    """The text of the answer begins with the prompt."""
    skip_special_tokens: bool = True
    """Special tokens do not show in the text."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    """Only so many of the prompt's last tokens are kept; -1: as many as leave room for the answer."""
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """Log-probability of each token of the prompt and of this many alternatives; null: none."""

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def num_samples(self) -> int:
        """The number of answers that are computed."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_ranked(self) -> bool:
        """Whether the answers are put in order by their log-probabilities."""
        return self.best_of is not None and self.best_of > 1

    @property
    def loop_rule(self) -> StopRepetition | None:
        """When an answer counts as a loop; None: answers are not looked at."""
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
        """The token ids and log-probabilities that an answer holds for each of its tokens."""
        return self.return_token_ids + (int(self.is_ranked) if self.logprobs is None else 1 + self.logprobs)

    def __post_init__(self) -> None:
        if any(isinstance(key, str) for key in self.logit_bias):
            biases = {int(key) if _is_token_id(key) else key: value for key, value in self.logit_bias.items()}
            msgspec.structs.force_setattr(self, "logit_bias", biases)
        for name in ("max_tokens", "top_k", "min_tokens", "truncate_prompt_tokens"):
            if (getattr(self, name) or 0) > MAX_INT:
                raise ValueError(f"`{name}` is {getattr(self, name)}; allowed: an integer of 64 bits")
        if any(not s for s in self.stop_strings):
            raise ValueError("`stop` must not contain an empty string")
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise ValueError(f"`stop` holds {len(self.stop_strings):,} texts; allowed: at most {MAX_STOP_STRINGS:,}")
        if (num_chars := sum(map(len, self.stop_strings))) > MAX_STOP_CHARS:
            raise ValueError(f"`stop` holds {num_chars:,} characters; allowed: at most {MAX_STOP_CHARS:,} together")
        if self.structured is not None and self.ignore_eos:
            raise ValueError(
                "`ignore_eos` is true beside `structured`, whose answers end with an end-of-sequence token; "
                "leave one of the two out"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"`min_tokens` ({self.min_tokens}) is larger than `max_tokens` ({self.max_tokens})")
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"`best_of` ({self.best_of}) is smaller than `n` ({self.n})")
        if self.truncate_prompt_tokens == 0:
            raise ValueError("`truncate_prompt_tokens` is 0; allowed: an integer of at least 1, or -1")
        num_tokens = len(self.logit_bias) + len(self.stop_token_ids) + len(self.bad_words)
        if num_tokens + len(self.allowed_token_ids or ()) > MAX_BIASED_TOKENS:
            raise ValueError(
                "`logit_bias`, `stop_token_ids`, `allowed_token_ids` and `bad_words` hold more than "
                f"{MAX_BIASED_TOKENS} tokens"
            )


def _is_token_id(key: int | str) -> bool:
    """Tell whether a key is a token id as JSON has it, which is a text, rather than another text."""
    return isinstance(key, str) and key.isascii() and key.isdecimal() and (key == "0" or key[0] != "0")
