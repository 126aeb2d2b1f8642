"""The number of multiprocessors of a GPU, which sets the number of persistent programs, and the shared memory of
one."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton

_INTERPRETED, _INTERPRETED_BYTES = 4, 227 << 10
"""The multiprocessors and shared memory that the interpreter pretends to have on a CPU."""


@lru_cache(maxsize=64)
def num_multiprocessors(device: torch.device) -> int:
    """Count a GPU's multiprocessors."""
    if device.type != "cuda":
        return _INTERPRETED
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@lru_cache(maxsize=64)
def shared_memory_bytes(device: torch.device) -> int:
    """Return how much shared memory a program may have on a GPU."""
    if device.type != "cuda":
        return _INTERPRETED_BYTES
    driver = triton.runtime.driver.active
    index = driver.get_current_device() if device.index is None else device.index
    return int(driver.utils.get_device_properties(index)["max_shared_mem"])
