"""Experts kept in 4 bits: plain torch against plain numbers, and the Triton kernels against plain torch."""

from __future__ import annotations

import pytest
import torch

from kernel_device import DEVICE, HAS_GPU, MARKS
from nvcli.kernels import w4
from nvcli.kernels.expert_settings import GatedActivation
from nvcli.kernels.expert_types import ExpertWeights, Routes, W4Scales
from nvcli.kernels.experts import apply_experts
from nvcli.kernels.mxfp4 import dequantise
from nvcli.kernels.triton import w4_experts as kernels
from nvcli.kernels.triton.w4_launches import ExpertLaunch, Launch
from nvcli.kernels.w4_experts import apply_w4_experts
from nvcli.kernels.weight_formats import W4Format

pytestmark = MARKS
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
GPT_OSS = GatedActivation(kind="clamped_swiglu", alpha=1.702, limit=7.0)
# Experts, k, hidden, intermediate size.
SHAPES = [(32, 4, 2880, 2880), (8, 2, 1024, 416)] if HAS_GPU else [(4, 2, 160, 96), (3, 1, 256, 32)]
FORMATS = {"mxfp4": W4Format("mxfp4", 32), "groups": W4Format("integer", 32)}


def make_weight(
    rows: int, columns: int, kind: W4Format, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Words, scales, and the values that they stand for."""
    groups = columns // kind.group
    if kind.kind == "mxfp4":
        blocks = torch.randint(0, 256, (rows, groups, 16), generator=generator, dtype=torch.uint8)
        exponents = torch.randint(119, 123, (rows, groups), generator=generator, dtype=torch.uint8)
        words, scales = w4.pack_mxfp4(blocks, exponents, kind)
        return words, scales, dequantise(blocks, exponents).float()
    codes = torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(rows, groups, generator=generator) * columns**-0.5 / 4).half().float()
    zeros = torch.randint(0, 16, (rows, groups), generator=generator).float()
    values = (codes.float() - zeros.repeat_interleave(kind.group, 1)) * scales.repeat_interleave(kind.group, 1)
    return w4.pack(codes, kind), w4.join_scales(scales, zeros), values


def make(
    shape: tuple[int, int, int, int], num_tokens: int, kind: W4Format, *, bias: bool = True
) -> tuple[torch.Tensor, Routes, ExpertWeights, W4Scales, ExpertWeights]:
    """The inputs, and behind them the same weights as plain numbers."""
    experts, chosen, hidden, size = shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, hidden, generator=generator).to(DTYPE)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:chosen] for _ in range(num_tokens)]).int()
    routes = Routes(ids, torch.rand(num_tokens, chosen, generator=generator))
    parts = []
    for rows, columns in ((2 * size, hidden), (hidden, size)):
        made = [make_weight(rows, columns, kind, generator) for _ in range(experts)]
        parts.append([torch.stack(one) for one in zip(*made, strict=True)])
    biases = [torch.randn(experts, rows, generator=generator).to(DTYPE) for rows in (2 * size, hidden)]
    words, scales, values = zip(*parts, strict=True)
    both = biases if bias else (None, None)
    return x, routes, ExpertWeights(*words, *both), W4Scales(*scales, kind, kind), ExpertWeights(*values, *both)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("kind", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_tokens", [2, 40] if not HAS_GPU else [1, 16, 200, 3000])
def test_as_plain_numbers(num_tokens: int, shape: tuple[int, int, int, int], kind: W4Format) -> None:
    x, routes, words, scales, plain = make(shape, num_tokens, kind)
    expected = apply_experts(x.float(), routes, ExpertWeights(*(one.float() for one in plain[:4])), GPT_OSS)
    out = torch.full(expected.shape, torch.nan, dtype=DTYPE)
    apply_w4_experts(x, routes, words, scales, GPT_OSS, out)
    assert error(out, expected) < (0.01 if HAS_GPU else 1e-5)
    moved = ExpertWeights(*(one.to(DEVICE) for one in words[:4]))
    found = torch.full(expected.shape, torch.nan, dtype=DTYPE, device=DEVICE)
    kernels.apply_w4_experts(
        x.to(DEVICE),
        Routes(*(one.to(DEVICE) for one in routes)),
        moved,
        W4Scales(scales.gate_up.to(DEVICE), scales.down.to(DEVICE), kind, kind),
        GPT_OSS,
        found,
        ExpertLaunch(*(Launch(16 if num_tokens < 40 else 32, 64, 3, 4) for _ in range(2))),
    )
    assert error(found.cpu(), expected) < (0.01 if HAS_GPU else 1e-5)
