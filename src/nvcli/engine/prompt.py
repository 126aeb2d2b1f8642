"""Prompt: what the samples of one row have in common, held once for all of them."""

from __future__ import annotations

from array import array

from nvcli.engine.block_manager import TOKEN_BYTES, BlockHash
from nvcli.engine.prompt_hashes import PromptHashes
from nvcli.engine.request import Request
from nvcli.messages import CONSTRAINT_FAILED, NOT_FINITE, unpack


class Prompt:
    """The prompt of a request, shared by its samples. It is never changed, apart from the hashes that are kept."""

    __slots__ = ("_block_hashes", "_packed_ids", "num_tokens", "stop_ids")

    def __init__(self, request: Request) -> None:
        self._packed_ids = request.prompt_ids
        self.num_tokens = len(request.prompt_ids) // TOKEN_BYTES
        self.stop_ids = frozenset((*request.stop_ids, NOT_FINITE, CONSTRAINT_FAILED))
        """The ids that end an answer when they come back: those of the request, and those that stand for no token."""
        self._block_hashes: list[BlockHash] | None = None

    def tokens(self, start: int, end: int) -> array[int]:
        """Return the tokens at positions `start` to `end`, without `end`, which is at most `num_tokens`."""
        return unpack(self._packed_ids[start * TOKEN_BYTES : end * TOKEN_BYTES])

    def hash_blocks(self, hashes: PromptHashes) -> list[BlockHash]:
        """Return the hashes of all blocks that are full of prompt tokens. The caller does not change the list.

        `hashes` has the same block size in every call.
        """
        if self._block_hashes is None:
            self._block_hashes = hashes.of(self._packed_ids)
        return self._block_hashes
