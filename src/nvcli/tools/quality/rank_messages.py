"""The messages between the command and a comparing rank. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from nvcli.core.engine_config import EngineConfig
from nvcli.tools.quality.statistics import TokenSums


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareTask:
    """The argument of a rank."""

    configs: tuple[EngineConfig, EngineConfig]
    """The configurations of A and B, with equally many ranks and one stage."""
    rank: int
    store_fd: int
    """The store over which the ranks meet (`distributed.rendezvous`)."""
    max_tokens: int
    """The length of the longest passage."""


@dataclass(frozen=True, slots=True)
class CompareReady:
    """A rank's first message: both models are loaded. `notes` are lines for the user."""

    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PassageTask:
    """A passage to be read with both models."""

    token_ids: bytes
    """Packed int32, at least one."""
    answer_start: int
    """The number of tokens whose successors belong to the prompt; the others predict the answer."""


@dataclass(frozen=True, slots=True)
class PassageSums:
    """The sums over the predictions of a passage."""

    prompt: TokenSums
    answer: TokenSums


@dataclass(frozen=True, slots=True)
class CompareFailed:
    """The last message of a rank that failed: the error's class (in `nvcli.errors`), its message, its traceback."""

    kind: str
    message: str
    traceback: str = ""
