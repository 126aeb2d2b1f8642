"""Bounds that clamp what projections read and give, and the soft cap of logits. Plain torch is the reference; CUDA
tensors take the Triton kernel that is held to it.

Shapes: T rows, n bounds, S numbers within each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.kernels.dispatch import with_kernel


@with_kernel("elementwise.bounds")
def clamp_to_each(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Clamp the same numbers to each of some bounds. x: [T, S]; low, high: [n] → [n, T, S]."""
    return torch.clamp(x, low[:, None, None], high[:, None, None])


@with_kernel("elementwise.bounds")
def clamp_parts(x: Tensor, low: Tensor, high: Tensor) -> None:
    """Clamp each part of the rows to its bounds in place. x: [T, n × S], contiguous; low, high: [n]."""
    parts = x.view(len(x), len(low), -1)
    parts.copy_(torch.clamp(parts, low[:, None], high[:, None]))


@with_kernel("elementwise.bounds")
def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Compute cap × tanh(x / cap) in place, rounded once (Gemma 2, https://arxiv.org/abs/2408.00118). x: contiguous."""
    return x.copy_(x.float().div_(cap).tanh_().mul_(cap))
