"""How much memory the KV cache may take: the plan, itemised, and what it comes to in blocks."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from nvcli.attention.kv_cache import KVCacheSpec
from nvcli.config import EngineConfig
from nvcli.errors import CapacityError

_CPU_SHARE = 0.25
"""Part of the free RAM that the ranks' caches take together, unless kv_cache_memory says otherwise."""


def format_bytes(num_bytes: float) -> str:
    """Such as `1.50 GiB`."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.2f} {units[0]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What one rank's memory goes to, in bytes."""

    budget: int
    """All that the run may use: GPU memory × gpu_memory_utilization, or the KV cache's own budget."""
    weights: int
    activations: int
    """Peak of the largest batches, over the weights."""
    graphs: int
    other: int
    """Held on the device by anything else: context, collectives, workspaces, other programs."""
    block_bytes: int
    max_blocks: int
    """More than this, the null block included, no job could use."""

    @property
    def kv_cache(self) -> int:
        return self.budget - self.weights - self.activations - self.graphs - self.other

    @property
    def num_blocks(self) -> int:
        """Blocks to allocate, the null block included."""
        return max(0, min(self.kv_cache // self.block_bytes, self.max_blocks))

    def describe(self) -> str:
        items = [
            ("budget", self.budget),
            ("weights", self.weights),
            ("activations", self.activations),
            ("CUDA graphs", self.graphs),
            ("other", self.other),
            ("left for KV", self.kv_cache),
        ]
        return ", ".join(f"{name} {format_bytes(size)}" for name, size in items if size or name == "left for KV")


def plan_memory(
    config: EngineConfig, spec: KVCacheSpec, device: torch.device, *, weights: int, activations: int, graphs: int
) -> MemoryPlan:
    """Raises CapacityError when not even one block beside the null block fits."""
    max_blocks = 1 + config.max_num_seqs * config.max_blocks_per_seq
    if config.kv_cache_memory is not None:
        fix = f"raise kv_cache_memory to at least {format_bytes(2 * spec.block_bytes)}"
        weights = activations = graphs = other = 0
        budget = config.kv_cache_memory
    elif device.type == "cpu":
        fix = "set kv_cache_memory, or lower block_size"
        weights = activations = graphs = other = 0
        budget = int(_available_ram() * _CPU_SHARE) // config.tensor_parallel_size
    else:
        fix = "raise gpu_memory_utilization or tensor_parallel_size, or lower max_num_batched_tokens"
        free, total = torch.cuda.mem_get_info(device)
        budget = int(total * config.gpu_memory_utilization)
        other = total - free - torch.cuda.memory_reserved(device)
    plan = MemoryPlan(
        budget=budget,
        weights=weights,
        activations=activations,
        graphs=graphs,
        other=other,
        block_bytes=spec.block_bytes,
        max_blocks=max_blocks,
    )
    if plan.num_blocks < 2:
        raise CapacityError(
            f"no room for the KV cache: {plan.describe()}; two blocks take {format_bytes(2 * spec.block_bytes)}. "
            f"To make it fit: {fix}"
        )
    return plan


def free_bytes(device: torch.device) -> int:
    """What a GPU has left, with torch's own cache given back."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def peak_bytes(device: torch.device) -> int:
    """The most memory that was in use: of the whole GPU (other programs' share as it is now), or this process's RAM."""
    if device.type == "cpu":
        with open("/proc/self/status") as status:
            return next((int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:")), 0)
    free, total = torch.cuda.mem_get_info(device)
    return total - free + torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device)


def _available_ram() -> int:
    with open("/proc/meminfo") as meminfo:
        for line in meminfo:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
