"""The keys and values that a request copies from another one's block, so that a common beginning is computed once to
the token and not to the block.

The prefix cache shares whole blocks. Requests that part within a block (the choices of a row that is scored, behind its
context; the samples of a row) would each compute that block's common tokens again. Instead a request that enters is
given the keys of the common tokens out of the block of the request that entered before it.

Where all of a step's copies are of keys that earlier steps have computed, the ranks copy them before the step, which
may then run as a CUDA graph. Else each layer copies behind the store of the step's own keys, outside of graphs. Only
requests whose prompts are read copy such new keys: steps that read run outside of graphs in any case.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

from nvcli.engine.prompt_hashes import PromptHashes
from nvcli.engine.state import RequestState
from nvcli.messages import MOST_KEY_COPIES, pack

_LEAST_TOKENS = 16
"""A request whose prompt is not read copies no fewer tokens: for next to nothing, its step would have one more
launch."""


class _Piece(NamedTuple):
    """Keys of consecutive tokens that a block gets from another one of its KV group."""

    source: int
    first: int
    """The first token, counted from the beginning of the block."""
    end: int


class KeyCopies:
    """Finds what requests that enter in a step may copy."""

    def __init__(self, block_size: int, *, is_on: bool) -> None:
        """`is_on`: whether anything may be copied: the prefix cache is on, and no group has recurrent states, which are
        not kept for each token."""
        self._block_size, self._is_on = block_size, is_on
        self._latest: RequestState | None = None
        """The request that entered last."""
        self._num_early = 0
        """The tokens of its prompt whose keys were computed by steps before the one that is planned."""
        self._pieces: dict[tuple[int, int], list[_Piece]] = {}
        """(KV group, block) → the pieces that it gets in the step that is planned, first tokens first."""
        self._targets: dict[RequestState, list[tuple[int, int]]] = {}
        """Request → its (KV group, block)s that get something."""
        self._with_new_keys: set[RequestState] = set()
        """Requests whose copied keys the same step computes."""

    @property
    def copies_new_keys(self) -> bool:
        """Whether any of what is copied is computed by the same step."""
        return bool(self._with_new_keys)

    def begin_step(self) -> None:
        """Note that a step is planned next: what those before copy will be in its place when it runs."""
        self._pieces.clear()
        self._targets.clear()
        self._with_new_keys.clear()
        latest = self._latest
        self._num_early = 0 if latest is None else min(latest.num_prompt, latest.num_computed)

    def entered(self, state: RequestState) -> None:
        """Note the request that entered last; the next one may copy from it as long as it runs."""
        self._latest, self._num_early = state, 0

    def plan(self, state: RequestState, column: int, most: int, hashes: PromptHashes) -> int:
        """Plan what a request copies that enters with `column` blocks of the prefix cache and a block of its own behind
        them in each KV group. It may have at most `most` tokens of its prompt from others.

        Returns the number of tokens that are copied.
        """
        donor, start = self._latest, column * self._block_size
        if not self._is_on or donor is None or donor.slot is None:
            return 0
        is_read = state.first_unread is not None
        least = 1 if is_read else _LEAST_TOKENS
        num_there = min(donor.num_prompt, donor.num_computed) if is_read else self._num_early
        # A token is left for the block: to compute any behind it would take another one, which may not be there.
        most = min(start + self._block_size - 1, most, num_there)
        if most < start + least or any(column >= len(blocks) or not blocks[column] for blocks in donor.blocks):
            return 0
        if column and donor.hash_blocks(column - 1, column, hashes) != state.hash_blocks(column - 1, column, hashes):
            return 0
        count = _num_equal(donor.tokens(start, most), state.tokens(start, most))
        if count < least:
            return 0
        found = [self._pieces_of(group, blocks[column], count) for group, blocks in enumerate(donor.blocks)]
        count = min(pieces[-1].end for pieces in found)
        if count < least:
            return 0
        self._targets[state] = [(group, blocks[column]) for group, blocks in enumerate(state.blocks)]
        for target, pieces in zip(self._targets[state], found, strict=True):
            self._pieces[target] = [p._replace(end=min(p.end, count)) for p in pieces if p.first < count]
        if start + count > self._num_early:
            self._with_new_keys.add(state)
        return count

    def _pieces_of(self, group: int, block: int, count: int) -> list[_Piece]:
        """Return where the keys of a block's first `count` tokens come from, or of as many as may be copied.

        Those that are copied to the block in this step are not there yet: they come from where that comes from.
        """
        copied = self._pieces.get((group, block), [])
        pieces = [piece._replace(end=min(piece.end, count)) for piece in copied if piece.first < count]
        first = pieces[-1].end if pieces else 0
        if first < count:
            pieces.append(_Piece(block, first, count))
        return pieces[:MOST_KEY_COPIES]

    def forget(self) -> None:
        """Let no request copy from those that entered before."""
        self._latest = None

    def drop(self, state: RequestState) -> None:
        """Copy nothing for a request, which gives its blocks back."""
        self._with_new_keys.discard(state)
        for target in self._targets.pop(state, ()):
            del self._pieces[target]

    def packed(self) -> bytes:
        """Return `StepInput.key_copies` for the step that is planned."""
        return pack(
            number
            for group, target in sorted(self._pieces)
            for piece in self._pieces[group, target]
            for number in (group, piece.source, target, piece.first, piece.end)
        )


def _num_equal(left: array[int], right: array[int]) -> int:
    """Count the leading numbers that two arrays of one length have in common."""
    if left == right:
        return len(left)
    return next(at for at, (one, other) in enumerate(zip(left, right, strict=True)) if one != other)
