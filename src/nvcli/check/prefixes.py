"""Counts the prompt tokens that the prefix cache saves, and the rows that are equal, in bounded memory.

Prompts share whole KV blocks, and what precedes a block is part of what it is. So a block that is shared is one whose
prompt, up to the end of the block, began an earlier prompt. Blocks are known by 64-bit hashes of that beginning. Once
there are too many different ones, only those with a small hash are kept, which are a fair sample whatever the order of
the rows, and their number is scaled up.
"""

from __future__ import annotations

from hashlib import blake2b

from nvcli.hash_set import HashSet
from nvcli.job_run.planning.planner import TOKEN_BYTES

_MAX_BLOCKS = 1 << 20
"""The most hashes of blocks that are kept, in 11 to 22 bytes each. Half as many leave an error of about 0.1 %."""
_MAX_ROWS = 1 << 24
"""The most different rows that are remembered, likewise."""
_HASH_BITS = 64


class SharedBlocks:
    """The whole KV blocks of all prompts, and how many of them are the beginning of an earlier prompt."""

    def __init__(self, block_size: int, *, max_kept: int = _MAX_BLOCKS) -> None:
        self._block_size = block_size
        self._max_kept = max_kept
        self._kept = HashSet()
        self._kept_bits = _HASH_BITS
        """Hashes with no more bits than this are kept."""
        self._num_blocks = 0

    def add(self, prompt_ids: bytes) -> None:
        """Add a prompt, packed as int32. Its last token is computed in any case, and so is the block that ends it."""
        block_bytes = self._block_size * TOKEN_BYTES
        num_blocks = (len(prompt_ids) - TOKEN_BYTES) // block_bytes
        self._num_blocks += num_blocks
        begun = blake2b(digest_size=_HASH_BITS // 8)
        for end in range(block_bytes, num_blocks * block_bytes + 1, block_bytes):
            begun.update(prompt_ids[end - block_bytes : end])
            hashed = int.from_bytes(begun.copy().digest())
            if hashed.bit_length() <= self._kept_bits and self._kept.add(hashed) and len(self._kept) > self._max_kept:
                self._thin_out()

    @property
    def is_exact(self) -> bool:
        """Whether all hashes were kept, so that `num_tokens` is no estimate."""
        return self._kept_bits == _HASH_BITS

    @property
    def num_tokens(self) -> int:
        """The prompt tokens that need not be computed, if every block stays in the cache until it is wanted again."""
        num_different = len(self._kept) << (_HASH_BITS - self._kept_bits)
        return max(0, self._num_blocks - num_different) * self._block_size

    def _thin_out(self) -> None:
        self._kept_bits -= 1
        kept = HashSet()
        for hashed in self._kept:
            if hashed.bit_length() <= self._kept_bits:
                kept.add(hashed)
        self._kept = kept


class SeenKeys:
    """The keys of rows that were seen, up to a bound; of later ones it is only told whether they are among these."""

    def __init__(self, *, max_kept: int = _MAX_ROWS) -> None:
        self._max_kept = max_kept
        self._kept = HashSet()

    def add(self, key: bytes) -> bool:
        """Add a key of at least 8 bytes that are a digest. Returns False if it is one that was kept before."""
        hashed = int.from_bytes(key[: _HASH_BITS // 8])
        if len(self._kept) < self._max_kept:
            return self._kept.add(hashed)
        return hashed not in self._kept

    @property
    def is_full(self) -> bool:
        """Whether keys are not kept any more, so that rows which are equal may be missed."""
        return len(self._kept) >= self._max_kept
