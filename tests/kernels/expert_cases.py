"""Inputs for tests of experts: weights in every format that they are kept in, and the numbers that these stand for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nvcli.kernels import w4
from nvcli.kernels.expert_settings import ExpertActivation
from nvcli.kernels.expert_types import ExpertScales, ExpertWeights, Routes, W4Scales
from nvcli.kernels.fp8 import dequantise_weight, quantise_weight
from nvcli.kernels.fp8_types import FP8
from nvcli.kernels.mxfp4 import dequantise, numbers_of_codes
from nvcli.kernels.weight_formats import AFFINE_KINDS, FP8Scaling, W4Format

SILU = ExpertActivation()
GPT_OSS = ExpertActivation(kind="clamped_swiglu", alpha=1.702, limit=7.0, offset=1.0)
CLAMPED_SILU = ExpertActivation(kind="clamped_silu", limit=0.5)
Format = None | FP8Scaling | W4Format
"""None: plain numbers."""
FORMATS: dict[str, Format] = {
    "plain": None,
    "channel": "channel",
    "block": "block",
    "mxfp4": W4Format("mxfp4", 32),
    "mxfp4 for fp8": W4Format("mxfp4 for fp8", 32),
    "nvfp4": W4Format("nvfp4", 16),
    "groups of 32": W4Format("integer", 32),
    "groups of 128": W4Format("integer", 128),
    "affine": W4Format("affine", 32),
    "affine in 8 bits": W4Format("affine in 8 bits", 16),
}
Shape = tuple[int, int, int, int]
"""Experts, k, hidden, intermediate size."""


class Case(NamedTuple):
    """What the experts of a layer are given."""

    x: Tensor
    routes: Routes
    weights: ExpertWeights
    scales: ExpertScales | W4Scales | None
    values: ExpertWeights
    """The numbers that the weights stand for, in float32."""


def make(
    format: Format,
    shape: Shape,
    num_tokens: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    biases: bool = False,
    is_gated: bool = True,
) -> Case:
    """Make random weights and rows, with distinct random experts for each token."""
    num_experts, chosen, hidden, size = shape
    num_rows = 2 * size if is_gated else size
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    formats = [format.for_rows(rows) if isinstance(format, W4Format) else format for rows in (size, hidden)]
    made = []
    for kept, rows, columns in zip(formats, (num_rows, hidden), (hidden, size), strict=True):
        experts = [_make_weight(random(rows, columns) * columns**-0.5, kept, dtype) for _ in range(num_experts)]
        made.append([torch.stack(tensors) for tensors in zip(*experts, strict=True)])
    pair = [random(num_experts, rows).to(dtype) if biases else None for rows in (num_rows, hidden)]
    weights, scales, values = zip(*made, strict=True)
    joined: ExpertScales | W4Scales | None = None
    if isinstance(format, W4Format):
        joined = W4Scales(*scales, *formats)
    elif format is not None:
        joined = ExpertScales(*scales)
    plain = ExpertWeights(*values, *(None if bias is None else bias.float() for bias in pair))
    routes = routes_of(num_tokens, num_experts, chosen, device=device)
    return Case(random(num_tokens, hidden).to(dtype), routes, ExpertWeights(*weights, *pair), joined, plain)


def _make_weight(values: Tensor, format: Format, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return one expert's weight, its scales if it has some, and the numbers that they stand for."""
    if format is None:
        weight = values.to(dtype)
        return weight, weight, weight.float()
    if not isinstance(format, W4Format):
        codes, scales = quantise_weight(values, format)
        return codes, scales, dequantise_weight(codes, scales)
    rows, columns = values.shape
    bits = (values * 1e4).to(torch.int32) & 0xFF  # as good as random
    if format.kind in ("mxfp4", "mxfp4 for fp8"):
        blocks = bits[:, : columns // 2].reshape(rows, columns // 32, 16).to(torch.uint8)
        exponents = 119 + (bits[:, : columns // 32] & 3).to(torch.uint8)
        codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)
        return *w4.pack_mxfp4(codes, exponents, format), dequantise(blocks, exponents).float()
    if format.kind == "nvfp4":
        block_scales = (bits[:, : columns // 16] >> 1).clamp(max=126).to(torch.uint8).view(FP8)
        factor = values[:, 0].abs() * 1e-2 + 1e-4
        codes, scales = (bits & 15).to(torch.uint8), w4.join_block_scales(block_scales, factor, format)
        numbers = numbers_of_codes(codes).float() * block_scales.float().repeat_interleave(16, 1)
        return w4.pack(codes, format), scales, numbers * factor.unsqueeze(1)
    groups = columns // format.group
    if format.kind in AFFINE_KINDS:
        codes = (bits & ((1 << format.bits) - 1)).to(torch.uint8)
        joined = w4.join_halves(values[:, :groups] * 2 / format.zero, values[:, groups : 2 * groups])
        scales, offsets = (part.repeat_interleave(format.group, 1) for part in w4.part_halves(joined))
        return w4.pack(codes, format), joined, (codes.float() - format.zero) * scales + offsets
    scales, zeros = values[:, :groups].abs().half().float() / 4 + 1e-3, (bits[:, :groups] & 15).float()
    joined = w4.join_scales(scales, zeros)
    scales, zeros = (part.repeat_interleave(format.group, 1) for part in w4.part_scales(joined))
    codes = (bits & 15).to(torch.uint8)
    return w4.pack(codes, format), joined, (codes.float() - zeros) * scales


def routes_of(
    num_tokens: int,
    num_experts: int,
    experts_per_token: int,
    *,
    favourite: int | None = None,
    device: torch.device | str = "cpu",
) -> Routes:
    """Choose distinct random experts for each token; with `favourite`, that one for all tokens."""
    scores = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(0))
    if favourite is not None:
        scores[:, favourite] = 2
    weights, experts = scores.topk(experts_per_token)
    return Routes(experts.int().to(device), weights.to(device))


def first_of(case: Case, num_tokens: int) -> Case:
    """Return the case with fewer tokens."""
    routes = Routes(*(tensor[:num_tokens].contiguous() for tensor in case.routes[:2]))
    return case._replace(x=case.x[:num_tokens].contiguous(), routes=routes)


def share_of(case: Case, first: int, end: int) -> Case:
    """Return what a rank that holds some of the experts has."""

    def held(tensors: ExpertWeights | ExpertScales | W4Scales) -> list[object]:
        return [one[first:end].contiguous() if isinstance(one, Tensor) else one for one in tensors]

    num_others = len(case.values.gate_up) - (end - first)
    weights, values = (ExpertWeights(*held(one)[:4], first, num_others) for one in (case.weights, case.values))
    scales = None if case.scales is None else type(case.scales)(*held(case.scales))
    return case._replace(weights=weights, scales=scales, values=values)


def of_held(case: Case, results: Tensor) -> Tensor:
    """Return results [k, T, H] with zeros for those of other ranks' experts, which are undefined."""
    experts, weights = case.routes.experts - case.weights.first_expert, case.weights
    is_held = (experts >= 0) & (experts < len(weights.gate_up))
    return results.where(is_held.T.unsqueeze(2), 0)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())
