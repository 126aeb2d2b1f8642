"""PromptHashes: the hashes of prompts' blocks, computed once for a prefix that many prompts share.

When most of a prompt is cached, hashing is most of its cost. So recent hashes are kept with their tokens, as *runs* of
blocks between the points where prompts diverge. A prompt is matched run by run by comparing tokens, which is much
cheaper, and only the rest is hashed.
"""

from __future__ import annotations

from nvcli.core.lru_cache import LruCache
from nvcli.core.messages import TOKEN_BYTES
from nvcli.engine.block_manager import BlockHash, hash_blocks, num_equal_blocks

_MAX_BYTES = 16 * 1024 * 1024
"""Approximate maximum memory of the runs, beyond which the least recently used are dropped. With blocks of 64 this is
three million tokens, fewer if runs are short."""
_RUN_BYTES = 512
_HASH_BYTES = 64
"""Approximate memory of a hash, and of a run besides its tokens and hashes."""

_Run = tuple[bytes, list[BlockHash]]
"""The packed tokens of some consecutive blocks, and their hashes."""


class PromptHashes:
    """Chained hashes (`hash_blocks`) of prompts, as one replica sees them."""

    def __init__(self, block_size: int, *, max_bytes: int = _MAX_BYTES) -> None:
        self.block_size = block_size
        self._runs = LruCache[tuple[BlockHash, bytes], _Run](max_bytes, _size)
        """(hash before the run, tokens of its first block) → run."""

    def of(self, token_bytes: bytes, root: BlockHash = b"") -> list[BlockHash]:
        """Return the hashes of all full blocks of a prompt of packed int32 tokens, which begin from `root`. The caller
        may modify the list."""
        block_bytes = self.block_size * TOKEN_BYTES
        end = len(token_bytes) // block_bytes * block_bytes
        hashes: list[BlockHash] = []
        while (start := len(hashes) * block_bytes) < end:
            parent = hashes[-1] if hashes else root
            key = parent, token_bytes[start : start + block_bytes]
            run = self._runs.get(key)
            if run is None:
                rest = token_bytes[start:end]
                new = hash_blocks(rest, self.block_size, parent)
                self._runs.put(key, (rest, new))
                return hashes + new
            tokens, known = run
            if token_bytes.startswith(tokens, start):
                hashes += known
            else:
                most = min(len(tokens), end - start) // block_bytes
                count = num_equal_blocks(tokens, token_bytes[start:end], block_bytes, 1, most)
                hashes += known[:count]
                self._cut(key, run, count)
        return hashes

    def _cut(self, key: tuple[BlockHash, bytes], run: _Run, count: int) -> None:
        """Split a run after `count` blocks, so that the next prompt need not search for the point of divergence."""
        tokens, known = run
        block_bytes = self.block_size * TOKEN_BYTES
        at = count * block_bytes
        self._runs.put(key, (tokens[:at], known[:count]))
        self._runs.put((known[count - 1], tokens[at : at + block_bytes]), (tokens[at:], known[count:]))


def _size(key: tuple[BlockHash, bytes], run: _Run) -> int:
    tokens, hashes = run
    return len(tokens) + _HASH_BYTES * len(hashes) + _RUN_BYTES
