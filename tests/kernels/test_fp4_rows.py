"""FP4 as FP8: exact where e4m3 can be, and rounded blocks are known; the kernel gives the bits of plain torch."""

from __future__ import annotations

import pytest
import torch

from fp8_interpreter import exact_conversions
from kernel_device import DEVICE, MARKS
from nvcli.kernels import fp4_rows as reference
from nvcli.kernels.fp8_types import FP8
from nvcli.kernels.mxfp4 import numbers_of_bytes
from nvcli.kernels.triton.elementwise import fp4_rows as kernels

pytestmark = MARKS
__all__ = ["exact_conversions"]

NVFP4, MXFP4 = 16, 32


def rows_of(block: int, num_blocks: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes, with scales as a format of such blocks has them: [rows, bytes] and [rows, blocks]."""
    generator = torch.Generator().manual_seed(block + num_blocks)
    packed = torch.randint(256, (num_rows, num_blocks * block // 2), dtype=torch.uint8, generator=generator)
    if block == MXFP4:
        spread = torch.arange(num_rows).unsqueeze(1) % 12 + 1
        scales = torch.exp2((torch.rand(num_rows, num_blocks, generator=generator) * spread).floor() - 9)
    else:
        codes = torch.randint(1, 127, (num_rows, num_blocks), dtype=torch.uint8, generator=generator)
        codes[::2] = codes[::2] // 8 * 8 % 64 + 32  # powers of 2, near each other
        scales = codes.view(FP8).float()
    scales[1, 0] = 0.0
    packed[2] = 0
    return packed, scales


@pytest.mark.parametrize(("block", "num_blocks"), [(NVFP4, 5), (NVFP4, 128), (MXFP4, 8), (MXFP4, 24)])
def test_rows_are_those_of_plain_torch(block: int, num_blocks: int) -> None:
    packed, scales = rows_of(block, num_blocks, 24)
    expected = reference.fp4_to_fp8(packed, scales)
    assert kernels.takes(packed, scales)
    found = kernels.fp4_to_fp8(packed.to(DEVICE), scales.to(DEVICE))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.cpu().view(torch.uint8), other.view(torch.uint8))


def test_what_is_exact_is_counted() -> None:
    """Blocks said to be exact are, the others are not, and numbers are rounded by at most a sixteenth."""
    packed, scales = rows_of(NVFP4, 40, 60)
    codes, powers = reference.fp4_to_fp8(packed, scales)
    exact = reference.count_exact_blocks(packed, scales, codes, powers)
    numbers = numbers_of_bytes(packed).float().view(60, 40, NVFP4) * scales.unsqueeze(-1)
    values = codes.float().view(60, 40, NVFP4) * powers.view(-1, 1, 1)
    assert torch.equal((values == numbers).all(-1).sum(1), exact)
    assert ((values - numbers).abs() <= torch.maximum(numbers.abs() / 16, powers.view(-1, 1, 1) * 2.0**-10)).all()
    assert (exact == 40).sum() > 10
    assert (exact < 40).sum() > 10
    assert (torch.frexp(powers).mantissa == 0.5).all()
