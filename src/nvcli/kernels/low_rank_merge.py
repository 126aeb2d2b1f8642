"""Merging a low-rank product into a weight: out = base + scaling × upᵀ down, in float32, rounded once.

Plain torch is the reference; CUDA tensors take the Triton kernel, which is tested against it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.kernels.dispatch import with_kernel

_NUMBERS_AT_ONCE = 8 << 20
"""Numbers of a block of rows, which take memory in float32."""


@with_kernel("products.low_rank_merge")
def merge_low_rank(out: Tensor, base: Tensor, up: Tensor, down: Tensor, scaling: float) -> None:
    """Write base + scaling × upᵀ down into `out` [R, C], which may be `base` itself.

    base: [R, C]; up: [rank, R]; down: [rank, C]; in any floating-point types.
    """
    num_rows, num_columns = base.shape
    up, down = up.t().float(), down.float()
    step, is_exact = max(1, _NUMBERS_AT_ONCE // num_columns), out.dtype == torch.float32
    for first in range(0, num_rows, step):
        part = slice(first, first + step)
        merged = out[part].copy_(base[part]) if is_exact else base[part].to(torch.float32, copy=True)
        merged.addmm_(up[part], down, alpha=scaling)
        if not is_exact:
            out[part].copy_(merged)
