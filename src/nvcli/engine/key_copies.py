"""The keys and values that a request copies from another one's block, so that a common beginning is computed once to
the token and not to the block.

The prefix cache shares whole blocks. Requests that part within a block (the choices of a row that is scored, behind its
context) would each compute that block's common tokens again. Instead a request that enters is given the keys of the
common tokens out of the block of the request that entered before it. The ranks copy them in each layer, behind the
store of the step's own keys: so they may be computed in the same step, and no request waits for them.

Only requests whose prompts are read copy keys. Steps that read run without CUDA graphs in any case; a request that only
generates would take the graph from its step, for a part of a block.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

from nvcli.engine.prompt_hashes import PromptHashes
from nvcli.engine.state import RequestState
from nvcli.messages import MOST_KEY_COPIES, pack


class _Piece(NamedTuple):
    """Keys of consecutive tokens within one column."""

    column: int
    first: int
    """The first token, counted from the beginning of the column."""
    end: int
    blocks: list[int]
    """The block of each KV group that holds them."""


class KeyCopies:
    """Finds what requests that enter in a step may copy."""

    def __init__(self, num_groups: int, block_size: int, *, is_on: bool) -> None:
        """`num_groups`: the number of KV groups. `is_on`: whether anything may be copied: the prefix cache is on, and
        no group has recurrent states, which are not kept for each token."""
        self._num_groups, self._block_size, self._is_on = num_groups, block_size, is_on
        self._latest: RequestState | None = None
        """The request that entered last."""
        self._of_step: dict[RequestState, list[_Piece]] = {}
        """What each request copies in the step that is planned."""

    def begin_step(self) -> None:
        """Note that a step is planned next: what those before copy will be in its place when it runs."""
        self._of_step.clear()

    def entered(self, state: RequestState) -> None:
        """Note the request that entered last; the next one may copy from it as long as it runs."""
        self._latest = state

    def plan(self, state: RequestState, column: int, most: int, hashes: PromptHashes) -> int:
        """Plan what a request copies that enters with `column` blocks of the prefix cache and a block of its own behind
        them in each KV group. It may have at most `most` tokens of its prompt from others.

        Returns the number of tokens that are copied.
        """
        donor, start = self._latest, column * self._block_size
        if not self._is_on or state.reads is None or donor is None or donor.slot is None:
            return 0
        most = min(start + self._block_size, most, donor.num_tokens, donor.num_computed)
        if most <= start or any(column >= len(blocks) or not blocks[column] for blocks in donor.blocks):
            return 0
        if column and donor.hash_blocks(column - 1, column, hashes) != state.hash_blocks(column - 1, column, hashes):
            return 0
        end = _num_equal(donor.tokens(start, most), state.tokens(start, most))
        # What the other one copies in this step itself is not there to be copied: it comes from where that comes from.
        pieces = [
            piece._replace(end=min(piece.end, end))
            for piece in self._of_step.get(donor, [])
            if piece.column == column and piece.first < end
        ]
        first = pieces[-1].end if pieces else 0
        if first < end:
            pieces.append(_Piece(column, first, end, [blocks[column] for blocks in donor.blocks]))
        pieces = pieces[:MOST_KEY_COPIES]
        if not pieces:
            return 0
        self._of_step[state] = pieces
        return pieces[-1].end

    def forget(self) -> None:
        """Let no request copy from those that entered before."""
        self._latest = None

    def drop(self, state: RequestState) -> None:
        """Copy nothing for a request, which gives its blocks back."""
        self._of_step.pop(state, None)

    def packed(self) -> bytes:
        """Return `StepInput.key_copies` for the step that is planned."""
        return pack(
            number
            for group in range(self._num_groups)
            for state, pieces in self._of_step.items()
            for piece in pieces
            for number in (group, piece.blocks[group], state.blocks[group][piece.column], piece.first, piece.end)
        )


def _num_equal(left: array[int], right: array[int]) -> int:
    """Count the leading numbers that two arrays of one length have in common."""
    if left == right:
        return len(left)
    return next(at for at, (one, other) in enumerate(zip(left, right, strict=True)) if one != other)
