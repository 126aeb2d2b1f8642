"""Rows of FP4 weights as FP8 in Triton. A program holds one row in registers.

Everything it computes is exact but the rounding to e4m3, so that its results are those of plain torch.
"""

from __future__ import annotations

from threading import Lock

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.fp8_types import FP8, LEAST_MAX
from nvcli.kernels.whole_numbers import next_power_of_2, warps_of_row

_LEAST = tl.constexpr(LEAST_MAX)
_MOST_COLUMNS = 1 << 16
_LAUNCHING = Lock()
"""Weights are read on several threads, which would all compile the kernel at its first launch."""


@triton.jit
def _number(code):
    """The number of a code of FP4 in float32, of its bits s e e m: 0, 0.5, or 1.m × 2^(e - 1), and -0 as such."""
    rest = code & 7
    bits = (((rest >> 1) + 126) << 23) | ((rest & 1) << 22)
    bits = tl.where(rest < 2, rest * 0x3F000000, bits)
    return (bits | ((code >> 3) << 31)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_blocks"])
def _fp4_rows_kernel(
    packed_ptr,  # [rows, num_blocks × HALF] uint8
    scales_ptr,  # [rows, num_blocks] float32
    codes_ptr,  # [rows, num_blocks × 2 HALF] e4m3, written
    powers_ptr,  # [rows] float32, written
    num_blocks,
    BLOCKS: tl.constexpr,  # at least num_blocks
    HALF: tl.constexpr,  # bytes of a block
):
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    block, byte = tl.arange(0, BLOCKS), tl.arange(0, HALF)
    inside = block < num_blocks
    places = row * num_blocks * HALF + block[:, None] * HALF + byte[None, :]
    packed = tl.load(packed_ptr + places, mask=inside[:, None], other=0).to(tl.int32)
    scales = tl.load(scales_ptr + row * num_blocks + block, mask=inside, other=0.0)
    numbers = tl.reshape(tl.join(_number(packed & 15), _number(packed >> 4)), (BLOCKS, 2 * HALF))
    values = numbers * scales[:, None]

    # The largest number is 1.m × 2^e: with 448 = 1.75 × 2^8 at least 2^(e - 8), or twice that if 1.m is above 1.75.
    largest = tl.maximum(tl.max(tl.max(tl.abs(values), axis=1), axis=0), _LEAST).to(tl.int32, bitcast=True)
    exponent = (largest >> 23) - 8 + ((largest & 0x7FFFFF) > 0x600000).to(tl.int32)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)

    codes = (values * inverse).to(tl.float8e4nv)
    column = tl.arange(0, 2 * HALF)
    places = row * num_blocks * (2 * HALF) + block[:, None] * (2 * HALF) + column[None, :]
    tl.store(codes_ptr + places, codes, mask=inside[:, None])
    tl.store(powers_ptr + row, (exponent << 23).to(tl.float32, bitcast=True))


def takes(packed: Tensor, scales: Tensor) -> bool:
    """Whether the kernel takes these shapes: blocks of a power of 2, in rows that fit in registers."""
    columns, num_blocks = 2 * packed.shape[1], scales.shape[1]
    size = columns // max(num_blocks, 1)
    return size * num_blocks == columns <= _MOST_COLUMNS and size > 1 and size == next_power_of_2(size)


def fp4_to_fp8(packed: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """See `nvcli.kernels.fp4_rows.fp4_to_fp8`."""
    assert packed.is_contiguous()
    assert scales.is_contiguous()
    (rows, num_blocks), num_bytes = scales.shape, packed.shape[1]
    codes = torch.empty(rows, 2 * num_bytes, dtype=FP8, device=packed.device)
    powers = torch.empty(rows, dtype=torch.float32, device=packed.device)
    blocks, half = next_power_of_2(num_blocks), num_bytes // num_blocks
    with _LAUNCHING:
        _fp4_rows_kernel[(rows,)](
            packed,
            scales,
            codes,
            powers,
            num_blocks,
            BLOCKS=blocks,
            HALF=half,
            num_warps=warps_of_row(2 * half * blocks),
        )
    return codes, powers
