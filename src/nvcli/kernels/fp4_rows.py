"""Rows of FP4 weights as FP8: exact where e4m3 holds a row's numbers by one power of 2, else rounded.

A number of FP4 has two bits of precision, and times the scale of its block up to six, of which e4m3 holds four: most
numbers of NVFP4 (a scale in e4m3 for 16 neighbours) whose code or scale is a power of 2 lose nothing, and numbers of
MXFP4 (powers of 2 for 32) only where a row's exponents are too far apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.kernels.fp8_types import FP8, FP8_MAX, LEAST_MAX
from nvcli.kernels.mxfp4 import numbers_of_bytes
from nvcli.kernels.weight_formats import FP8_CAPABILITY


def fp4_to_fp8(packed: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Convert rows of FP4 to codes [rows, columns] e4m3 and the power of 2 of each row, [rows] float32.

    packed: [rows, columns / 2] uint8, the earlier one of two numbers in the lower half of its byte; scales: [rows,
    blocks] float32, one for each columns / blocks neighbours.
    """
    if has_kernel(packed.device):
        from nvcli.kernels.triton.elementwise import fp4_rows as kernels

        if kernels.takes(packed, scales):
            return kernels.fp4_to_fp8(packed, scales)
    values = _values(packed, scales)
    powers = powers_of_rows(values.abs().amax((1, 2)))
    return (values / powers.view(-1, 1, 1)).to(FP8).flatten(1), powers


def count_exact_blocks(packed: Tensor, scales: Tensor, codes: Tensor, powers: Tensor) -> Tensor:
    """Count the blocks of each row in which nothing was rounded: [rows] int64. `codes`, `powers`: what `fp4_to_fp8`
    made of the rows."""
    values = _values(packed, scales)
    return (codes.float().view(values.shape) * powers.view(-1, 1, 1) == values).all(-1).sum(1)


def _values(packed: Tensor, scales: Tensor) -> Tensor:
    """The numbers of rows, in float32: [rows, blocks, columns / blocks]."""
    return numbers_of_bytes(packed).view(*scales.shape, -1) * scales.unsqueeze(-1)


def has_kernel(device: torch.device) -> bool:
    """Whether the device converts rows in one kernel."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def powers_of_rows(largest: Tensor) -> Tensor:
    """Return the smallest powers of 2 by which no number of a row is too large for e4m3, given the largest ones, in
    float32."""
    mantissas, exponents = torch.frexp(largest.clamp(min=LEAST_MAX) / FP8_MAX)
    exponents -= (mantissas == 0.5).int()
    return ((exponents + 127) << 23).view(torch.float32)  # by their bits, exact on any device
