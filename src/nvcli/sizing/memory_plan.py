"""MemoryPlan: one rank's memory, item by item, and the number of blocks left for the KV cache."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from nvcli.core.byte_sizes import format_bytes

ADAPTERS = "LoRA adapters"
ITEMS = ("weights", ADAPTERS, "buffers", "activations", "CUDA graphs", "other", "KV cache")
"""Items of a rank's memory: weights; the adapters that rows choose from, if there are any; tensors that live as long as
the rank (slot table, rotary table, workspaces, memory that ranks share); the peak of the largest batches over these;
graphs; everything that torch did not allocate (context, collectives, other programs); and the cache, which takes the
rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededMemory:
    """The memory of a rank beside its KV cache, in bytes; see `ITEMS`."""

    weights: int = 0
    adapters: int = 0
    buffers: int = 0
    activations: int = 0
    graphs: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        return sum(astuple(self))

    def items(self, kv_cache: int) -> dict[str, int]:
        """Return the bytes of each item, in the order of `ITEMS`, without adapters if there are none."""
        found = dict(zip(ITEMS, (*astuple(self), kv_cache), strict=True))
        return {name: size for name, size in found.items() if size or name != ADAPTERS}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """One rank's memory, in bytes; see `ITEMS`."""

    budget: int
    """The maximum that the run may use."""
    needed: NeededMemory
    kv_cache: int
    """The maximum that the cache may use."""
    block_bytes: int
    max_blocks: int
    """The most blocks that a job could use, the null block included."""

    @property
    def num_blocks(self) -> int:
        """The number of blocks to allocate, the null block included."""
        return max(0, min(self.kv_cache // self.block_bytes, self.max_blocks))

    def items(self) -> dict[str, int]:
        """Bytes by item, in the order of `ITEMS`; for the KV cache, what it will take."""
        return self.needed.items(self.num_blocks * self.block_bytes)

    def describe(self) -> str:
        needed = [f"{name} {format_bytes(size)}" for name, size in self.items().items() if size and name != "KV cache"]
        return ", ".join([f"budget {format_bytes(self.budget)}", *needed, f"left for KV {format_bytes(self.kv_cache)}"])
