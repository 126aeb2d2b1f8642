"""The multiprocessors of a GPU: how many there are, as kernels whose programs work until all is done have so many
programs, or a multiple; and the shared memory of one."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton

_INTERPRETED = 4
"""So many has a GPU whose part the interpreter plays on a CPU."""


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
    return int(triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"])
