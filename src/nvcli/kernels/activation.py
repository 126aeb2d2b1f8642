"""Activations of gated MLPs. Plain torch is the reference; CUDA tensors take the Triton kernel that is held to it.

The gate and what it multiplies mostly stand side by side in the last dimension: [T, 2 I] → [T, I].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from nvcli.kernels.dispatch import with_kernel

Activation = Literal["silu", "gelu_tanh"]
"""The function on the gate; `gelu_tanh` is GELU in its tanh approximation."""


@with_kernel("elementwise.activation")
def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) × up (SwiGLU; Shazeer, 2020). [T, 2 I] → [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@with_kernel("elementwise.activation")
def clamped_silu_and_mul(gate_up: Tensor, limit: float) -> Tensor:
    """Compute silu(gate) × up, with silu(gate) at most `limit` and up within ±`limit`. [T, 2 I] → [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).clamp_(max=limit).mul_(up.clamp(-limit, limit))


@with_kernel("elementwise.activation")
def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """Compute gelu(gate) × up (GEGLU) with GELU's tanh approximation. [T, 2 I] → [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


@with_kernel("elementwise.activation")
def gelu_tanh_times(gate: Tensor, values: Tensor) -> Tensor:
    """Compute gelu(gate) × values with GELU's tanh approximation. [T, I] each, rows may lie apart → [T, I]."""
    return F.gelu(gate, approximate="tanh").mul_(values)


ACTIVATE_AND_MUL: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": silu_and_mul,
    "gelu_tanh": gelu_tanh_and_mul,
}
