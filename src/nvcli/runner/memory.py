"""How much memory the KV cache may take, and how much memory is in use: measured on this rank's device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from nvcli.attention.kv_cache import KVCacheSpec
from nvcli.config import EngineConfig, format_bytes
from nvcli.errors import CapacityError, LimitsTooHigh
from nvcli.sizing.memory_plan import MemoryPlan

_CPU_SHARE = 0.25
"""Part of the free RAM that the ranks' caches take together, unless kv_cache_memory says otherwise."""
_OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED", "DefaultCPUAllocator")


def plan_memory(
    config: EngineConfig,
    spec: KVCacheSpec,
    device: torch.device,
    *,
    weights: int,
    buffers: int,
    activations: int,
    graphs: int,
    max_blocks: int,
    shared: int = 0,
) -> MemoryPlan:
    """Share a budget out over what a rank needs.

    max_blocks: more than these, the null block included, no job could use. shared: bytes of `buffers` that torch's
    allocator does not know, being memory that other GPUs reach.

    Ranks that follow others (`kv_blocks_before`) are not held to the budget, in which other programs count: a cache as
    large as before did fit, and what these have taken since is not free. Of what is free they leave the same share as
    others leave of the whole, for what no plan counts: kernels that load later, links that open later, holes.

    Raises LimitsTooHigh when not even one block beside the null block fits.
    """
    if device.type == "cpu":
        fix = "set kv_cache_memory, or lower block_size"
        budget, other = total_ram(), other_bytes(device, weights)
        kv_cache = int(_available_ram() * _CPU_SHARE) // config.num_ranks
    else:
        fix = "raise gpu_memory_utilization or tensor_parallel_size, or lower max_num_batched_tokens"
        total = torch.cuda.mem_get_info(device)[1]
        budget = int(total * config.gpu_memory_utilization)
        other = other_bytes(device, weights) - shared
        kv_cache = budget - weights - buffers - activations - graphs - other
    if config.kv_cache_memory is not None:
        fix = f"raise kv_cache_memory to at least {format_bytes(2 * spec.block_bytes)}"
        kv_cache = config.kv_cache_memory
    if config.kv_blocks_before is not None:
        max_blocks = min(max_blocks, 1 + config.kv_blocks_before)
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
            kv_cache = int(free * config.gpu_memory_utilization) - activations - graphs
    plan = MemoryPlan(
        budget=budget,
        weights=weights,
        buffers=buffers,
        activations=activations,
        graphs=graphs,
        other=other,
        kv_cache=kv_cache,
        block_bytes=spec.block_bytes,
        max_blocks=max_blocks,
    )
    if plan.num_blocks < 2:
        raise LimitsTooHigh(
            f"no room for the KV cache: {plan.describe()}; two blocks take {format_bytes(2 * spec.block_bytes)}. "
            f"To make it fit: {fix}"
        )
    return plan


def check_weights_fit(num_bytes: int, device: torch.device) -> None:
    """Raises CapacityError where a GPU has less memory free than the weights take."""
    if device.type == "cpu":
        return
    free, total = torch.cuda.mem_get_info(device)
    if num_bytes > free:
        held = total - free
        raise CapacityError(
            f"the weights take {format_bytes(num_bytes)} of each GPU's memory, and GPU {device.index} has "
            f"{format_bytes(free)} free of {format_bytes(total)} ({format_bytes(held)} are held by other programs and "
            "the driver). To make it fit: raise tensor_parallel_size (--tp) or pipeline_parallel_size (--pp), or free "
            "the GPU"
        )


def free_bytes(device: torch.device) -> int:
    """What a GPU has left, with torch's own cache given back."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def other_bytes(device: torch.device, weights: int) -> int:
    """What is held on the device and not by torch's tensors; on a CPU by this process, beside its weights."""
    if device.type == "cpu":
        with open("/proc/self/statm") as statm:
            return max(0, int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") - weights)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def total_ram() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def peak_bytes(device: torch.device) -> int:
    """The most memory that was in use: of the whole GPU (other programs' share as it is now), or this process's RAM."""
    if device.type == "cpu":
        with open("/proc/self/status") as status:
            return next((int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:")), 0)
    free, total = torch.cuda.mem_get_info(device)
    return total - free + torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device)


@contextmanager
def peak_allocated(device: torch.device) -> Iterator[Callable[[], int]]:
    """Bytes that torch's allocator took at most within, over what it held before; 0 on a CPU."""
    if device.type == "cpu":
        yield lambda: 0
        return
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    yield lambda: torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()


def _available_ram() -> int:
    with open("/proc/meminfo") as meminfo:
        for line in meminfo:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return total_ram()


def out_of_memory_line(error: BaseException) -> str | None:
    """What it says of too little memory, if it does: torch's allocators, the CUDA driver, Triton, NCCL and cuBLAS have
    words of their own. What it was raised in the handling of counts too: a capture of a graph that ran out of memory
    cannot be ended without another error."""
    lines = str(error).strip().splitlines()
    line = next((line for line in lines if any(words in line for words in _OUT_OF_MEMORY)), None)
    if line is None and error.__context__ is not None:
        return out_of_memory_line(error.__context__)
    return line


@contextmanager
def oom_as_limits_error(part: str) -> Iterator[None]:
    """Too little memory within, for a part of the start, is a LimitsTooHigh."""
    try:
        yield
    except RuntimeError as error:
        reason = out_of_memory_line(error)
        if reason is None:
            raise
        raise LimitsTooHigh(
            f"out of memory at {part} ({reason}): end what else uses this memory, lower gpu_memory_utilization (or "
            "kv_cache_memory), or raise tensor_parallel_size (--tp) or pipeline_parallel_size (--pp)"
        ) from None
