"""Matrix products of linear layers. cuBLAS does nearly all of them; where a step has few rows and the weight is small,
launches and the tail of each product cost more than the product, and Triton kernels that split and fuse win. Where a
step has many rows, a Triton kernel that fuses an MLP's activation saves the way of its inputs through memory.

Shapes: T rows, `in` and `out` features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nvcli.kernels.activation import ACTIVATE_AND_MUL, Activation

_SMALL_WEIGHT = 8 << 20
"""Elements. Qwen3-0.6B's largest layer has 6.3 M, and gains; Qwen3-8B's smallest has 16.8 M, and does not."""
_FEW_ROWS = 128
_MANY_ROWS = 2048
"""From this number of rows on, the activation is fused with the products on Hopper. Measured on an H200 under sustained
load, in microseconds, fused against two steps: Qwen3-0.6B's layer 29.6 against 26.6 for 1,024 rows, 47.8 against 52.0
for 2,048 and 188 against 204 for 8,192; Qwen3-8B's 653 against 663 for 2,048 and 2,565 against 2,625 for 8,192."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """x Wᵀ + b. x: [T, in]; weight: [out, in] → [T, out], in `out` (contiguous) if that is given."""
    if bias is None and _is_small(x, weight):
        from nvcli.kernels.triton.products import linear as kernels

        return kernels.linear(x, weight, out)
    if out is None:
        return F.linear(x, weight, bias)
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def linear_for_sum(x: Tensor, weight: Tensor, residual: Tensor | None) -> Tensor | None:
    """x Wᵀ, for the residual sum after it. residual: [T, out], contiguous; None: the product must not be added yet.

    The result is what is still to be added to `residual`: [T, out], or float32 parts [P, T, out] that add up to it, as
    `add_rms_norm` takes them. None means that the product has been added already: of many rows, where its way through
    memory costs more than the norm gains by adding it (Qwen3-0.6B on an H200: 8 µs a layer for 8,192 rows).
    """
    if _is_small(x, weight):
        from nvcli.kernels.triton.products import linear as kernels

        return kernels.linear_parts(x, weight)
    if residual is not None and x.is_cuda and x.shape[0] >= _MANY_ROWS:
        residual.addmm_(x, weight.t())
        return None
    return F.linear(x, weight)


def gated_linear(x: Tensor, weight: Tensor, activation: Activation = "silu") -> Tensor:
    """activation(x Gᵀ) × (x Uᵀ) for a weight that holds G above U. weight: [2 × out, in] → [T, out]."""
    if _is_small(x, weight):
        from nvcli.kernels.triton.products import linear as kernels

        return kernels.gated_linear(x, weight, activation)
    if has_many_rows(x, weight):
        from nvcli.kernels.triton.products import linear as kernels

        return kernels.gated_linear_of_many_rows(x, weight, activation)
    return ACTIVATE_AND_MUL[activation](F.linear(x, weight))


def by_head(x: Tensor, weights: Tensor, out: Tensor) -> None:
    """Multiply each head by its own matrix: [T, N, in], [N, in, out] → `out` [T, N, out]."""
    torch.bmm(x.transpose(0, 1), weights, out=out.transpose(0, 1))


def _is_small(x: Tensor, weight: Tensor) -> bool:
    return (
        x.is_cuda
        and 0 < x.shape[0] <= _FEW_ROWS
        and weight.numel() <= _SMALL_WEIGHT
        and weight.element_size() == 2
        and weight.shape[0] % 64 == 0
        and weight.shape[1] % 256 == 0
    )


def has_many_rows(x: Tensor, weight: Tensor) -> bool:
    """Whether a product has so many rows that its activation is best fused with it, and the kernel takes its shapes."""
    return (
        x.is_cuda
        and x.shape[0] >= _MANY_ROWS
        and weight.element_size() == 2
        and weight.shape[0] % 256 == 0
        and weight.shape[1] % 64 == 0
        and torch.cuda.get_device_capability(x.device) == (9, 0)
    )
