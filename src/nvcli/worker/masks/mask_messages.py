"""The orders of a rank to the processes that make masks, and the memory in which they answer.

The memory has a row for each answer that may run, in several parts (`MaskTable`). A process writes a row's mask, and
then the number by which that mask was asked for (`answered`). Of most answers a step asks for the mask behind one more
token, and of nothing else: it writes that into the memory too (`next_token`). A process looks there many times in each
step, and gets a message for it only while it is asleep.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np

N = TypeVar("N", int, np.ndarray)

_PAGE = 4096
_TOKEN_BITS = 24
"""Bits of the token in an entry of `MaskTable.next_tokens`; the bits above are the number of the mask."""
_NUM_NUMBERS = 4
"""The numbers that the memory has for each row beside its mask."""


class MaskStart(msgspec.Struct, frozen=True, kw_only=True):
    """The argument of the first process, which starts the others."""

    model_path: str
    vocab_size: int
    """The number of the model's logits."""
    end_ids: list[int]
    num_rows: int
    num_workers: int
    """The number of the others. What each reads its orders from comes by the socket."""
    stays_awake: bool
    """Whether processes look for orders for a while before they fall asleep. Each takes some of a core then."""
    memory_fd: int
    """The memory, empty until the vocabulary is loaded."""
    report_fd: int
    """A socket for `Report`s to the rank. The rank sends the number of a process that is to be started, with the file
    that this one reads its orders from."""
    parent_pid: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The tokens are loaded, and others can be started."""

    num_words: int
    """The words of a mask; 0: the tokens cannot be loaded, and the processes have ended."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A process has ended that should not have."""

    number: int
    how: str
    """The end of a sentence about it."""


class Raised(msgspec.Struct, frozen=True, tag=True):
    """A process is about to end because of an exception."""

    number: int
    traceback: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The first process has failed."""

    traceback: str


Report = Loaded | Ended | Raised | Failed


class FollowGrammar(msgspec.Struct, frozen=True, array_like=True):
    """An answer that begins in a row, in the place of the one that was there."""

    row: int
    grammar: str | None
    """None: the answer has failed already, and so do all of its masks."""


class WantMask(msgspec.Struct, frozen=True, array_like=True):
    """A mask that is asked for."""

    row: int
    number: int
    """A number that no other mask of its row has."""
    tokens: list[int]
    """The tokens that the answer goes on with first."""
    is_free: bool
    """Whether its next token may be any, but for those that are held back."""
    held_back: list[int]
    """Tokens that must not come next, unless no others may."""
    opening: int | None
    """A token that may come next beside those of the grammar."""
    is_opened: bool
    """Whether that is the only one."""


class MaskOrders(msgspec.Struct, frozen=True, array_like=True):
    """Orders of one process, obeyed in this order behind what is new among its rows of `MaskTable.next_tokens`."""

    ended: list[int]
    """Rows whose answers have ended."""
    begun: list[FollowGrammar]
    wanted: list[WantMask]


@dataclass(frozen=True, slots=True)
class MaskTable:
    """The parts of the memory."""

    numbers: np.ndarray
    """[rows] int64, the last mask that is there (`answered`). The processes write it."""
    next_tokens: np.ndarray
    """[rows] int64, the last mask that was asked for so (`next_token`); 0: none. The rank writes it."""
    is_asleep: np.ndarray
    """[rows] int64, with an entry for each process, of which there are no more than rows: whether it may not look
    before it gets a message. The processes write it."""
    at_work: np.ndarray
    """[rows] int64, likewise: the row, plus 1, that the process makes a mask of, or as a negative number that of the
    answer that it begins; 0: none. The processes write it, so that the rank knows what one was at when it ended."""
    masks: np.ndarray
    """[rows, W] uint32, a bit for each token."""

    @classmethod
    def empty(cls, num_rows: int, num_words: int) -> MaskTable:
        """Make one that nobody shares."""
        numbers = np.zeros((_NUM_NUMBERS, num_rows), dtype=np.int64)
        masks = np.zeros((num_rows, num_words), dtype=np.uint32)
        return cls(numbers[0], numbers[1], numbers[2], numbers[3], masks)

    @classmethod
    def of(cls, memory: mmap.mmap, num_rows: int, num_words: int) -> MaskTable:
        """Read a memory of `memory_bytes` so."""
        numbers = np.frombuffer(memory, dtype=np.int64, count=_NUM_NUMBERS * num_rows).reshape(_NUM_NUMBERS, num_rows)
        count = num_rows * num_words
        masks = np.frombuffer(memory, dtype=np.uint32, count=count, offset=masks_offset(num_rows))
        return cls(numbers[0], numbers[1], numbers[2], numbers[3], masks.reshape(num_rows, num_words))


def masks_offset(num_rows: int) -> int:
    """Return the byte at which the masks begin in the memory."""
    return -(-8 * _NUM_NUMBERS * num_rows // _PAGE) * _PAGE


def memory_bytes(num_rows: int, num_words: int) -> int:
    """Return the size of the memory; a mask has `num_words` words of 32 bits."""
    return masks_offset(num_rows) + 4 * num_rows * num_words


def next_token(numbers: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return what asks for masks by these numbers [n] int64, each behind one of the tokens [n] int64."""
    packed: np.ndarray = (numbers << _TOKEN_BITS) | tokens
    return packed


def read_next_token(packed: int) -> tuple[int, int]:
    """Return the number and the token of an entry of `MaskTable.next_tokens`."""
    return packed >> _TOKEN_BITS, packed & ((1 << _TOKEN_BITS) - 1)


def answered(number: N, *, has_failed: bool) -> N:
    """Return what is written for a row once the mask of this number, or for rows once those of these numbers, are
    there. With `has_failed` the answer's grammar cannot be followed any further."""
    return 2 * number + has_failed
