"""Activations of gated MLPs. Plain torch: what every faster version must give."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) × up, the two side by side in the last dimension. [T, 2 I] → [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
