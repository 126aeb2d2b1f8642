"""What a run computes of its rows: answers, log-probabilities of given texts, or embeddings; and the settings of each.

The task is set by the command (`nvcli score`, `nvcli embed`); a Python program may set it too.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Task = Literal["generate", "score", "embed"]
Normalization = Literal["none", "tokens", "bytes"]
PoolingName = Literal["last", "mean", "cls"]
EmbeddingEncoding = Literal["float", "base64"]
_Key = Annotated[str, Meta(min_length=1)]


class ScoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `score:` section: what `nvcli score` reads and writes."""

    normalize: Normalization = "none"
    """What the log-probability of a choice is divided by before choices are compared: nothing, the number of its
    tokens, or the number of its bytes."""
    token_logprobs: bool = False
    """Add the tokens of each choice and their log-probabilities to the output."""
    continuation_field: _Key = "continuation"
    """The key of a row's continuation."""
    choices_field: _Key = "choices"
    """The key of a row's choices."""
    answer_field: _Key = "answer"
    """The key that says which of a row's choices is right."""


class EmbedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `embed:` section: how `nvcli embed` makes a vector of a text."""

    pooling: Literal["auto"] | PoolingName = "auto"
    """Which hidden states become the vector: that of the last token, the mean of all, or that of the first token
    (`cls`). auto: as the checkpoint says; the last token's where it says nothing."""
    normalize: bool | Literal["auto"] = "auto"
    """Whether vectors have length 1. auto: as the checkpoint says; yes where it says nothing."""
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    """Keep so many leading numbers of each vector, for models that were trained for it (Matryoshka); null: all."""
    encoding: EmbeddingEncoding = "float"
    """How a vector is written: as numbers, or as base64 of little-endian float32."""
