"""Products with scales by blocks by torch's own kernel.

It is there on Hopper, with cuBLAS 12.9 and later. What it wants of shapes and of the order of scales has changed
between versions of torch. So it is asked once whether it gives what plain torch gives, and gets whole blocks alone.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from nvcli.kernels.fp8_types import FP8, QuantisedRows, numbers
from nvcli.kernels.weight_formats import FP8_BLOCK

_CAPABILITY = (9, 0)
_SCALES_TOGETHER = 4
"""The number of scales of a row of blocks is a multiple of this, as cuBLAS reads them."""
_TOLERANCE = 0.01


def takes(x: QuantisedRows, weight: Tensor) -> bool:
    """Tell whether the kernel is there and takes these shapes. The first call waits for the GPU."""
    (num_rows, in_features), out_features = x.shape, weight.shape[0]
    return (
        _is_right(weight.device)
        and x.dtype == torch.bfloat16
        and num_rows > 0
        and num_rows % FP8_BLOCK == out_features % FP8_BLOCK == in_features % (_SCALES_TOGETHER * FP8_BLOCK) == 0
    )


def block_product(x: QuantisedRows, weight: Tensor, scales: Tensor) -> Tensor:
    """x Wᵀ, with shapes that it takes: [T, in], [out, in] → [T, out] bfloat16."""
    row_scales = x.scales.t().contiguous().t()  # those of 128 columns one after the other
    product: Tensor = torch._scaled_mm(
        x.codes, weight.t(), scale_a=row_scales, scale_b=scales.t(), out_dtype=torch.bfloat16
    )
    return product


@lru_cache(maxsize=8)
def _is_right(device: torch.device) -> bool:
    """Compare the kernel's product of random numbers with the CPU's, for which no more kernels have to be loaded."""
    if torch.cuda.get_device_capability(device) != _CAPABILITY:
        return False
    generator = torch.Generator().manual_seed(0)
    shape, groups = (2 * FP8_BLOCK, _SCALES_TOGETHER * FP8_BLOCK), _SCALES_TOGETHER

    def rand(*sizes: int) -> Tensor:
        return torch.rand(*sizes, generator=generator, device="cpu")

    x = QuantisedRows((rand(*shape) * 4 - 2).to(FP8), rand(shape[0], groups), torch.bfloat16)
    weight, scales = (rand(*shape) * 4 - 2).to(FP8), rand(2, groups)
    try:
        on_gpu = QuantisedRows(x.codes.to(device), x.scales.to(device), x.dtype)
        found = block_product(on_gpu, weight.to(device), scales.to(device)).cpu()
    except (RuntimeError, ValueError):  # this torch, or its cuBLAS, has no such product
        return False
    values = numbers(x.codes) * x.scales.repeat_interleave(FP8_BLOCK, 1)
    spread = scales.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    expected = (values.double() @ (numbers(weight) * spread).double().t()).float()
    return bool((found.float() - expected).norm() < _TOLERANCE * expected.norm())
