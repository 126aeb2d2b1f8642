"""Tasks that a row may ask for beside a generated answer, and their answers: scores of given texts, or a vector."""

from __future__ import annotations

from typing import Literal

import msgspec

from nvcli.core.task_config import EmbeddingEncoding, Normalization


class ScoreTask(msgspec.Struct, frozen=True, kw_only=True):
    """A row that asks how likely texts are."""

    continuations: tuple[str, ...] | None = None
    """The texts that may follow the prompt; None: the prompt itself is scored."""
    key: str = ""
    """The key of the row that holds them."""
    answer: int | None = None
    """The number of the right one; None: the row does not say."""
    normalize: Normalization = "none"
    """The divisor of log-probabilities before they are compared."""
    token_logprobs: bool = False
    """Whether the log-probability of each token is wanted."""


class EmbedTask(msgspec.Struct, frozen=True, kw_only=True):
    """A row that asks for the vector of its prompt."""

    position: Literal["last", "first", "all"] = "last"
    """The token whose hidden state becomes the vector, or all, for their mean."""
    normalize: bool = True
    """Whether the vector is brought to length 1."""

    dimensions: int | None = None
    """The number of leading values that are kept; None: all."""
    encoding: EmbeddingEncoding = "float"


PromptTask = ScoreTask | EmbedTask


class ScoredChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One text that was scored."""

    index: int
    text: str | msgspec.UnsetType = msgspec.UNSET
    """The text of a continuation. A prompt that is scored itself is not repeated."""
    logprob: float
    """The log-probability of the whole text: the sum over its tokens, natural logarithm."""
    num_tokens: int
    num_bytes: int | None
    """The bytes of the text as UTF-8; None for a prompt of token ids."""
    score: float | None
    """The log-probability as it is compared with those of other choices; None where it cannot be normalised."""
    perplexity: float
    """exp(-logprob / num_tokens)"""
    is_greedy: bool
    """Whether each token is the likeliest one at its place."""
    tokens: list[str] | msgspec.UnsetType = msgspec.UNSET
    token_logprobs: list[float] | msgspec.UnsetType = msgspec.UNSET


class ScoreAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The scores of a row."""

    choices: list[ScoredChoice]
    best: int
    """The number of the choice with the highest score; of equal ones the first."""
    correct: bool | None = None
    """Whether that is the right one; None: the row does not say which is."""

    @property
    def num_bytes(self) -> int:
        """Roughly what it takes in memory."""
        return sum(500 + 100 * len(choice.tokens or ()) for choice in self.choices)


class EmbedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The vector of a row: float32 numbers, or base64 of them."""

    embedding: list[float] | str

    @property
    def num_bytes(self) -> int:
        """Roughly what it takes in memory."""
        return 500 + (32 if isinstance(self.embedding, list) else 1) * len(self.embedding)


class EmbedAnswers(msgspec.Struct, frozen=True):
    """The vectors of a row with several prompts, in their order."""

    vectors: list[EmbedAnswer]

    @property
    def num_bytes(self) -> int:
        """Roughly what they take in memory."""
        return sum(vector.num_bytes for vector in self.vectors)
