"""The multiprocessors of a GPU: kernels whose programs work until all is done have so many programs, or a multiple."""

from __future__ import annotations

from functools import lru_cache

import torch

_INTERPRETED = 4
"""So many has a GPU whose part the interpreter plays on a CPU."""


@lru_cache(maxsize=64)
def num_multiprocessors(device: torch.device) -> int:
    """Count a GPU's multiprocessors."""
    if device.type != "cuda":
        return _INTERPRETED
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
