"""Gates between a block's result and the residual stream. Plain torch is the reference; CUDA tensors take the Triton
kernel that is held to it."""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.kernels.dispatch import with_kernel
from nvcli.kernels.residual_gate_settings import ResidualGates


@with_kernel("elementwise.residual_gates")
def add_through_gate(x: Tensor, residual: Tensor, gate: Tensor, scale: Tensor | None, settings: ResidualGates) -> None:
    """Norm x × scale without a weight, and make residual × √(1 - b²) + b × norm of `residual`, in place, where b =
    sigmoid(gate / temperature). residual: [T, H]; x: [T, H], or parts [P, T, H], which are added up first; gate, scale:
    [H] float32."""
    total = x.float().sum(dim=0) if x.dim() == 3 else x.float()
    if scale is not None:
        total = total * scale
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + settings.norm_eps)
    logits = gate / settings.temperature
    share = torch.sigmoid(logits)
    kept = (torch.sigmoid(-logits) * (1 + share)).clamp_(min=settings.least).sqrt_()
    residual.copy_(residual * kept + normed * share)
