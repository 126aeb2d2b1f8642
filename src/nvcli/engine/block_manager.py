"""BlockManager: who holds which KV block, and which blocks hold a prefix that can be used again.

Blocks are numbered from 1 (0 is the null block, never handed out) and counted by reference. A full block whose tokens
are known is registered under a hash that chains over all tokens before it (vLLM's scheme), so that equal prefixes find
each other. All KV groups share the blocks; a block is registered for one of them, whose layers' keys it holds. A block
that nobody holds keeps its contents until it is needed: blocks without a hash go first, then the least recently
released. This module knows block numbers only, not what lies in the blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

BlockHash = bytes

TOKEN_BYTES = 4  # token ids come packed as int32


def hash_blocks(token_bytes: bytes, block_size: int, parent: BlockHash = b"") -> list[BlockHash]:
    """Return chained hashes of the full blocks of packed int32 tokens; `parent` is the hash of the block before them.

    128 bits: two different prefixes do not meet in practice.
    """
    step = block_size * TOKEN_BYTES
    hashes = []
    for start in range(0, len(token_bytes) - step + 1, step):
        parent = blake2b(token_bytes[start : start + step], digest_size=16, key=parent).digest()
        hashes.append(parent)
    return hashes


class BlockManager:
    """The KV blocks of one replica. Their ids are 1 to `num_blocks`."""

    def __init__(self, num_blocks: int, *, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self._ref_counts = [0] * (num_blocks + 1)
        self._keys: list[tuple[int, BlockHash] | None] = [None] * (num_blocks + 1)
        """KV group and hash that each block is registered under."""
        self._by_key: dict[tuple[int, BlockHash], int] = {}
        self._free = list(range(num_blocks, 0, -1))
        """Unheld blocks with nothing to reuse; the end is taken first."""
        self._reusable: OrderedDict[int, None] = OrderedDict()
        """Unheld blocks with a hash, least recently released first."""

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._reusable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def allocate(self, count: int, *, reserve: int = 0) -> list[int] | None:
        """Take `count` blocks, with one reference each. If fewer than `reserve` free blocks would be left, none is
        taken and the result is None."""
        if count + reserve > self.num_free:
            return None
        return [self._take() for _ in range(count)]

    def find(self, block_hash: BlockHash, group: int = 0) -> int | None:
        """Return the block of a KV group under this hash, if any. Unless held, it may be evicted by `allocate`."""
        return self._by_key.get((group, block_hash))

    def hold(self, blocks: Iterable[int]) -> None:
        """Take one more reference to each of these blocks, which `find` returned."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._reusable[block]
            self._ref_counts[block] += 1

    def is_held_once(self, block: int) -> bool:
        """Whether a block has one reference."""
        return self._ref_counts[block] == 1

    def is_registered(self, block: int) -> bool:
        """Whether `find` may return a block."""
        return self._keys[block] is not None

    def register(self, block: int, block_hash: BlockHash, group: int = 0) -> None:
        """Make a held, full block of a KV group findable. Equal contents elsewhere keep the earlier entry."""
        key = (group, block_hash)
        if self.enable_prefix_caching and self._keys[block] is None and key not in self._by_key:
            self._keys[block] = key
            self._by_key[key] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Give one reference to each block back. Later blocks of a prefix become evictable before earlier ones."""
        counts, keys = self._ref_counts, self._keys
        for block in reversed(blocks):
            counts[block] -= 1
            if counts[block] == 0:
                if keys[block] is None:
                    self._free.append(block)
                else:
                    self._reusable[block] = None

    def unregister(self, blocks: Iterable[int]) -> None:
        """Make blocks unfindable that do not contain what they were registered for, whether they are held or not."""
        for block in blocks:
            key = self._keys[block]
            if key is not None:
                self._keys[block] = None
                del self._by_key[key]
                if self._ref_counts[block] == 0:
                    del self._reusable[block]
                    self._free.append(block)

    def forget_prefixes(self) -> None:
        """Make all blocks unfindable; held blocks stay with their holders."""
        self._free += self._reusable
        self._reusable.clear()
        self._by_key.clear()
        self._keys = [None] * (self.num_blocks + 1)

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._reusable.popitem(last=False)
            key = self._keys[block]
            assert key is not None
            del self._by_key[key]
            self._keys[block] = None
        self._ref_counts[block] = 1
        return block

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Assert that counts, free lists and the hash index agree with the lists of blocks that are held."""
        expected = [0] * (self.num_blocks + 1)
        for blocks in held:
            for block in blocks:
                expected[block] += 1
        assert expected[0] == 0, "the null block was handed out"
        assert self._ref_counts == expected, "reference counts differ from the block tables"
        unheld = {block for block in range(1, self.num_blocks + 1) if expected[block] == 0}
        assert len(self._free) + len(self._reusable) == len(unheld)
        assert set(self._free) | set(self._reusable) == unheld
        assert all(self._keys[block] is None for block in self._free)
        assert all(self._keys[block] is not None for block in self._reusable)
        indexed = {block: key for key, block in self._by_key.items()}
        assert indexed == {block: key for block, key in enumerate(self._keys) if key is not None}
