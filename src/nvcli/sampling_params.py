"""SamplingParams: how one row wants its tokens chosen. Known to every room, depends on none."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_LOGPROBS = 20
"""Most alternatives a row may ask log-probabilities for; bounds the size of a step's output."""

MAX_BIASED_TOKENS = 1024
"""Most `logit_bias` entries plus stop token ids of one row; bounds the size of a step's input."""

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


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The `sampling` object of a row, and of the config's defaults."""

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Most tokens to generate; null: what `max_model_len` leaves."""
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    """0 or -1: off."""
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    """With a seed a row's tokens depend on nothing but the row; without, on the run's seed and the row's index."""
    n: Annotated[int, Meta(ge=1, le=1024)] = 1
    stop: str | list[str] = []
    stop_token_ids: list[Annotated[int, Meta(ge=0)]] = []
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    ignore_eos: bool = False
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0
    logit_bias: dict[Annotated[int, Meta(ge=0)], Annotated[float, Meta(ge=-100, le=100)]] = {}
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """Log-probability of each chosen token and of this many alternatives; null: none."""
    return_token_ids: bool = False
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """Log-probability of each token of the prompt and of this many alternatives; null: none."""

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def numbers_per_token(self) -> int:
        """The token ids and log-probabilities that an answer holds for each of its tokens."""
        return self.return_token_ids + (0 if self.logprobs is None else 1 + self.logprobs)

    def __post_init__(self) -> None:
        for name in ("max_tokens", "top_k", "min_tokens"):
            if (getattr(self, name) or 0) > MAX_INT:
                raise ValueError(f"`{name}` is {getattr(self, name)}; allowed: an integer of 64 bits")
        if any(not s for s in self.stop_strings):
            raise ValueError("`stop` must not contain an empty string")
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise ValueError(f"`stop` holds {len(self.stop_strings):,} texts; allowed: at most {MAX_STOP_STRINGS:,}")
        if (num_chars := sum(map(len, self.stop_strings))) > MAX_STOP_CHARS:
            raise ValueError(f"`stop` holds {num_chars:,} characters; allowed: at most {MAX_STOP_CHARS:,} together")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"`min_tokens` ({self.min_tokens}) is larger than `max_tokens` ({self.max_tokens})")
        if len(self.logit_bias) + len(self.stop_token_ids) > MAX_BIASED_TOKENS:
            raise ValueError(f"`logit_bias` and `stop_token_ids` hold more than {MAX_BIASED_TOKENS} tokens")
