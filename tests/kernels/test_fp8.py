"""FP8 codes and products in plain torch, which the kernels are held to."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from nvcli.kernels.fp8 import (
    activate_and_quantise,
    dequantise_weight,
    fp8_gated_linear,
    fp8_linear,
    norm_and_quantise,
    quantise,
    quantise_weight,
)
from nvcli.kernels.fp8_types import FP8, FP8_MAX, numbers
from nvcli.kernels.norm import add_rms_norm
from nvcli.kernels.weight_formats import FP8Scaling

SCALINGS = pytest.mark.parametrize("scaling", ["channel", "block"])
E4M3_STEP = 2.0**-4
"""Half of the relative distance between neighbours, at most."""


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values * torch.logspace(-3, 3, shape[0]).unsqueeze(1)


@SCALINGS
@pytest.mark.parametrize("size", [16, 128, 200, 384])
def test_values_are_as_near_as_their_scale_allows(scaling: FP8Scaling, size: int) -> None:
    x = rand(5, size)
    rows = quantise(x, scaling)
    assert rows.codes.dtype == FP8
    assert rows.shape == x.shape
    scales = rows.scales.unsqueeze(1) if scaling == "channel" else rows.scales.repeat_interleave(128, 1)[:, :size]
    error = (rows.codes.float() * scales - x).abs()
    assert (error <= E4M3_STEP * x.abs() + 2.0**-10 * scales).all(), "below the normal numbers the steps are even"
    largest = rows.codes.float().abs().amax(1)
    assert (largest == FP8_MAX).all()


@SCALINGS
def test_weights_too(scaling: FP8Scaling) -> None:
    weight = rand(200, 300)
    codes, scales = quantise_weight(weight, scaling)
    assert scales.shape == ((200,) if scaling == "channel" else (2, 3))
    values = dequantise_weight(codes, scales)
    largest = weight.abs().amax() if scaling == "block" else weight.abs().amax(1, keepdim=True)
    assert ((values - weight).abs() <= E4M3_STEP * weight.abs() + 2.0**-10 / FP8_MAX * largest).all()


@SCALINGS
def test_zeros_stay_zeros_and_what_is_not_finite_is_not_hidden(scaling: FP8Scaling) -> None:
    x = torch.ones(4, 256)
    x[0] = 0
    x[1, 3], x[2, 200] = torch.nan, torch.inf
    weight, scales = quantise_weight(torch.eye(256)[:16], scaling)
    product = fp8_linear(quantise(x, scaling), weight, scales, None, None)
    assert (product[0] == 0).all()
    assert product[1].isnan().any()
    assert not product[2].isfinite().all()
    assert (product[3] == 1).all()


@SCALINGS
def test_products_with_a_bias_into_memory_that_is_there(scaling: FP8Scaling) -> None:
    x, weight, bias = rand(5, 256), rand(48, 256, seed=1), rand(48, 1, seed=2).flatten()
    codes, scales = quantise_weight(weight, scaling)
    rows = quantise(x, scaling)
    factors = rows.scales.unsqueeze(1) if scaling == "channel" else rows.scales.repeat_interleave(128, 1)
    values, kept = rows.codes.float() * factors, dequantise_weight(codes, scales)
    expected = F.linear(values, kept, bias)
    rounding = 1e-6 * F.linear(values.abs(), kept.abs(), bias.abs())  # processors add up in different orders
    assert ((fp8_linear(rows, codes, scales, bias, None) - expected).abs() <= rounding).all()
    out = torch.empty(5, 48)
    assert fp8_linear(rows, codes, scales, None, out) is out
    assert ((out + bias - expected).abs() <= rounding).all()


@SCALINGS
def test_fused_operations_are_those_in_two_steps(scaling: FP8Scaling) -> None:
    x, delta, weight = rand(5, 256), rand(5, 256, seed=1), torch.rand(256)
    summed = x.clone()
    expected = quantise(add_rms_norm(delta, summed, weight, 1e-6), scaling)
    found = norm_and_quantise(delta, x, weight, 1e-6, scaling, is_centered=False)
    assert torch.equal(x, summed), "the sum goes into the residual stream"
    assert torch.equal(found.codes.float(), expected.codes.float())
    assert torch.equal(found.scales, expected.scales)
    gate, up = delta.chunk(2, dim=1)
    expected = quantise(F.silu(gate) * up, scaling)
    assert torch.equal(activate_and_quantise(delta, "silu", scaling).codes.float(), expected.codes.float())


@SCALINGS
def test_gate_and_up_projection_give_what_the_next_layer_takes(scaling: FP8Scaling) -> None:
    x, bias = quantise(rand(5, 128), "channel"), rand(512, 1, seed=2).flatten()
    weight = quantise_weight(rand(512, 128, seed=1), "channel")
    expected = activate_and_quantise(fp8_linear(x, *weight, bias, None), "gelu_tanh", scaling)
    found = fp8_gated_linear(x, *weight, bias, "gelu_tanh", scaling)
    assert found.scaling == scaling
    assert torch.equal(found.codes.float(), expected.codes.float())
    assert torch.equal(found.scales, expected.scales)


def test_numbers_of_codes() -> None:
    """Looked up in pairs, they are what torch gives, wherever the codes lie."""
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    square = codes.view(16, 16)
    for some in (codes, codes[1:], codes[1:255], square.t(), square[:, 3:8], square[3:, 2:], codes[:0]):
        found, expected = numbers(some), some.float()
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())
        assert found.shape == expected.shape
