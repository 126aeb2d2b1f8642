"""Activations of MLPs without a gate. Plain torch is the reference; CUDA tensors take the Triton kernel that is held to
it.

Everything is computed in float32 and rounded once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nvcli.kernels.dispatch import with_kernel
from nvcli.kernels.elementwise_settings import PlainActivation
from nvcli.kernels.xielu import XIELU


@with_kernel("elementwise.plain_activation")
def activate(x: Tensor, activation: PlainActivation, numbers: XIELU | None = None) -> Tensor:
    """Apply an activation in place. x: [T, N], contiguous; `numbers`: those of xIELU."""
    values = x.float()
    if activation == "relu":
        return x.copy_(F.relu(values))
    if activation == "relu2":
        return x.copy_(F.relu(values).square())
    if activation in ("gelu", "gelu_tanh"):
        return x.copy_(F.gelu(values, approximate="none" if activation == "gelu" else "tanh"))
    assert numbers is not None
    rising, falling = F.softplus(numbers.alpha_p), numbers.beta + F.softplus(numbers.alpha_n)
    negative = torch.expm1(torch.minimum(values, numbers.eps)) - values
    return x.copy_(torch.where(values > 0, rising * values.square(), falling * negative) + numbers.beta * values)
