"""Products of few rows in Triton against plain torch, and the sum that takes them in parts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernel_device import DEVICE, HAS_GPU, MARKS
from nvcli.kernels import norm as norm_reference
from nvcli.kernels.activation import gelu_tanh_and_mul, silu_and_mul
from nvcli.kernels.triton import linear, norm

# float32 products would go through tf32 on a GPU; there the kernels serve the half types only.
DTYPES = [torch.bfloat16, torch.float16] if HAS_GPU else [torch.float32]
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
ROWS = [1, 5, 16, 17, 64, 100, 128] if HAS_GPU else [1, 17, 70]
SHAPES = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (64, 256)] if HAS_GPU else [(64, 256), (128, 1024)]

pytestmark = [
    *MARKS,
    pytest.mark.parametrize("dtype", DTYPES),
    pytest.mark.parametrize("num_rows", ROWS),
    pytest.mark.parametrize("shape", SHAPES),
]


def inputs(shape: tuple[int, int], num_rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, shape[1], generator=generator).to(dtype)
    weight = (torch.randn(shape, generator=generator) * shape[1] ** -0.5).to(dtype)
    return x, weight


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.float().cpu(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_linear(shape: tuple[int, int], num_rows: int, dtype: torch.dtype) -> None:
    x, weight = inputs(shape, num_rows, dtype)
    out = linear.linear(x.to(DEVICE), weight.to(DEVICE))
    assert out.dtype == dtype
    assert_close(out, F.linear(x.float(), weight.float()), dtype)


def test_gated_linear(shape: tuple[int, int], num_rows: int, dtype: torch.dtype) -> None:
    x, weight = inputs(shape, num_rows, dtype)
    product = F.linear(x.float(), weight.float())
    out = linear.gated_linear(x.to(DEVICE), weight.to(DEVICE))
    assert_close(out, silu_and_mul(product), dtype)
    out = linear.gated_linear(x.to(DEVICE), weight.to(DEVICE), is_gelu=True)
    assert_close(out, gelu_tanh_and_mul(product), dtype)


def test_parts_add_up_in_the_norm(shape: tuple[int, int], num_rows: int, dtype: torch.dtype) -> None:
    x, weight = inputs(shape, num_rows, dtype)
    residual, scale = torch.randn(num_rows, shape[0]).to(dtype), torch.randn(shape[0]).to(dtype)
    parts = linear.linear_parts(x.to(DEVICE), weight.to(DEVICE))
    residual_here = residual.to(DEVICE, copy=True)
    out = norm.add_rms_norm(parts, residual_here, scale.to(DEVICE), 1e-6)
    expected = norm_reference.add_rms_norm(F.linear(x.float(), weight.float()).to(dtype), residual, scale, 1e-6)
    assert_close(residual_here, residual, dtype)
    assert_close(out, expected, dtype)
