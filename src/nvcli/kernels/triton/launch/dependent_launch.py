"""Programmatic dependent launch: on Hopper and later GPUs a kernel's programs begin while the kernel before them still
runs, and wait for its end where they say so, so that what a launch costs passes beside the kernel before.

Every program of a kernel that is launched so calls `await_kernel_before`, before it reads what other kernels write,
before it writes, and before it returns: who then waits for this kernel has waited for those before it, too. Norms with
FP8 codes for a result and quantising are launched as ever: as dependents they make a decode step of Qwen3-8B in FP8
longer (64 rows: 4,659 µs instead of 4,608). To bring weights to the L2 cache before the wait costs more than it gains:
the layers of Qwen3-0.6B without attention take an H200 662 µs for one row instead of 626, and 731 without dependent
launches.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl


@triton.jit
def await_kernel_before(DEPENDENT: tl.constexpr):
    """With DEPENDENT: wait until the kernel before has ended, then let the next one begin, which it does once all of
    this kernel's programs run."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@lru_cache(maxsize=64)
def dependent(device: torch.device) -> dict[str, bool]:
    """Return the launch arguments for a dependent launch where the GPU has it, and for an ordinary one elsewhere."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}
