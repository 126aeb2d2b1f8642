"""Rows of FP4 weights as FP8: exact where e4m3 holds a row's numbers by one power of 2, else rounded.

A number of FP4 has two bits of precision, and times the scale of its block up to six, of which e4m3 holds four: most
numbers of NVFP4 (a scale in e4m3 for 16 neighbours) whose code or scale is a power of 2 lose nothing, and numbers of
MXFP4 (powers of 2 for 32) only where a row's exponents are too far apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.kernels.fp8_types import FP8, FP8_MAX, LEAST_MAX, FP8Rows
from nvcli.kernels.mxfp4 import numbers_of_bytes
from nvcli.kernels.weight_formats import FP8_CAPABILITY


def fp4_to_fp8(packed: Tensor, scales: Tensor) -> FP8Rows:
    """Convert rows of FP4. packed: [rows, columns / 2] uint8, the earlier one of two numbers in the lower half of its
    byte; scales: [rows, blocks] float32, one for each columns / blocks neighbours."""
    if has_kernel(packed.device):
        from nvcli.kernels.triton.elementwise import fp4_rows as kernels

        if kernels.takes(packed, scales):
            return kernels.fp4_to_fp8(packed, scales)
    rows, num_blocks = scales.shape
    values = numbers_of_bytes(packed).view(rows, num_blocks, -1) * scales.unsqueeze(-1)
    powers = powers_of_rows(values.abs().amax((1, 2)))
    codes = (values / powers.view(-1, 1, 1)).to(FP8)
    is_exact = codes.float().mul_(powers.view(-1, 1, 1)) == values
    return FP8Rows(codes.flatten(1), powers, is_exact.all(-1).sum(1, dtype=torch.int32))


def has_kernel(device: torch.device) -> bool:
    """Whether the device converts rows in one kernel."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def powers_of_rows(largest: Tensor) -> Tensor:
    """Return the smallest powers of 2 by which no number of a row is too large for e4m3, given the largest ones, in
    float32."""
    mantissas, exponents = torch.frexp(largest.clamp(min=LEAST_MAX) / FP8_MAX)
    exponents -= (mantissas == 0.5).int()
    return ((exponents + 127) << 23).view(torch.float32)  # by their bits, exact on any device
