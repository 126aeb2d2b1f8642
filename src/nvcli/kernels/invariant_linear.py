"""Matrix products that give a row the same bits whatever other rows there are, for runs that are batch-invariant.

On a GPU one Triton kernel takes any number of rows. On a CPU every row is a call of its own, so that the library sees
the same shapes each time. Shapes: T rows, `in` and `out` features.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nvcli.kernels.activation import ACTIVATE_AND_MUL, Activation
from nvcli.kernels.linear import has_many_rows


def invariant_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x Wᵀ + b. x: [T, in]; weight: [out, in] → [T, out], in `out` (contiguous) if that is given.

    `dtype` is the type of the result, without `out`; None: that of x.
    """
    if out is None:
        out = torch.empty(x.shape[0], weight.shape[0], dtype=dtype or x.dtype, device=x.device)
    if x.is_cuda:
        from nvcli.kernels.triton.products import linear as kernels

        kernels.invariant_linear(x, weight, bias, out)
        return out
    for row, result in zip(x, out, strict=True):
        result.copy_(torch.mv(weight, row))
    return out if bias is None else out.add_(bias)


def invariant_by_head(x: Tensor, weights: Tensor, out: Tensor) -> None:
    """Multiply each head by its own matrix, one after another: [T, N, in], [N, in, out] → `out` [T, N, out]."""
    for head, weight in enumerate(weights):
        out[:, head] = invariant_linear(x[:, head], weight.T.contiguous())


def invariant_gated_linear(x: Tensor, weight: Tensor, activation: Activation = "silu") -> Tensor:
    """activation(x Gᵀ) × (x Uᵀ) for a weight that holds G above U. weight: [2 × out, in] → [T, out].

    The kernel for many rows adds up in the same order (the same bits were seen on an H200).
    """
    if has_many_rows(x, weight):
        from nvcli.kernels.triton.products import linear as kernels

        return kernels.gated_linear_of_many_rows(x, weight, activation)
    return row_by_row(ACTIVATE_AND_MUL[activation], invariant_linear(x, weight))


def row_by_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function of rows to [T, …], on a CPU to each row alone: torch computes the last numbers of a tensor there
    by other instructions than the first ones, which shows in the last bit of an exponential."""
    if x.is_cuda or len(x) < 2:
        return function(x)
    return torch.cat([function(row) for row in torch.split(x, 1)])
