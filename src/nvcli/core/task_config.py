"""Tasks of a run (answers, log-probabilities of given texts, embeddings, or classes), and their settings.

The command sets the task (`nvcli score`, `nvcli embed`, `nvcli classify`); a Python program may set it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

import msgspec

from nvcli.core.config_types import Name, PositiveInt
from nvcli.core.flags import PROMPTS, RESULT, Flag

Task = Literal["generate", "score", "embed", "classify"]
Normalization = Literal["none", "tokens", "bytes"]
PoolingName = Literal["last", "mean", "cls"]
Position = Literal["last", "first", "all"]
DenseActivation = Literal["identity", "tanh", "relu", "gelu"]
POSITIONS: Mapping[PoolingName, Position] = MappingProxyType({"last": "last", "mean": "all", "cls": "first"})
"""The tokens whose hidden states are pooled."""
EmbeddingEncoding = Literal["float", "base64"]
Activation = Literal["softmax", "sigmoid", "none"]


class DenseModule(msgspec.Struct, frozen=True, kw_only=True):
    """A linear layer through which a pooled hidden state goes before it is an embedding (sentence-transformers'
    `Dense`)."""

    folder: Path
    """The folder of its weights."""
    in_size: int
    out_size: int
    has_bias: bool
    activation: DenseActivation
    """The function of its result."""


class Classifier(msgspec.Struct, frozen=True, kw_only=True):
    """The classes that a model's head tells apart: the task of rows that it classifies."""

    labels: tuple[str, ...]
    """The name of each class, in the head's order."""
    activation: Activation
    """The function that makes probabilities of the head's numbers; none: they become no probabilities."""
    position: Position = "last"
    """The tokens whose hidden state, or mean of them, the head reads."""
    has_bias: bool = False
    """Whether the head has a bias."""
    temperature: float = 1.0
    """The head's numbers are divided by it."""
    pad_id: int | None
    """The id of padding, which is not read at the end of a row, as in transformers; None: there is none."""


class ScoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `score:` section: what `nvcli score` reads and writes."""

    normalize: Annotated[
        Normalization, Flag("--normalize", RESULT, "Divisor of log-probabilities before choices are compared.")
    ] = "none"
    """tokens, bytes: the length of the choice."""
    token_logprobs: Annotated[bool, Flag("--token-logprobs", RESULT, "Add each token and its log-probability.")] = False
    continuation_field: Annotated[
        Name, Flag("--continuation-field", PROMPTS, "Key (column) of the continuation.", "COLUMN")
    ] = "continuation"
    choices_field: Annotated[Name, Flag("--choices-field", PROMPTS, "Key (column) of the choices.", "COLUMN")] = (
        "choices"
    )
    answer_field: Annotated[Name, Flag("--answer-field", PROMPTS, "Key (column) of the right choice.", "COLUMN")] = (
        "answer"
    )


class EmbedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `embed:` section: how `nvcli embed` makes a vector of a text."""

    pooling: Annotated[
        Literal["auto"] | PoolingName,
        Flag("--pooling", RESULT, "Which hidden states become the embedding; auto: as the checkpoint says."),
    ] = "auto"
    """last, cls: that of the last or first token; mean: of all. auto: last if the checkpoint does not say."""
    prompt_name: Annotated[
        Name | None, Flag("--prompt-name", PROMPTS, "Name of the checkpoint's prompt before texts, as query.", "NAME")
    ] = None
    """A name among `prompts` of config_sentence_transformers.json, which goes before each text; None: the file's
    default, if it names one. Conversations and token ids stay as they are."""
    normalize: bool | Literal["auto"] = "auto"
    """Whether vectors are scaled to length 1. auto: as the checkpoint says; yes if it does not."""
    dimensions: Annotated[
        PositiveInt | None, Flag("--dimensions", RESULT, "Keep the first N numbers of each embedding.")
    ] = None
    """For models trained for it (Matryoshka)."""
    encoding: Annotated[
        EmbeddingEncoding, Flag("--encoding", RESULT, "Numbers, or base64 of little-endian float32.")
    ] = "float"
