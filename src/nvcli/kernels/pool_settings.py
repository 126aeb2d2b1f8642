"""Pools: how neighbouring keys are chosen together. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """Neighbouring keys of a request that are chosen together."""

    size: int = 1
    num_last: int = 0
    """The fewest of a token's last keys that are chosen in any case; those are also up to `size` - 1 keys before them,
    which fill no pool."""

    def most_chosen(self, top_k: int) -> int:
        """Return how many pools are among at most `top_k` chosen keys."""
        return (top_k - self.num_last - self.size + 1) // self.size


SINGLE_KEYS = Pools()
