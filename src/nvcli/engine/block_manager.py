"""BlockManager: tracks who holds which KV block, and which blocks hold a reusable prefix.

Blocks are numbered from 1 (0 is the null block, never handed out) and counted by reference. A full block whose tokens
are known is registered under a hash that chains over all tokens before it (vLLM's scheme), so that equal prefixes are
found. All KV groups share the blocks; a block is registered for the one whose keys it holds. A block that no one holds
keeps its contents until it is needed: blocks without a hash go first, then the least recently released. This module
knows block numbers only, not what the blocks contain.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from nvcli.core.messages import TOKEN_BYTES

BlockHash = bytes


def hash_blocks(token_bytes: bytes, block_size: int, parent: BlockHash = b"") -> list[BlockHash]:
    """Return chained hashes of the full blocks of packed int32 tokens; `parent` is the hash of the block before them.

    They have 128 bits, so two different prefixes never collide in practice.
    """
    step = block_size * TOKEN_BYTES
    hashes = []
    for start in range(0, len(token_bytes) - step + 1, step):
        parent = blake2b(token_bytes[start : start + step], digest_size=16, key=parent).digest()
        hashes.append(parent)
    return hashes


def num_equal_blocks(left: bytes, right: bytes, block_bytes: int, least: int, most: int) -> int:
    """Count the leading blocks that two prompts share, known to be from `least` to `most`."""
    while least < most:
        middle = (least + most + 1) // 2
        if left.startswith(right[least * block_bytes : middle * block_bytes], least * block_bytes):
            least = middle
        else:
            most = middle - 1
    return least


class BlockManager:
    """The KV blocks of one replica. Their ids are 1 to `num_blocks`."""

    def __init__(self, num_blocks: int, *, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self._ref_counts = [0] * (num_blocks + 1)
        self._keys: list[tuple[int, BlockHash] | None] = [None] * (num_blocks + 1)
        """KV group and hash that each block is registered under."""
        self._by_hash: defaultdict[int, dict[BlockHash, int]] = defaultdict(dict)
        """The registered blocks of each KV group."""
        self._free = list(range(num_blocks, 0, -1))
        """Unheld blocks with nothing to reuse; the end is taken first."""
        self._reusable: OrderedDict[int, None] = OrderedDict()
        """Unheld blocks with a hash, least recently released first."""

    def empty(self, num_blocks: int) -> BlockManager:
        """Return a manager of other blocks, with the same settings."""
        return BlockManager(num_blocks, enable_prefix_caching=self.enable_prefix_caching)

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._reusable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def allocate(self, count: int, *, reserve: int = 0) -> list[int] | None:
        """Take `count` blocks, with one reference each. Return None, and take none, if fewer than `reserve` free
        blocks would be left."""
        if count + reserve > self.num_free:
            return None
        num_new = min(count, len(self._free))
        blocks = self._free[len(self._free) - num_new :][::-1]
        del self._free[len(self._free) - num_new :]
        while len(blocks) < count:
            blocks.append(self._evict())
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def find(self, block_hash: BlockHash, group: int = 0) -> int | None:
        """Return the block of a KV group under this hash, if any. `allocate` may evict it unless it is held."""
        return self._by_hash[group].get(block_hash)

    def find_leading(self, hashes: Iterable[BlockHash], group: int = 0) -> list[int]:
        """Return a KV group's blocks under these hashes, up to the first missing one."""
        blocks = []
        for block in map(self._by_hash[group].get, hashes):
            if block is None:
                break
            blocks.append(block)
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """Take one more reference to each of these blocks, which `find` returned."""
        counts = self._ref_counts
        for block in blocks:
            if counts[block] == 0:
                del self._reusable[block]
            counts[block] += 1

    def has_single_owner(self, block: int) -> bool:
        """Whether a block has one reference."""
        return self._ref_counts[block] == 1

    def is_registered(self, block: int) -> bool:
        """Whether `find` may return a block."""
        return self._keys[block] is not None

    def register(self, blocks: Iterable[int], hashes: Iterable[BlockHash], group: int = 0) -> None:
        """Make held, full blocks of a KV group findable. Equal contents elsewhere keep the earlier entry."""
        if not self.enable_prefix_caching:
            return
        keys, by_hash = self._keys, self._by_hash[group]
        for block, block_hash in zip(blocks, hashes, strict=True):
            if keys[block] is None and block_hash not in by_hash:
                keys[block] = group, block_hash
                by_hash[block_hash] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block. Later blocks of a prefix become evictable before earlier ones."""
        counts, keys = self._ref_counts, self._keys
        for block in reversed(blocks):
            counts[block] -= 1
            if counts[block] == 0:
                if keys[block] is None:
                    self._free.append(block)
                else:
                    self._reusable[block] = None

    def unregister(self, blocks: Iterable[int]) -> None:
        """Make blocks unfindable, held or not, whose contents are not what they were registered for."""
        for block in blocks:
            if self._keys[block] is not None:
                self._forget(block)
                if self._ref_counts[block] == 0:
                    del self._reusable[block]
                    self._free.append(block)

    def forget_prefixes(self) -> None:
        """Make all blocks unfindable; held blocks stay with their holders."""
        self._free += self._reusable
        self._reusable.clear()
        self._by_hash.clear()
        self._keys = [None] * (self.num_blocks + 1)

    def _evict(self) -> int:
        """Take the least recently released reusable block, and forget its contents."""
        block, _ = self._reusable.popitem(last=False)
        self._forget(block)
        return block

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        assert key is not None
        group, block_hash = key
        del self._by_hash[group][block_hash]
        self._keys[block] = None

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
        indexed = {
            block: (group, block_hash)
            for group, by_hash in self._by_hash.items()
            for block_hash, block in by_hash.items()
        }
        assert indexed == {block: key for block, key in enumerate(self._keys) if key is not None}
