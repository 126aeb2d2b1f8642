"""Merging a low-rank product into a weight: out = base + scaling × upᵀ down, in float32, rounded once.

Plain torch is the reference; CUDA tensors take the Triton kernel, which is tested against it. It reads the base and
writes the result without anything in between in memory, so that a GPU merges an adapter into all of its weights in
about the time that it takes to copy them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_low_rank(out: Tensor, base: Tensor, up: Tensor, down: Tensor, scaling: float) -> None:
    """Write base + scaling × upᵀ down into `out` [R, C], which may be `base` itself.

    base: [R, C], in the type of `out`, columns dense; up: [rank, R], strided, and down: [rank, C], columns dense, in
    any floating-point type.
    """
    if out.is_cuda:
        from nvcli.kernels.triton.products import low_rank_merge as kernels

        kernels.merge_low_rank(out, base, up, down, scaling)
        return
    out.copy_(torch.addmm(base.float(), up.t().float(), down.float(), alpha=scaling))
