"""MemoryPlan: what one rank's memory goes to, item by item, and what is left for the KV cache in blocks."""

from __future__ import annotations

from dataclasses import dataclass

from nvcli.core.byte_sizes import format_bytes

ITEMS = ("weights", "buffers", "activations", "CUDA graphs", "other", "KV cache")
"""What a rank's memory goes to: tensors that live as long as the rank beside the weights (slot table, rotary table,
workspaces, memory that ranks share); the peak of the largest batches over that; graphs; all that torch did not allocate
(context, collectives, other programs); and the cache, which takes what is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What one rank's memory goes to, in bytes; see `ITEMS`."""

    budget: int
    """All that the run may use."""
    weights: int
    buffers: int
    activations: int
    graphs: int
    other: int
    kv_cache: int
    """What the cache may take."""
    block_bytes: int
    max_blocks: int
    """More than this, the null block included, no job could use."""

    @property
    def num_blocks(self) -> int:
        """Blocks to allocate, the null block included."""
        return max(0, min(self.kv_cache // self.block_bytes, self.max_blocks))

    def items(self) -> dict[str, int]:
        """By name, in the order of `ITEMS`; of the KV cache what it will take."""
        kv_cache = self.num_blocks * self.block_bytes
        sizes = (self.weights, self.buffers, self.activations, self.graphs, self.other, kv_cache)
        return dict(zip(ITEMS, sizes, strict=True))

    def describe(self) -> str:
        needed = [f"{name} {format_bytes(size)}" for name, size in self.items().items() if size and name != "KV cache"]
        return ", ".join([f"budget {format_bytes(self.budget)}", *needed, f"left for KV {format_bytes(self.kv_cache)}"])
