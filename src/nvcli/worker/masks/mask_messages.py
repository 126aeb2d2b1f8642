"""Messages from a rank to its mask workers, and the memory through which they reply.

The memory has a row for each answer that may run, in several parts (`MaskTable`). A worker writes a row's mask, then
the number under which the mask was requested (`answered`). Most requests are for the mask after one more token and
nothing else: these are written to the memory as well (`next_token`). A worker polls the memory many times per step, and
gets a message for such a request only while it sleeps.

Where a mask allows a single token, a worker goes on to the mask after that token, and so on: the tokens that it finds
are a *run*, which the memory brings along with the first of these masks.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np

from nvcli.core.structured import MAX_FORCED_TOKENS
from nvcli.kernels.whole_numbers import round_up

N = TypeVar("N", int, np.ndarray)

_PAGE = 4096
_TOKEN_BITS = 24
"""Bits of the token in an entry of `MaskTable.next_tokens`; the higher bits hold the mask's number."""
WHOLE_RUN = (1 << _TOKEN_BITS) - 1
"""Stands for all tokens of the run that the worker found last, as the first token of a request."""
_NUM_NUMBERS = 4
"""Numbers that the memory holds per row, besides the run and the mask."""
_RUN_WORDS = 1 + MAX_FORCED_TOKENS


class MaskStart(msgspec.Struct, frozen=True, kw_only=True):
    """The argument of the first process, which forks the workers."""

    model_path: str
    vocab_size: int
    """The number of the model's logits."""
    end_ids: list[int]
    num_rows: int
    num_workers: int
    """The number of workers. The descriptors from which they read orders arrive over the socket."""
    stays_awake: bool
    """Whether workers poll for orders before they sleep, which takes part of a core each."""
    finds_runs: bool
    """Whether workers look for runs."""


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The tokens are loaded, and workers can be started."""

    num_words: int
    """Words per mask; 0 if the tokens cannot be loaded, in which case the processes have ended."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A worker ended unexpectedly."""

    number: int
    how: str
    """How it ended, as the end of a sentence."""


class Raised(msgspec.Struct, frozen=True, tag=True):
    """A worker is about to end because of an exception, or all are, because the first process has failed."""

    number: int | None
    """The worker's; None: the first process."""
    traceback: str


Report = Loaded | Ended | Raised


class FollowGrammar(msgspec.Struct, frozen=True, array_like=True):
    """Begin a new answer in a row, replacing the one that was there."""

    row: int
    grammar: str | None
    """The grammar; None if the answer has failed already, as do all its masks then."""


class WantMask(msgspec.Struct, frozen=True, array_like=True):
    """Build one mask."""

    row: int
    number: int
    """A number that no other mask of its row has."""
    tokens: list[int]
    """Tokens by which the answer advances first; the first of them may be `WHOLE_RUN`."""
    is_free: bool
    """Whether any token may come next, except those held back."""
    held_back: list[int]
    """Tokens that must not come next, unless nothing else may."""
    opening: int | None
    """A token that may come next in addition to the grammar's."""
    is_opened: bool
    """Whether only that token may come next."""


class MaskOrders(msgspec.Struct, frozen=True, array_like=True):
    """Orders for one worker, carried out in this order, after new entries in its rows of `MaskTable.next_tokens`."""

    ended: list[int]
    """Rows whose answers have ended."""
    begun: list[FollowGrammar]
    wanted: list[WantMask]


@dataclass(frozen=True, slots=True)
class MaskTable:
    """The parts of the mask memory."""

    numbers: np.ndarray
    """[rows] int64, the last mask written (`answered`). Set by the workers."""
    next_tokens: np.ndarray
    """[rows] int64, the last mask requested through the memory (`next_token`), or 0. Set by the rank."""
    is_asleep: np.ndarray
    """[rows] int64, one entry per worker (there are no more workers than rows): whether it may sleep until a message
    arrives. Set by the workers."""
    at_work: np.ndarray
    """[rows] int64, one entry per worker: the row, plus 1, whose mask it is building, negative while it begins that
    row's answer; 0: none. Set by the workers, so that the rank knows what a worker was doing when it died."""
    runs: np.ndarray
    """[rows, 1 + MAX_FORCED_TOKENS] int32, the length of the run that begins with the last mask written, and its
    tokens. Set by the workers."""
    masks: np.ndarray
    """[rows, W] uint32, one bit per token."""

    @classmethod
    def empty(cls, num_rows: int, num_words: int) -> MaskTable:
        """Make a table in memory that is not shared."""
        return cls.of(bytearray(memory_bytes(num_rows, num_words)), num_rows, num_words)

    @classmethod
    def of(cls, memory: mmap.mmap | bytearray, num_rows: int, num_words: int) -> MaskTable:
        """View a memory of `memory_bytes` as a table."""
        numbers = np.frombuffer(memory, dtype=np.int64, count=_NUM_NUMBERS * num_rows).reshape(_NUM_NUMBERS, num_rows)
        runs = np.frombuffer(memory, dtype=np.int32, count=num_rows * _RUN_WORDS, offset=numbers.nbytes)
        count = num_rows * num_words
        masks = np.frombuffer(memory, dtype=np.uint32, count=count, offset=_masks_offset(num_rows))
        runs, masks = runs.reshape(num_rows, _RUN_WORDS), masks.reshape(num_rows, num_words)
        return cls(numbers[0], numbers[1], numbers[2], numbers[3], runs, masks)

    def run(self, row: int) -> list[int]:
        """Return the tokens of the run that begins with a row's last mask."""
        tokens: list[int] = self.runs[row, 1 : 1 + self.runs.item(row, 0)].tolist()
        return tokens


def _masks_offset(num_rows: int) -> int:
    """Return the offset of the masks in the memory, in bytes."""
    return round_up((8 * _NUM_NUMBERS + 4 * _RUN_WORDS) * num_rows, _PAGE)


def memory_bytes(num_rows: int, num_words: int) -> int:
    """Return the size of the memory, in bytes, for masks of `num_words` words of 32 bits."""
    return _masks_offset(num_rows) + 4 * num_rows * num_words


def next_token(numbers: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Encode requests for the masks with these numbers [n] int64, each after one of the tokens [n] int64."""
    packed: np.ndarray = (numbers << _TOKEN_BITS) | tokens
    return packed


def read_next_token(packed: int) -> tuple[int, int]:
    """Decode an entry of `MaskTable.next_tokens` into number and token."""
    return packed >> _TOKEN_BITS, packed & ((1 << _TOKEN_BITS) - 1)


def answered(number: N, *, has_failed: bool) -> N:
    """Return the entry that says that the mask with this number is there (or the entries, for several numbers).
    `has_failed`: the answer's grammar cannot be followed any further."""
    return 2 * number + has_failed


def allow_only(mask: np.ndarray, token: int) -> None:
    """Make a mask of uint32 words allow one token alone, in place."""
    mask[:] = 0
    mask[token >> 5] = 1 << (token & 31)
