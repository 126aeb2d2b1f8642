"""FP8: 8-bit floating point (e4m3) weights and activations, and products of them. Plain torch is the reference; CUDA
tensors take the Triton kernels that are held to it, and torch's own product on FP8 units.

A value is its code times a scale, which makes the largest of the values that share it 448, e4m3's largest number. With
the scaling `channel` a row of a weight and a row of activations has one scale; with `block` 128 × 128 of a weight have
one, and 128 neighbours of a row of activations (DeepSeek-V3, https://arxiv.org/abs/2412.19437). With the accumulation
`exact` products are summed in float32, at the latest each 256 numbers; with `fast` FP8 units, which keep about 14 bits,
may add up products by rows. Shapes: T rows, `in` and `out` features, G = in / 128, rounded up.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nvcli.core.config_types import FP8Accumulation
from nvcli.kernels import fp8_block_product
from nvcli.kernels.activation import ACTIVATE_AND_MUL, Activation
from nvcli.kernels.dispatch import with_kernel
from nvcli.kernels.expert_settings import ExpertActivation
from nvcli.kernels.fp8_types import FP8, FP8_MAX, LEAST_MAX, LowRankSum, QuantisedRows, numbers
from nvcli.kernels.norm import add_rms_norm, rms_norm
from nvcli.kernels.weight_formats import FP8_BLOCK, FP8Scaling
from nvcli.kernels.whole_numbers import ceil_div


@with_kernel("elementwise.fp8")
def quantise(x: Tensor, scaling: FP8Scaling) -> QuantisedRows:
    """Quantise activations. x: [T, in], its last dimension dense. NaN and infinity make their row, or their 128 values,
    NaN."""
    if scaling == "channel":
        codes, scales = _encode(x, x.float().abs().amax(-1, keepdim=True))
        return QuantisedRows(codes, scales.squeeze(-1), x.dtype)
    groups = _pad(x, 1).reshape(len(x), ceil_div(x.shape[1], FP8_BLOCK), FP8_BLOCK)
    codes, scales = _encode(groups, groups.float().abs().amax(-1, keepdim=True))
    return QuantisedRows(codes.flatten(1)[:, : x.shape[1]].contiguous(), scales.squeeze(-1), x.dtype)


@with_kernel("elementwise.norm")
def norm_and_quantise(
    delta: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    scaling: FP8Scaling,
    *,
    is_centered: bool,
    keeps_values: bool = False,
) -> QuantisedRows:
    """Do what `add_rms_norm` does, or without a `delta` `rms_norm`, and quantise the result, rounded to the residual's
    type as these would; `keeps_values` keeps it beside its codes."""
    if delta is None:
        normed = rms_norm(residual, weight, eps, is_centered=is_centered)
    else:
        normed = add_rms_norm(delta, residual, weight, eps, is_centered=is_centered)
    quantised = quantise(normed, scaling)
    return quantised._replace(values=normed) if keeps_values else quantised


@with_kernel("elementwise.fp8")
def activate_and_quantise(gate_up: Tensor, activation: Activation, scaling: FP8Scaling) -> QuantisedRows:
    """Compute activation(gate) × up and quantise it, rounded as `silu_and_mul` would. gate_up: [T, 2 I] → [T, I]."""
    return quantise(ACTIVATE_AND_MUL[activation](gate_up), scaling)


def quantise_weight(values: Tensor, scaling: FP8Scaling) -> tuple[Tensor, Tensor]:
    """Quantise a weight [out, in], on any device: its codes [out, in] e4m3, and its scales, float32: [out], or for
    blocks [out / 128, G], rounded up."""
    if scaling == "channel":
        codes, scales = _encode(values, values.float().abs().amax(-1, keepdim=True))
        return codes, scales.squeeze(-1)
    rows, columns = values.shape
    padded = _pad(_pad(values, 0), 1).contiguous()
    blocks = padded.view(-1, FP8_BLOCK, padded.shape[1] // FP8_BLOCK, FP8_BLOCK)
    codes, scales = _encode(blocks, blocks.float().abs().amax((1, 3), keepdim=True))
    return codes.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), scales.flatten(2).squeeze(1)


def quantise_weight_to(
    values: Tensor, scaling: FP8Scaling, codes: Tensor, scales: Tensor, low_rank: LowRankSum | None = None
) -> None:
    """Write what `quantise_weight` makes of `values` and of a product that is added to them, in float32, to `codes` and
    `scales`, bit for bit. All are contiguous."""
    if values.is_cuda and scaling == "channel":
        from nvcli.kernels.triton.elementwise import fp8_weights as kernels

        if low_rank is None:
            kernels.quantise_rows(values, codes, scales)
        else:
            kernels.quantise_rows(values, codes, scales, low_rank.up @ low_rank.down, low_rank.factor)
        return
    values = values.float()
    if low_rank is not None:
        values = torch.addmm(values, low_rank.up, low_rank.down, alpha=low_rank.factor)
    for target, found in zip((codes, scales), quantise_weight(values, scaling), strict=True):
        target.copy_(found)


def dequantise_weight(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the values of a weight in float32: [out, in]. `scales` are those of `quantise_weight`."""
    if scales.dim() == 1:
        return numbers(codes).mul_(scales.unsqueeze(-1))
    rows, columns = codes.shape
    factors = scales.repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :columns]
    return numbers(codes).mul_(factors)


def fp8_linear(
    x: QuantisedRows,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    out: Tensor | None,
    *,
    accumulation: FP8Accumulation = "exact",
) -> Tensor:
    """x Wᵀ + b. weight: [out, in] e4m3, with `scales` as `quantise_weight` gives them; bias: [out] → [T, out] in the
    type of the activations, in `out` (contiguous) if that is given. Weight and activations have the same scaling."""
    assert x.scales.dim() == scales.dim(), "blocks of a weight need those of its input, and rows those of rows"
    if not weight.is_cuda:
        result = F.linear(values_of_rows(x), dequantise_weight(weight, scales), None if bias is None else bias.float())
        return result.to(x.dtype) if out is None else out.copy_(result)
    result = _product(x, weight, scales, out, accumulation)
    if bias is not None:
        result.add_(bias)
    return result if out is None or result is out else out.copy_(result)


def fp8_gated_linear(
    x: QuantisedRows,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    activation: Activation,
    scaling: FP8Scaling,
    *,
    accumulation: FP8Accumulation = "exact",
) -> QuantisedRows:
    """activation(gate) × up of x Wᵀ + b, quantised. weight: [2 I, in], gate before up → [T, I]."""
    if weight.is_cuda and bias is None and scaling == x.scaling == "channel":
        from nvcli.kernels.triton.products import launch_rule
        from nvcli.kernels.triton.products.product_launch import HopperFP8Launch

        launch = launch_rule.choose("gated", x, weight, accumulation)
        if isinstance(launch, HopperFP8Launch):
            from nvcli.kernels.triton.products import hopper_fp8

            return hopper_fp8.gated_linear(x, weight, scales, launch, activation=ExpertActivation(kind=activation))
    product = fp8_linear(x, weight, scales, bias, None, accumulation=accumulation)
    return activate_and_quantise(product, activation, scaling)


def fp8_weight_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """x Wᵀ + b as `fp8_linear` computes it, for activations that are not quantised: [T, in] → [T, out]. The codes
    become numbers in the type of `x`, which holds them exactly, as they are multiplied, so that GPUs without FP8 units
    can do it."""
    if not weight.is_cuda:
        values = dequantise_weight(weight, scales)
        result = F.linear(x.float(), values, None if bias is None else bias.float()).to(x.dtype)
    else:
        from nvcli.kernels.triton.products import fp8_linear as kernels

        result = kernels.fp8_linear(x, weight, scales, kernels.choose_plain_launch(len(x)), out)
        if bias is not None:
            result.add_(bias)
    return result if out is None or result is out else out.copy_(result)


def fp8_linear_for_sum(
    x: QuantisedRows, weight: Tensor, scales: Tensor, *, accumulation: FP8Accumulation = "exact"
) -> Tensor:
    """x Wᵀ as `fp8_linear` computes it, for the residual sum after it: [T, out], or float32 parts [P, T, out] that add
    up to it, as `norm_and_quantise` and `add_rms_norm` take them."""
    if not weight.is_cuda or scales.dim() == 2:
        return fp8_linear(x, weight, scales, None, None)
    return _product(x, weight, scales, None, accumulation, is_for_sum=True)


def _product(
    x: QuantisedRows,
    weight: Tensor,
    scales: Tensor,
    out: Tensor | None,
    accumulation: FP8Accumulation,
    *,
    is_for_sum: bool = False,
) -> Tensor:
    """x Wᵀ on a GPU: [T, out], in `out` if the kernel takes that, or parts [P, T, out] for a sum."""
    from nvcli.kernels.triton.products import fp8_linear as kernels
    from nvcli.kernels.triton.products import launch_rule

    launch = launch_rule.choose("sum" if is_for_sum else x.scaling, x, weight, accumulation)
    if launch is not None:
        return kernels.fp8_linear(x, weight, scales, launch, out)
    if scales.dim() == 2:
        return fp8_block_product.block_product(x, weight, scales)
    return _scaled_product(x, weight, scales, out, accumulation)


def _scaled_product(
    x: QuantisedRows, weight: Tensor, scales: Tensor, out: Tensor | None, accumulation: FP8Accumulation
) -> Tensor:
    """x Wᵀ by the library's kernel, with a scale for each row of both, in `out` if that is bfloat16."""
    product: Tensor = torch._scaled_mm(  # which rounds to bfloat16 where rows have scales
        x.codes,
        weight.t(),
        scale_a=x.scales.unsqueeze(1),
        scale_b=scales.unsqueeze(0),
        out_dtype=torch.bfloat16,
        use_fast_accum=accumulation == "fast",
        **({"out": out} if out is not None and out.dtype == torch.bfloat16 else {}),
    )
    return product.to(x.dtype)


def values_of_rows(x: QuantisedRows) -> Tensor:
    """Return the values of activations in float32."""
    if x.scales.dim() == 1:
        return numbers(x.codes).mul_(x.scales.unsqueeze(-1))
    return numbers(x.codes).mul_(x.scales.repeat_interleave(FP8_BLOCK, 1)[:, : x.codes.shape[1]])


def _encode(values: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales of values. Those that share a scale are at most `largest` without their signs."""
    scales = largest.clamp(min=LEAST_MAX) / FP8_MAX
    return (values.float() / scales).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scales


def _pad(values: Tensor, dim: int) -> Tensor:
    """Fill up one of two dimensions with zeros to whole blocks."""
    missing = -values.shape[dim] % FP8_BLOCK
    return F.pad(values, (0, missing) if dim == 1 else (0, 0, 0, missing)) if missing else values
