"""RMSNorm (Zhang and Sennrich, 2019), alone and fused with the addition to the residual stream. Plain torch is the
reference; CUDA tensors take the Triton kernels that are held to it.

It is computed in float32 whatever the storage type, weight included, and rounded once at the end. LayerNorm is the
same norm of a row from which its mean has been taken (`is_centered`), with a bias after it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nvcli.kernels.dispatch import with_kernel
from nvcli.kernels.elementwise_settings import NormGate


@with_kernel("elementwise.norm")
def rms_norm(x: Tensor, weight: Tensor, eps: float, *, is_centered: bool = False, bias: Tensor | None = None) -> Tensor:
    """Compute x / sqrt(mean(x²) + eps) × weight + bias over the last dimension. x: [..., H]; weight, bias: [H] →
    [..., H]."""
    x32 = x.float()
    if is_centered:
        x32 = x32 - x32.mean(-1, keepdim=True)
    mean_square = x32.square().mean(-1, keepdim=True)
    normed = (x32 * torch.rsqrt(mean_square + eps)).mul_(weight)
    return (normed if bias is None else normed.add_(bias)).to(x.dtype)


@with_kernel("elementwise.norm")
def add_rms_norm(
    delta: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    is_centered: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """Add `delta` to `residual` in place, and return the norm of the sum. delta, residual: [T, H] → [T, H].

    `delta` may be parts [P, T, H], which are added up first in float32 (`linear.linear_for_sum`,
    `experts.apply_experts`).
    """
    residual.add_(delta.sum(dim=0) if delta.dim() == 3 else delta)
    return rms_norm(residual, weight, eps, is_centered=is_centered, bias=bias)


@with_kernel("elementwise.norm")
def sum_rms_norm(parts: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Add up float32 parts [P, T, H], and return the norm of the sum in `dtype`: [T, H]."""
    return rms_norm(parts.sum(dim=0), weight, eps).to(dtype)


@with_kernel("elementwise.norm")
def add_normed(x: Tensor, residual: Tensor, weight: Tensor, eps: float, scalar: Tensor | None = None) -> None:
    """Add the norm of `x` to `residual` in place, and multiply the sum by `scalar`. residual: [T, H]; x: [T, H], or
    parts [P, T, H], which are added up first; scalar: [1]."""
    residual.add_(rms_norm(x.sum(dim=0) if x.dim() == 3 else x, weight, eps).to(residual.dtype))
    if scalar is not None:
        residual.mul_(scalar)


def sum_in_order(parts: Tensor) -> Tensor:
    """Add up parts [P, T, H], the first one first, in float32: [T, H] of their type. A row's sum has the same bits
    whatever other rows there are."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)


@with_kernel("elementwise.norm")
def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, gates_first: bool = False, function: NormGate = "silu"
) -> Tensor:
    """Compute norm(x) × weight × function(gate) over the last dimension; if `gates_first`, norm(x × function(gate)) ×
    weight.

    x: [T, heads, D], contiguous; gate: [T, heads, D], dense in its last two dimensions; weight: [D], or [heads, D] →
    [T, heads, D].
    """
    factor = (F.silu if function == "silu" else torch.sigmoid)(gate.float())
    if gates_first:
        return rms_norm(x.float() * factor, weight, eps).to(x.dtype)
    return (rms_norm(x.float(), weight, eps) * factor).to(x.dtype)


@with_kernel("elementwise.norm")
def norm_parts(x: Tensor, weight: Tensor | None, eps: float, sizes: tuple[int, ...]) -> Tensor:
    """Norm neighbouring parts of each row, of these sizes, each by itself: [T, H] → [T, H]. weight: [H]; None: there is
    none."""
    ones = torch.ones(x.shape[1], device=x.device) if weight is None else weight
    parts = zip(torch.split(x, list(sizes), dim=1), torch.split(ones, list(sizes)), strict=True)
    return torch.cat([rms_norm(part, own, eps) for part, own in parts], dim=1)


@with_kernel("elementwise.norm")
def squares_of_parts(x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Add up the squares of neighbouring parts of each row, of these sizes: [T, H], rows may lie apart → [T, parts]
    float32."""
    return torch.stack([part.float().square().sum(-1) for part in torch.split(x, list(sizes), dim=1)], dim=1)


@with_kernel("elementwise.norm")
def norm_shared_parts(
    x: Tensor, squares: Tensor, weights: tuple[Tensor, ...], eps: float, widths: tuple[int, ...]
) -> None:
    """Norm neighbouring parts of each row in place, of which other ranks have other numbers. x: [T, H], rows may lie
    apart; squares: those of `squares_of_parts`, added up over the ranks; weights: those of each part; widths: the
    numbers that each part has on all ranks together."""
    parts = torch.split(x, [len(weight) for weight in weights], dim=1)
    for part, weight, square, width in zip(parts, weights, squares.unbind(1), widths, strict=True):
        part.copy_(part.float() * torch.rsqrt(square / width + eps).unsqueeze(1) * weight)
