"""FP8 weights with plain activations, which GPUs without FP8 units multiply: Triton kernels against plain torch."""

from __future__ import annotations

import pytest
import torch

from kernel_device import DEVICE, DTYPES, HAS_GPU, MARKS, TOLERANCE
from nvcli.kernels.fp8 import dequantise_weight, fp8_weight_linear, quantise_weight
from nvcli.kernels.triton import fp8_linear
from nvcli.kernels.triton.fp8_linear import choose_plain_launch
from nvcli.kernels.weight_formats import FP8Scaling

pytestmark = MARKS
SCALINGS = pytest.mark.parametrize("scaling", ["channel", "block"])
NUM_ROWS = [1, 16, 33, 100, 300] if not HAS_GPU else [1, 16, 33, 64, 300, 3000]
# out, in
SHAPES = [(6144, 4096), (1008, 2064)] if HAS_GPU else [(256, 128), (80, 208)]


@pytest.mark.parametrize("dtype", [*DTYPES, *([] if HAS_GPU else [torch.float16])])
def test_every_code_is_its_number(dtype: torch.dtype) -> None:
    """But NaN, which no weight is."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = torch.where(codes.float().isnan(), 0.0, codes.float()).to(codes.dtype).view(16, 16)
    found = fp8_linear.fp8_linear(
        torch.eye(16, dtype=dtype, device=DEVICE),
        weight.to(DEVICE),
        torch.ones(16, device=DEVICE),
        choose_plain_launch(16),
    )
    assert found.dtype == dtype
    assert torch.equal(found.cpu().float(), weight.float().t())


@SCALINGS
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products(shape: tuple[int, int], num_rows: int, scaling: FP8Scaling, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, shape[1], generator=generator).to(dtype)
    codes, scales = quantise_weight(torch.randn(shape, generator=generator) * shape[1] ** -0.5, scaling)
    expected = x.float() @ dequantise_weight(codes, scales).t()
    on_cpu = fp8_weight_linear(x, codes, scales, None, None)
    out = torch.full(expected.shape, torch.nan, dtype=dtype, device=DEVICE)
    launch = choose_plain_launch(num_rows)
    found = fp8_linear.fp8_linear(x.to(DEVICE), codes.to(DEVICE), scales.to(DEVICE), launch, out)
    assert found is out
    for one in (on_cpu, found.cpu()):
        torch.testing.assert_close(one.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
