"""Prompt: what the samples of one row have in common, held once for all of them."""

from __future__ import annotations

from array import array

from nvcli.engine.block_manager import BlockHash, hash_blocks
from nvcli.engine.request import Request
from nvcli.messages import CONSTRAINT_FAILED, NOT_FINITE, unpack


class Prompt:
    """The prompt of a request, shared by its samples. It is never changed, apart from the hashes that are kept."""

    __slots__ = ("_block_hashes", "stop_ids", "token_ids")

    def __init__(self, request: Request) -> None:
        self.token_ids: array[int] = unpack(request.prompt_ids)
        self.stop_ids = frozenset((*request.stop_ids, NOT_FINITE, CONSTRAINT_FAILED))
        """The ids that end an answer when they come back: those of the request, and those that stand for no token."""
        self._block_hashes: list[BlockHash] = []

    def hash_leading_blocks(self, num_blocks: int, block_size: int) -> list[BlockHash]:
        """Return the hashes of at least the first `num_blocks` blocks, all of which must be full of prompt tokens.

        `block_size` is the same in every call. The caller does not change the list.
        """
        hashes = self._block_hashes
        if len(hashes) < num_blocks:
            tokens = self.token_ids[len(hashes) * block_size : num_blocks * block_size].tobytes()
            hashes += hash_blocks(tokens, block_size, parent=hashes[-1] if hashes else b"")
        return hashes
