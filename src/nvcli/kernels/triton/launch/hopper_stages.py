"""The stages of products on Hopper GPUs: tiles in shared memory that one group of warps fills and others multiply."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

LOADING_WARPS = gl.constexpr(1)
LOADING_REGISTERS = gl.constexpr(24)
"""The registers of a thread that loads."""


@gluon.jit
def make_barriers(NUM_STAGES: gl.constexpr, NUM_GROUPS: gl.constexpr):
    """Return the barriers at which a stage is full, and those at which all groups that multiply have left it."""
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=NUM_GROUPS)
    fence_async_shared()
    return full, free
