"""FP8 weights with plain activations, which GPUs without FP8 units multiply: Triton kernels against plain torch."""

from __future__ import annotations

import pytest
import torch

from kernel_device import DEVICE, DTYPES, HAS_GPU, MARKS, TOLERANCE
from nvcli.kernels.expert_settings import GatedActivation
from nvcli.kernels.expert_types import ExpertScales, ExpertWeights, Routes
from nvcli.kernels.experts import apply_experts
from nvcli.kernels.fp8 import dequantise_weight, fp8_weight_linear, quantise_weight
from nvcli.kernels.fp8_experts import apply_fp8_experts
from nvcli.kernels.triton import fp8_experts, fp8_linear
from nvcli.kernels.triton.fp8_linear import choose_plain_launch
from nvcli.kernels.weight_formats import FP8Scaling

pytestmark = MARKS
SCALINGS = pytest.mark.parametrize("scaling", ["channel", "block"])
NUM_ROWS = [1, 16, 33, 100, 300] if not HAS_GPU else [1, 16, 33, 64, 300, 3000]
# out, in
SHAPES = [(6144, 4096), (1008, 2064)] if HAS_GPU else [(256, 128), (80, 208)]
# Experts, k, hidden, intermediate size.
EXPERTS = [(128, 8, 2048, 768), (8, 2, 1008, 384)] if HAS_GPU else [(4, 2, 256, 128), (3, 1, 144, 128)]
SILU = GatedActivation(kind="silu")


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


@SCALINGS
@pytest.mark.parametrize("shape", EXPERTS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 33, 140] if not HAS_GPU else [1, 200, 3000])
def test_experts(num_tokens: int, shape: tuple[int, int, int, int], scaling: FP8Scaling) -> None:
    """The kernels and plain torch give what plain experts of the same numbers do."""
    num_experts, chosen, hidden, size = shape
    dtype = torch.bfloat16 if HAS_GPU else torch.float32
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, hidden, generator=generator).to(dtype)
    ids = torch.stack([torch.randperm(num_experts, generator=generator)[:chosen] for _ in range(num_tokens)]).int()
    routes = Routes(ids, torch.rand(num_tokens, chosen, generator=generator))
    codes, scales, plain = [], [], []
    for rows, columns in ((2 * size, hidden), (hidden, size)):
        weights = torch.randn(num_experts, rows, columns, generator=generator) * columns**-0.5
        pairs = [quantise_weight(weight, scaling) for weight in weights]
        codes.append(torch.stack([code.view(torch.uint8) for code, _ in pairs]).view(torch.float8_e4m3fn))
        scales.append(torch.stack([factors for _, factors in pairs]))
        plain.append(torch.stack([dequantise_weight(*pair) for pair in pairs]))
    expected = apply_experts(x.float(), routes, ExpertWeights(*plain), SILU)
    on_cpu = torch.empty(expected.shape, dtype=dtype)
    apply_fp8_experts(x, routes, ExpertWeights(*codes), ExpertScales(*scales), SILU, on_cpu, quantises=False)
    found = torch.full(expected.shape, torch.nan, dtype=dtype, device=DEVICE)
    moved = [[one.to(DEVICE) for one in group] for group in (routes, codes, scales)]
    fp8_experts.apply_fp8_experts(
        x.to(DEVICE), Routes(*moved[0]), ExpertWeights(*moved[1]), ExpertScales(*moved[2]), SILU, found
    )
    for one in (on_cpu, found.cpu()):
        assert float((one.float() - expected).norm() / expected.norm()) < (0.01 if HAS_GPU else 1e-5)
