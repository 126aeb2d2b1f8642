"""Activations of gated MLPs. Plain torch is the reference; CUDA tensors take the Triton kernel that is held to it.

The gate and what it multiplies mostly stand side by side in the last dimension: [T, 2 I] → [T, I].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from nvcli.kernels.dispatch import with_kernel
from nvcli.kernels.expert_settings import ExpertActivation

Activation = Literal["silu", "gelu_tanh"]
"""The function on the gate; `gelu_tanh` is GELU in its tanh approximation."""


@with_kernel("elementwise.activation")
def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) × up (SwiGLU; Shazeer, 2020). [T, 2 I] → [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@with_kernel("elementwise.activation")
def activate_and_mul(gate_up: Tensor, activation: ExpertActivation) -> Tensor:
    """Compute an activation that clamps, GELU itself (GEGLU) or squared relu. [T, 2 I] → [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation.kind == "gelu":
        return F.gelu(gate).mul_(up)
    if activation.kind == "gated_relu2":
        return F.relu(gate).square_().mul_(up)
    up = up.clamp(-activation.limit, activation.limit)
    if activation.kind == "clamped_silu":
        return F.silu(gate).clamp_(max=activation.limit).mul_(up)
    gate = gate.clamp(max=activation.limit)
    return gate * torch.sigmoid(gate * activation.alpha) * (up + activation.offset)


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
