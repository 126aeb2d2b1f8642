"""The memory available to the KV cache, and the memory in use, as measured on this rank's device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch

from nvcli.attention.kv_cache import KVCacheSpec
from nvcli.core.byte_sizes import format_bytes
from nvcli.core.engine_config import EngineConfig
from nvcli.core.messages import MemoryUse
from nvcli.core.system.host_memory import available_ram, peak_resident_bytes, resident_bytes, total_ram
from nvcli.errors import CapacityError, LimitsTooHigh
from nvcli.models.config import ModelConfig
from nvcli.sizing.adapters import choose_places
from nvcli.sizing.memory import with_affordable_drafts
from nvcli.sizing.memory_plan import MemoryPlan, NeededMemory

_CPU_SHARE = 0.25
"""Share of the free RAM that the caches of all ranks take together, unless kv_cache_memory is set."""
_ADAPTERS_RAM_SHARE = 0.5
"""Share of the free RAM that the adapters of all ranks may take."""
_OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED", "DefaultCPUAllocator")


def plan_memory(
    config: EngineConfig,
    spec: KVCacheSpec,
    device: torch.device,
    needed: NeededMemory,
    *,
    max_blocks: int,
    outside: int = 0,
) -> MemoryPlan:
    """Divide a rank's memory budget among the items that need memory; what is left is the KV cache's.

    All sizes are in bytes. `needed` lacks `other`, which is measured here. `max_blocks` is the most blocks, the null
    block included, that a job could use. `outside` is the part of the weights and buffers that torch's allocator does
    not know: regions, and what other GPUs reach.

    Ranks that replace others (`kv_blocks_before`) are not held to the budget, because it counts what other programs
    hold. A cache as large as before did fit, and what other programs have taken since is not free. These ranks leave
    the same share of the free memory that others leave of all memory, for what no plan counts: kernels that load later,
    links that open later, and gaps between allocations.

    Raises LimitsTooHigh if not even one block beside the null block fits.
    """
    weights = needed.weights + needed.adapters
    if device.type == "cpu":
        fix = "set kv_cache_memory, or lower block_size"
        budget, other = total_ram(), other_bytes(device, weights)
        kv_cache = int(available_ram() * _CPU_SHARE) // config.num_ranks_here
    else:
        fix = "raise gpu_memory_utilization or tensor_parallel_size, or lower max_num_batched_tokens"
        budget = int(device_bytes(device) * config.gpu_memory_utilization)
        other = other_bytes(device, weights) - outside
        kv_cache = budget - needed.total - other
    if config.kv_cache_memory is not None:
        fix = f"raise kv_cache_memory to at least {format_bytes(2 * spec.block_bytes)}"
        kv_cache = config.kv_cache_memory
    if config.kv_blocks_before is not None:
        max_blocks = min(max_blocks, 1 + config.kv_blocks_before)
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
            kv_cache = int(free * config.gpu_memory_utilization) - needed.activations - needed.graphs
    plan = MemoryPlan(
        budget=budget,
        needed=replace(needed, other=other),
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


def report_memory(
    device: torch.device, weights: dict[str, int], plan: MemoryPlan, measured: dict[str, int]
) -> MemoryUse:
    """Return the report of a rank's memory: its weights by group, its plan, and what each item was measured to take."""
    return MemoryUse(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        total=device_bytes(device),
        budget=plan.budget,
        weights=weights,
        planned=plan.items(),
        measured=measured,
    )


def device_bytes(device: torch.device) -> int:
    """Return the size of a device's memory."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else total_ram()


def affordable_draft_tokens(config: EngineConfig, model: ModelConfig, weight_bytes: int, device: torch.device) -> int:
    """Return the most tokens of a step with drafts, by the memory that the weights leave on a GPU."""
    left = int(device_bytes(device) * config.gpu_memory_utilization) - weight_bytes
    return with_affordable_drafts(config, model, left).max_draft_step_tokens


def check_positions_fit(config: EngineConfig, angles_per_position: int, device: torch.device) -> None:
    """Raise CapacityError if the tables of rotary positions need more memory than is free while they are computed.

    `angles_per_position` counts the cosines and sines of one position in all tables.
    """
    num_bytes = 2 * config.max_model_len * angles_per_position * torch.float32.itemsize
    free = available_ram() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    if num_bytes > free:
        raise CapacityError(
            f"the rotary tables for {config.max_model_len:,} tokens take {format_bytes(num_bytes)}, but only "
            f"{format_bytes(free)} are free: lower max_model_len, which defaults to max_position_embeddings of "
            f"{config.model_path / 'config.json'}"
        )


def check_weights_fit(num_bytes: int, device: torch.device) -> None:
    """Raise CapacityError if the weights need more memory than a GPU has free."""
    if device.type == "cpu":
        return
    free, total = torch.cuda.mem_get_info(device)
    if num_bytes > free:
        held = total - free
        raise CapacityError(
            f"the weights take {format_bytes(num_bytes)} of each GPU, but GPU {device.index} has only "
            f"{format_bytes(free)} of {format_bytes(total)} free (other programs and the driver hold "
            f"{format_bytes(held)}). To make it fit: raise tensor_parallel_size (--tp) or pipeline_parallel_size "
            "(--pp), or free the GPU"
        )


def places_that_fit(config: EngineConfig, num_bytes: Callable[[int], int], device: torch.device) -> int:
    """Return how many LoRA adapters are on the device at a time (`choose_places`). `num_bytes` returns the size of that
    many adapters. Raises CapacityError if there is no memory for them."""
    free = None if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    most = choose_places(config, num_bytes, free)
    if free is not None and num_bytes(most) > free:
        raise CapacityError(
            f"{most:,} LoRA adapters take {format_bytes(num_bytes(most))} of each GPU, but GPU {device.index} has only "
            f"{format_bytes(free)} free: lower lora.max_loaded, or raise tensor_parallel_size (--tp)"
        )
    return most


def host_bytes_for_adapters(config: EngineConfig) -> int:
    """Return how many bytes of LoRA adapters a rank keeps in host memory."""
    return int(available_ram() * _ADAPTERS_RAM_SHARE) // config.num_ranks_here


def free_bytes(device: torch.device) -> int:
    """Return a GPU's free memory in bytes, after releasing torch's own cache."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def reserve_contiguous(num_bytes: int, device: torch.device) -> None:
    """Make torch's allocator reserve a GPU's free memory in one piece, from which steps then take what they need.

    Otherwise steps launched kernel by kernel take a new piece for each number of logits larger than any before, and
    with vocabularies of 200,000 tokens the discarded pieces fill the GPU. If not enough is free, as with a large
    `kv_cache_memory`, nothing is reserved: only the largest steps need it.
    """
    if device.type == "cuda":
        with suppress(torch.OutOfMemoryError):
            torch.empty(num_bytes, dtype=torch.uint8, device=device)


def other_bytes(device: torch.device, weights: int) -> int:
    """Return the bytes on the device that torch does not hold; on a CPU, this process's memory besides its weights and
    adapters, which take `weights` bytes."""
    if device.type == "cpu":
        return max(0, resident_bytes() - weights)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory use in bytes: of the GPU, counting other programs as they are now, or of this process."""
    if device.type == "cpu":
        return peak_resident_bytes()
    free, total = torch.cuda.mem_get_info(device)
    return total - free + torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device)


@contextmanager
def peak_allocated(device: torch.device) -> Iterator[Callable[[], int]]:
    """Measure the peak of torch's allocations within the block, in bytes above the start; 0 on a CPU."""
    if device.type == "cpu":
        yield lambda: 0
        return
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    yield lambda: torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()


def out_of_memory_line(error: BaseException) -> str | None:
    """Return the line of an error's message that says that memory ran out, or None if there is none.

    Torch's allocators, the CUDA driver, Triton, NCCL and cuBLAS each word it differently. If this error was raised
    while another was handled, that one is searched too: ending the capture of a graph that ran out of memory raises a
    second error.
    """
    lines = str(error).strip().splitlines()
    line = next((line for line in lines if any(words in line for words in _OUT_OF_MEMORY)), None)
    if line is None and error.__context__ is not None:
        return out_of_memory_line(error.__context__)
    return line


@contextmanager
def oom_as_limits_error(part: str) -> Iterator[None]:
    """Raise LimitsTooHigh if memory runs out within the block, which is the named part of a rank's start."""
    try:
        yield
    except RuntimeError as error:
        reason = out_of_memory_line(error)
        if reason is None:
            raise
        raise LimitsTooHigh(
            f"out of memory at {part} ({reason}): end other programs that use this memory, lower "
            "gpu_memory_utilization (or kv_cache_memory), or raise tensor_parallel_size (--tp) or "
            "pipeline_parallel_size (--pp)"
        ) from None
