"""MXFP4 in plain torch: numbers of 4 bits, of which each 32 neighbours share a scale of 8 bits (OCP Microscaling
Formats, https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf)."""

from __future__ import annotations

import torch
from torch import Tensor

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of E2M1 without the sign, by their lower three bits."""
SCALE_BIAS = 127
_NAN_SCALE = 255


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers in bfloat16, which holds them exactly, or as infinity above its range: [..., G × 32].

    blocks: [..., G, 16] uint8, the earlier one of two numbers in the lower half of its byte; scales: [..., G] uint8,
    exponents of 2 with a bias of 127, or 255 for NaN.
    """
    return numbers_of_bytes(blocks).mul_(powers_of_scales(scales).unsqueeze(-1)).flatten(-2)


def numbers_of_bytes(packed: Tensor, pairs: Tensor | None = None) -> Tensor:
    """Return the numbers of bytes [..., n] without their scales, in bfloat16: [..., 2 n], the lower half of a byte
    first. `pairs`: what `byte_pairs` returns for the device; None: it is made."""
    # Both numbers of a byte are looked up at once, as one number of 32 bits.
    pairs = byte_pairs(packed.device) if pairs is None else pairs
    found = pairs.index_select(0, packed.flatten().int())
    return found.view(torch.bfloat16).view(*packed.shape[:-1], -1)


def numbers_of_codes(codes: Tensor) -> Tensor:
    """Return the numbers of codes [...] uint8 without their scales, in bfloat16: [...]."""
    return _numbers(codes.device).index_select(0, codes.flatten().int()).view(codes.shape)


def powers_of_scales(scales: Tensor) -> Tensor:
    """Return the factors of scales [...] uint8 in bfloat16: [...]."""
    return _powers(scales.device).index_select(0, scales.flatten().int()).view(scales.shape)


def _numbers(device: torch.device) -> Tensor:
    """The number of each code, [16] bfloat16."""
    return torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.bfloat16, device=device)


def byte_pairs(device: torch.device) -> Tensor:
    """Return the two bfloat16 numbers of each byte, as [256] int32."""
    half = _numbers(device)
    pairs = torch.stack((half.repeat(16), half.repeat_interleave(16)), dim=-1)
    return pairs.view(torch.int32).flatten()


def _powers(device: torch.device) -> Tensor:
    """The factor of each scale, [256] bfloat16."""
    exponents = torch.arange(256, dtype=torch.float64, device=device) - SCALE_BIAS
    powers = torch.exp2(exponents)
    powers[_NAN_SCALE] = torch.nan
    return powers.to(torch.bfloat16)
