"""Copies of keys and values from one request's block to another's, so that a common prefix is computed once down to the
exact token, not just to the block.

The prefix cache shares whole blocks. Requests that diverge within a block (the choices of a scored row, after its
context; the samples of a row) would each compute that block's common tokens again. Instead, an entering request copies
the keys of the common tokens from the block of the request that entered before it.

If earlier steps have computed all of a step's copied keys, the ranks copy them before the step, which may then run as a
CUDA graph. Otherwise each layer copies after storing the step's own keys, outside of graphs. Only requests whose
prompts are read copy such new keys: steps that read run outside of graphs in any case.
"""

from __future__ import annotations

from typing import NamedTuple

from nvcli.core.messages import MOST_KEY_COPIES, pack
from nvcli.engine.prompt_hashes import PromptHashes
from nvcli.engine.segment_forest import num_equal
from nvcli.engine.state import RequestState

_LEAST_TOKENS = 16
"""Minimum tokens to copy for a request whose prompt is not read: fewer are not worth one more launch."""


class _Piece(NamedTuple):
    """Consecutive tokens whose keys a block gets from another block of its KV group."""

    source: int
    first: int
    """The first token's position in the block."""
    end: int


class KeyCopies:
    """Finds the keys that entering requests may copy in a step."""

    def __init__(self, block_size: int, *, is_on: bool) -> None:
        """`is_on`: whether copying is possible: the prefix cache is on, and no group has recurrent states, which are
        not kept per token."""
        self._block_size, self._is_on = block_size, is_on
        self._latest: RequestState | None = None
        """The request that entered last."""
        self._num_early = 0
        """Tokens of its prompt whose keys were computed before the step being planned."""
        self._pieces: dict[tuple[int, int], list[_Piece]] = {}
        """(KV group, block) → its pieces in the step being planned, first tokens first."""
        self._targets: dict[RequestState, list[tuple[int, int]]] = {}
        """Request → its (KV group, block) targets."""
        self._with_new_keys: set[RequestState] = set()
        """Requests whose copied keys this step computes."""

    @property
    def copies_new_keys(self) -> bool:
        """Whether the step computes some of the copied keys itself."""
        return bool(self._with_new_keys)

    def begin_step(self) -> None:
        """Begin planning a step: earlier copies will be in place when it runs."""
        self._pieces.clear()
        self._targets.clear()
        self._with_new_keys.clear()
        latest = self._latest
        self._num_early = 0 if latest is None else min(latest.num_prompt, latest.num_computed)

    def entered(self, state: RequestState) -> None:
        """Record the request that entered last; the next one may copy from it while it runs."""
        self._latest, self._num_early = state, 0

    def plan(self, state: RequestState, column: int, most: int, hashes: PromptHashes) -> int:
        """Plan the copies for a request that enters with `column` cached blocks and then a block of its own in each KV
        group. At most `most` tokens of its prompt may be copied.

        Returns the number of tokens that are copied.
        """
        donor, start = self._latest, column * self._block_size
        if not self._is_on or donor is None or donor.slot is None:
            return 0
        if donor.prompt.hash_root != state.prompt.hash_root:
            return 0
        is_read = state.first_unread is not None
        least = 1 if is_read else _LEAST_TOKENS
        num_there = min(donor.num_prompt, donor.num_computed) if is_read else self._num_early
        # One token of the block is left to compute: computing a token after the block would need another block, which
        # may not be there.
        most = min(start + self._block_size - 1, most, num_there)
        if most < start + least or any(column >= len(blocks) or not blocks[column] for blocks in donor.blocks):
            return 0
        if column and donor.hash_blocks(column - 1, column, hashes) != state.hash_blocks(column - 1, column, hashes):
            return 0
        count = num_equal(donor.tokens(start, most), state.tokens(start, most))
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
        """Return the sources of the keys of a block's first `count` tokens, or of as many as may be copied.

        Keys copied to the block in this very step are not there yet, so they are taken from their own source.
        """
        copied = self._pieces.get((group, block), [])
        pieces = [piece._replace(end=min(piece.end, count)) for piece in copied if piece.first < count]
        first = pieces[-1].end if pieces else 0
        if first < count:
            pieces.append(_Piece(block, first, count))
        return pieces[:MOST_KEY_COPIES]

    def forget(self) -> None:
        """Forget earlier requests, so that nothing is copied from them."""
        self._latest = None

    def drop(self, state: RequestState) -> None:
        """Cancel the copies for a request that gives its blocks back."""
        self._with_new_keys.discard(state)
        for target in self._targets.pop(state, ()):
            del self._pieces[target]

    def packed(self) -> bytes:
        """Return `StepInput.key_copies` for the step being planned."""
        return pack(
            number
            for group, target in sorted(self._pieces)
            for piece in self._pieces[group, target]
            for number in (group, piece.source, target, piece.first, piece.end)
        )
