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


@with_kernel("elementwise.activation")
def sums_of_gates(gate_up: Tensor) -> Tensor:
    """Return the sum of each token's gates, and that of their squares. [T, 2 I] → [T, 2] float32."""
    gate = gate_up.chunk(2, dim=-1)[0].float()
    return torch.stack((gate.sum(dim=1), gate.square().sum(dim=1)), dim=1)


@with_kernel("elementwise.activation")
def gelu_tanh_above_and_mul(gate_up: Tensor, sums: Tensor, count: int, deviations: float) -> Tensor:
    """Compute gelu(relu(gate - cut)) × up with GELU's tanh approximation, where `cut` is so many standard deviations
    above the mean of a token's gates. [T, 2 I] → [T, I].

    `sums`: [T, 2] float32, those of `sums_of_gates`, added up over all ranks; `count`: the gates of all ranks.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    mean, mean_square = (sums / count).tensor_split((1,), dim=1)
    cut = mean + deviations * (mean_square - mean.square()).clamp_(min=0.0).sqrt_()
    return F.gelu(F.relu(gate.float() - cut), approximate="tanh").to(up.dtype).mul_(up)


ACTIVATE_AND_MUL: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": silu_and_mul,
    "gelu_tanh": gelu_tanh_and_mul,
}
