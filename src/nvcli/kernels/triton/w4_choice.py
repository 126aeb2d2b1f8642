"""Which kernel multiplies activations by weights of 4 bits: for few rows the one for all GPUs, for more Hopper's own
where it serves them, and for many the library's, with the weight as 16 bits in memory.

From how many rows on each is faster is in `w4_launches.py`. Shapes: T rows, `in` and `out` features, P parts.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from nvcli.kernels.expert_settings import GatedActivation
from nvcli.kernels.expert_types import ExpertWeights, Routes, W4Scales
from nvcli.kernels.triton import experts, w4_linear
from nvcli.kernels.triton.product_launch import Gate, ProductLaunch
from nvcli.kernels.triton.triton_version import has_known_gluon
from nvcli.kernels.triton.w4_launches import HOPPER_EXPERTS, HOPPER_ROWS, HopperLaunch, Kind
from nvcli.kernels.weight_formats import W4Format

_HOPPER_GROUP = 128
_HOPPER_ALIGNMENT = 16


def linear(x: Tensor, words: Tensor, scales: Tensor, format: W4Format, out: Tensor | None) -> Tensor | None:
    """See `nvcli.kernels.w4.w4_linear`, without a bias. None: the library's product is faster."""
    launch = choose_launch("plain", x, words, format)
    if launch is None:
        return None
    if isinstance(launch, ProductLaunch):
        return w4_linear.w4_linear(x, words, scales, format, launch, out)
    from nvcli.kernels.triton import hopper_w4

    result = hopper_w4.linear(x, words, scales, format, launch, out if launch.num_parts == 1 else None)
    return result if launch.num_parts == 1 else w4_linear.add_parts(result, x.dtype, out)


def linear_for_sum(x: Tensor, words: Tensor, scales: Tensor, format: W4Format) -> Tensor | None:
    """See `nvcli.kernels.w4.w4_linear_for_sum`. [T, out], or [P, T, out] float32. None: the library's is faster."""
    launch = choose_launch("sum", x, words, format)
    if launch is None:
        return None
    if isinstance(launch, ProductLaunch):
        return w4_linear.w4_linear_parts(x, words, scales, format, launch)
    from nvcli.kernels.triton import hopper_w4

    return hopper_w4.linear(x, words, scales, format, launch)


def gated_linear(x: Tensor, words: Tensor, scales: Tensor, format: W4Format, gate: Gate) -> Tensor | None:
    """See `nvcli.kernels.w4.w4_gated_linear`. None: a plain product is faster, with the activation behind it."""
    launch = choose_launch("gated", x, words, format)
    if launch is None:
        return None
    if isinstance(launch, ProductLaunch):
        return w4_linear.w4_gated_linear(x, words, scales, format, launch, gate)
    from nvcli.kernels.triton import hopper_w4

    return hopper_w4.gated_linear(x, words, scales, format, launch, is_gelu=gate == "gelu_tanh")


def apply_experts(
    x: Tensor, routes: Routes, weights: ExpertWeights, scales: W4Scales, activation: GatedActivation, out: Tensor
) -> None:
    """See `nvcli.kernels.experts.apply_experts`, for at least one token. All tensors are contiguous."""
    num_experts = len(weights.gate_up) + weights.num_others
    rows = routes.experts.numel() / num_experts
    if rows > HOPPER_EXPERTS[0][0] and _serves_experts(x, weights, scales):
        from nvcli.kernels.triton import hopper_w4

        launches = next((launches for least, launches in reversed(HOPPER_EXPERTS) if rows > least))
        hopper_w4.apply_experts(x, routes, weights, scales, activation, out, *launches)
        return
    experts.apply_experts(x, routes, weights, scales, activation, out)


def choose_launch(kind: Kind, x: Tensor, words: Tensor, format: W4Format) -> ProductLaunch | HopperLaunch | None:
    """Return the launch of a product; None: the weight is turned into 16 bits in memory, for the library."""
    least, most = HOPPER_ROWS[kind]
    if least < len(x) <= most and _serves(x, format) and len(words) % _HOPPER_ALIGNMENT == 0:
        from nvcli.kernels.triton import hopper_w4

        out_features = len(words) // 2 if kind == "gated" else len(words)
        return hopper_w4.choose_launch(kind, len(x), out_features, x.shape[1], x.device)
    return w4_linear.choose_launch(kind, len(x))


def _serves_experts(x: Tensor, weights: ExpertWeights, scales: W4Scales) -> bool:
    formats = (scales.gate_up_format, scales.down_format)
    sizes = (weights.gate_up.shape[1], weights.down.shape[1])
    return all(_serves(x, format) for format in formats) and all(size % _HOPPER_ALIGNMENT == 0 for size in sizes)


def _serves(x: Tensor, format: W4Format) -> bool:
    """Whether the kernel for Hopper takes activations like `x` and weights of that format."""
    is_taken = x.dtype == torch.bfloat16 if format.kind == "mxfp4" else x.dtype.itemsize == 2
    return is_taken and (format.kind == "mxfp4" or format.group == _HOPPER_GROUP) and _has_kernel(x.device)


@lru_cache(maxsize=64)
def _has_kernel(device: torch.device) -> bool:
    return has_known_gluon() and torch.cuda.get_device_capability(device) == (9, 0)
