"""Gates: one for each number of a row or for some neighbours, or one for the whole row, made of another row. Plain
torch is the reference; CUDA tensors take the Triton kernel that is held to it.

Shapes: T rows, N and H features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nvcli.kernels.dispatch import with_kernel
from nvcli.kernels.elementwise_settings import GateFunction
from nvcli.kernels.invariant_linear import invariant_linear, row_by_row


@with_kernel("elementwise.gates")
def gate_values(values: Tensor, gates: Tensor, function: GateFunction = "sigmoid") -> Tensor:
    """values × function(gates), in place. values: [T, N], contiguous; gates: [T, N / n], one for n neighbours, the last
    dimension dense."""
    if function == "sigmoid":
        factors = gates.sigmoid()
    else:
        factors = (F.softplus if function == "softplus" else F.silu)(gates.float()).to(values.dtype)
    values.view(*gates.shape, -1).mul_(factors.unsqueeze(-1))
    return values


def gate_rows(values: Tensor, x: Tensor, weight: Tensor, *, batch_invariant: bool = False) -> Tensor:
    """values × sigmoid(x weightᵀ), in place. values: [T, N]; x: [T, H]; weight: [1, H]; all contiguous.

    On a GPU a row gets the same bits whatever other rows there are; elsewhere only if `batch_invariant`.
    """
    if values.is_cuda:
        from nvcli.kernels.triton.elementwise import gates as kernels

        return kernels.gate_rows(values, x, weight)
    if batch_invariant:
        return values.mul_(row_by_row(torch.sigmoid_, invariant_linear(x, weight)))
    return values.mul_(F.linear(x, weight).sigmoid_())
