"""Activations of gated MLPs. Plain torch is the reference; CUDA tensors take the Triton kernel that is held to it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) × up (SwiGLU; Shazeer, 2020), the two side by side in the last dimension. [T, 2 I] → [T,
    I]."""
    if gate_up.is_cuda:
        from nvcli.kernels.triton import activation

        return activation.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
