"""What a rank asks of the processes that make masks, and the memory in which they answer.

The memory has a row for each answer that may run. Its first part holds a number for each row, its second part the
masks. A process writes a row's mask, and then the number by which that mask was asked for (`answered`).
"""

from __future__ import annotations

import msgspec

_PAGE = 4096


class MaskStart(msgspec.Struct, frozen=True, kw_only=True):
    """The argument of the first process, which starts the others."""

    model_path: str
    vocab_size: int
    """The number of the model's logits."""
    end_ids: list[int]
    num_rows: int
    memory_fd: int
    """The memory, empty until the vocabulary is loaded."""
    order_fds: list[int]
    """Where each process reads what it is to do."""
    report_fd: int
    """Where the first process says how many words a mask has, and the others why they fail."""
    parent_pid: int


class FollowGrammar(msgspec.Struct, frozen=True, array_like=True):
    """An answer that begins in a row, in the place of the one that was there."""

    row: int
    grammar: str


class WantMask(msgspec.Struct, frozen=True, array_like=True):
    """A mask that is asked for."""

    row: int
    number: int
    """What tells it from the other masks of its row."""
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
    """What one process is to do, in this order."""

    ended: list[int]
    """Rows whose answers have ended."""
    begun: list[FollowGrammar]
    wanted: list[WantMask]


def masks_offset(num_rows: int) -> int:
    """Return the byte at which the masks begin in the memory."""
    return -(-8 * num_rows // _PAGE) * _PAGE


def memory_bytes(num_rows: int, num_words: int) -> int:
    """Return the size of the memory; a mask has `num_words` words of 32 bits."""
    return masks_offset(num_rows) + 4 * num_rows * num_words


def answered(number: int, *, has_failed: bool) -> int:
    """Return what is written for a row once the mask of this number is there. With `has_failed` the answer's grammar
    cannot be followed any further."""
    return 2 * number + has_failed
