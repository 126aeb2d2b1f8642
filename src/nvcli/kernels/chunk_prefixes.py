"""The prefixes that prefill chunks of a step share, on the device.

A group is a run of chunks, one after the other in the batch, whose requests begin with the same KV blocks. These
blocks are the group's prefix: its keys come before all of the chunks' tokens, so every token sees all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPrefixes:
    """The shared prefixes of a batch of R rows. They are the same in all KV groups of full attention."""

    ends: Tensor
    """[R] int32, the number of keys of the prefix that each row shares, whole blocks; 0: it shares none."""
    group_ends: Tensor
    """[R] int32: for the first row of a group, the row after its last one; for any other row, its own number."""
