"""The tables of shared segments on the device.

A segment is a run of KV blocks, from one column of the block tables to another, that several running requests have in
common. The segments of a KV group are a forest: a request's segments follow each other without a gap, each after its
parent, and what is after the last of them is the request's own.

Shapes: G KV groups; N segments of each; S slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SEGMENT_FIELDS = 3
"""The int32 words of a segment: its first key, the end of its keys, and its parent (0: it has none)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentTables:
    """The shared segments of all KV groups. Segments are numbered from 1, in each group on their own; 0 is none."""

    segments: Tensor
    """[G, N + 1, SEGMENT_FIELDS] int32; the entry of segment 0 is zeros."""
    slot_segments: Tensor
    """[G, S] int32, the last segment of each slot's request; 0 where it has none."""

    @classmethod
    def empty(cls, num_groups: int, num_segments: int, num_slots: int, device: torch.device) -> SegmentTables:
        """Make the tables without any segment."""
        shape = num_groups, num_segments + 1, SEGMENT_FIELDS
        return cls(
            segments=torch.zeros(shape, dtype=torch.int32, device=device),
            slot_segments=torch.zeros(num_groups, num_slots, dtype=torch.int32, device=device),
        )
