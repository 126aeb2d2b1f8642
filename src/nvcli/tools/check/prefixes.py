"""Counts the prompt tokens that the prefix cache saves, and equal rows, in bounded memory.

Prompts share whole KV blocks, and a block is identified with all that precedes it. So a shared block is one whose
prompt, up to the end of the block, began an earlier prompt. Blocks are known by 64-bit hashes of that beginning. Once
there are too many different ones, only those with a small hash are kept, which are a fair sample whatever the order of
the rows, and their number is scaled up.
"""

from __future__ import annotations

from hashlib import blake2b

from nvcli.core.hash_set import HashSet
from nvcli.core.messages import NO_ADAPTER, TOKEN_BYTES

_MAX_BLOCKS = 1 << 20
"""Maximum block hashes kept, at 11 to 22 bytes each. Half as many leave an error of about 0.1 %."""
_MAX_ROWS = 1 << 24
"""Maximum different rows remembered, at as many bytes each."""
_HASH_BITS = 64


class SharedBlocks:
    """Counts the whole KV blocks of all prompts, and those that an earlier prompt began with."""

    def __init__(self, block_size: int, *, max_kept: int = _MAX_BLOCKS) -> None:
        self._block_size = block_size
        self._max_kept = max_kept
        self._kept = HashSet()
        self._kept_bits = _HASH_BITS
        """Only hashes with at most this many bits are kept."""
        self._num_blocks = 0

    def add(self, prompt_ids: bytes, *, adapter: int = NO_ADAPTER) -> None:
        """Add a prompt, packed as int32. Its last token is always computed, and so is the block that ends with it.
        Prompts under different LoRA adapters share nothing."""
        block_bytes = self._block_size * TOKEN_BYTES
        num_blocks = (len(prompt_ids) - TOKEN_BYTES) // block_bytes
        self._num_blocks += num_blocks
        begun = blake2b(digest_size=_HASH_BITS // 8, salt=adapter_salt(adapter))
        for end in range(block_bytes, num_blocks * block_bytes + 1, block_bytes):
            begun.update(prompt_ids[end - block_bytes : end])
            hashed = int.from_bytes(begun.copy().digest())
            if hashed.bit_length() <= self._kept_bits and self._kept.add(hashed) and len(self._kept) > self._max_kept:
                self._thin_out()

    @property
    def is_exact(self) -> bool:
        """Whether all hashes were kept, so that `num_tokens` is exact."""
        return self._kept_bits == _HASH_BITS

    @property
    def num_tokens(self) -> int:
        """Prompt tokens that need not be computed if every block stays cached until it is needed again."""
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
    """The keys of the rows seen, up to a limit; later ones are looked up but not added."""

    def __init__(self, *, max_kept: int = _MAX_ROWS) -> None:
        self._max_kept = max_kept
        self._kept = HashSet()

    def add(self, key: bytes) -> bool:
        """Add a key, a digest of at least 8 bytes. Returns False if it is already there."""
        hashed = int.from_bytes(key[: _HASH_BITS // 8])
        if len(self._kept) < self._max_kept:
            return self._kept.add(hashed)
        return hashed not in self._kept

    @property
    def is_full(self) -> bool:
        """Whether no more keys are added, so that equal rows may be missed."""
        return len(self._kept) >= self._max_kept


def adapter_salt(adapter: int) -> bytes:
    """Return the salt of hashes of prompts under an adapter, so that they differ from those under others."""
    return adapter.to_bytes(4, "little")
