"""The numbers of ggml's blocks: codes of a few bits, with scales (and minima) for the neighbours that share them.

torch computes the common types, on the device that a weight goes to: numpy's way (`gguf.quants`, the library of
llama.cpp's authors, which tests hold these to) makes 100 to 200 MB/s of bfloat16 on a core. It makes the rare ones.
Layouts: github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h. Shapes: n blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from nvcli.errors import LoadError
from nvcli.kernels.mxfp4 import numbers_of_codes, powers_of_scales
from nvcli.models.gguf.types import AFFINE_TYPES
from nvcli.models.tensor_info import MXFP4

_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The numbers that 4-bit codes of IQ4_NL and IQ4_XS stand for."""


class AffineCodes(NamedTuple):
    """Codes of `AFFINE_TYPES`: numbers are (code - zero) × scale, with the type's zero, or code × scale + minimum."""

    codes: Tensor
    """[n, groups, numbers of a group] uint8."""
    scales: Tensor
    """[n, groups, 1] float32."""
    minima: Tensor | None = None


class KeptCodes(NamedTuple):
    """Codes as ranks can keep them (`kernels/w4.py`)."""

    codes: Tensor
    """[rows, columns] uint8; of affine types with the code in the middle as the zero."""
    scales: Tensor
    """[rows, groups] float32, or for MXFP4 exponents in uint8 (`kernels/mxfp4.py`)."""
    offsets: Tensor | None = None
    """The number that each group's zero stands for, [rows, groups]; None for MXFP4."""


def numbers_of_blocks(blocks: Tensor, kind: str) -> Tensor:
    """Compute the numbers of blocks [n, bytes] uint8 of a type of `BLOCK_TYPES`: [n, numbers] float32. Raises LoadError
    if that takes a library which is not installed."""
    if kind == MXFP4:
        found = codes_of_blocks(blocks, kind)
        return numbers_of_codes(found.codes).float().mul_(powers_of_scales(found.scales).float())
    if kind not in _CODES:
        return _by_library(blocks, kind)
    codes, scales, minima = _CODES[kind](blocks)
    numbers = codes.float() if minima is not None else codes.float().sub_(AFFINE_TYPES[kind].zero)
    numbers.mul_(scales)
    return (numbers if minima is None else numbers.add_(minima)).flatten(1)


def codes_of_blocks(blocks: Tensor, kind: str) -> KeptCodes:
    """Return the codes of blocks [n, bytes] of an affine type or MXFP4, each block as a row."""
    if kind == MXFP4:
        return KeptCodes(_nibbles(blocks[:, 1:], 16).flatten(1), blocks[:, :1])
    codes, scales, minima = _CODES[kind](blocks)
    offsets = torch.zeros_like(scales) if minima is None else minima + scales * AFFINE_TYPES[kind].zero
    return KeptCodes(codes.flatten(1), scales.flatten(1), offsets.flatten(1))


def _by_library(blocks: Tensor, kind: str) -> Tensor:
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError:
        raise LoadError(
            f"weights in {kind} are read by a library that is not installed: pip install 'nvcli[gguf]', or choose "
            f"another quantisation of the model, such as Q4_K_M"
        ) from None
    return torch.from_numpy(quants.dequantize(blocks.cpu().numpy(), GGMLQuantizationType[kind])).to(blocks.device)


def _of_block(blocks: Tensor, place: int) -> Tensor:
    """Read a number in float16 of each block: [n, 1, 1] float32."""
    return blocks[:, place : place + 2].contiguous().view(torch.float16).float().unsqueeze(2)


def _nibbles(packed: Tensor, width: int) -> Tensor:
    """Unpack bytes [n, m]: of each `width` of them, first the lower halves, then the upper: [n, 2 m / width, width]."""
    parts = packed.reshape(len(packed), -1, width)
    return torch.stack((parts & 15, parts >> 4), dim=2).flatten(1, 2)


def _shifted(packed: Tensor, width: int, step: int) -> Tensor:
    """Unpack `step` bits of each byte, as `_nibbles` does with 4: [n, 8 m / (step × width), width]."""
    shifts = torch.arange(0, 8, step, dtype=torch.uint8, device=packed.device).unsqueeze(1)
    return ((packed.reshape(len(packed), -1, 1, width) >> shifts) & ((1 << step) - 1)).flatten(1, 2)


def _bits(packed: Tensor) -> Tensor:
    """Unpack the bits of bytes [n, m], the lowest first: [n, 8 m]."""
    return (packed.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1).flatten(1)


def _q1_0(blocks: Tensor) -> AffineCodes:
    scales = _of_block(blocks, 0)
    return AffineCodes(_bits(blocks[:, 2:]).unsqueeze(1), 2 * scales, -scales)


def _q4_0(blocks: Tensor) -> AffineCodes:
    return AffineCodes(_nibbles(blocks[:, 2:], 16).reshape(-1, 1, 32), _of_block(blocks, 0))


def _q4_1(blocks: Tensor) -> AffineCodes:
    return AffineCodes(_nibbles(blocks[:, 4:], 16).reshape(-1, 1, 32), _of_block(blocks, 0), _of_block(blocks, 2))


def _q5_0(blocks: Tensor) -> AffineCodes:
    codes = _nibbles(blocks[:, 6:], 16).flatten(1) | (_bits(blocks[:, 2:6]) << 4)
    return AffineCodes(codes.unsqueeze(1), _of_block(blocks, 0))


def _q5_1(blocks: Tensor) -> AffineCodes:
    codes = _nibbles(blocks[:, 8:], 16).flatten(1) | (_bits(blocks[:, 4:8]) << 4)
    return AffineCodes(codes.unsqueeze(1), _of_block(blocks, 0), _of_block(blocks, 2))


def _q8_0(blocks: Tensor) -> AffineCodes:
    return AffineCodes((blocks[:, 2:] ^ 128).unsqueeze(1), _of_block(blocks, 0))


def _q2_k(blocks: Tensor) -> AffineCodes:
    scales = blocks[:, :16].unsqueeze(2)
    codes = _shifted(blocks[:, 16:80], 32, 2).reshape(-1, 16, 16)
    return AffineCodes(codes, (scales & 15) * _of_block(blocks, 80), (scales >> 4) * -_of_block(blocks, 82))


def _q3_k(blocks: Tensor) -> AffineCodes:
    packed = blocks[:, 96:108]
    lower, upper = _nibbles(packed[:, :8], 8).flatten(1), _shifted(packed[:, 8:], 4, 2).flatten(1)
    scales = (lower | (upper << 4)).float().sub_(32).unsqueeze(2).mul_(_of_block(blocks, 108))
    codes = _shifted(blocks[:, 32:96], 32, 2) | (_shifted(blocks[:, :32], 32, 1) << 2)
    return AffineCodes(codes.reshape(-1, 16, 16), scales)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Read the scales and minima of Q4_K and Q5_K, of 6 bits each, with their factors: [n, 8, 1] both."""
    first, second, third = blocks[:, 4:16].reshape(-1, 3, 4).unbind(1)
    scales = torch.cat((first & 63, (third & 15) | (first >> 2 & 48)), dim=1).unsqueeze(2)
    minima = torch.cat((second & 63, (third >> 4) | (second >> 2 & 48)), dim=1).unsqueeze(2)
    return scales * _of_block(blocks, 0), minima * -_of_block(blocks, 2)


def _q4_k(blocks: Tensor) -> AffineCodes:
    return AffineCodes(_nibbles(blocks[:, 16:], 32), *_scales_and_minima(blocks))


def _q5_k(blocks: Tensor) -> AffineCodes:
    codes = _nibbles(blocks[:, 48:], 32) | (_shifted(blocks[:, 16:48], 32, 1) << 4)
    return AffineCodes(codes, *_scales_and_minima(blocks))


def _q6_k(blocks: Tensor) -> AffineCodes:
    scales = blocks[:, 192:208].view(torch.int8).unsqueeze(2) * _of_block(blocks, 208)
    lower = _nibbles(blocks[:, :128], 64).reshape(-1, 8, 32)
    codes = lower | (_shifted(blocks[:, 128:192], 32, 2) << 4)
    return AffineCodes(codes.reshape(-1, 16, 16), scales)


def _iq4_nl(blocks: Tensor) -> AffineCodes:
    return AffineCodes(_iq4_codes(_nibbles(blocks[:, 2:], 16).reshape(-1, 1, 32)), _of_block(blocks, 0))


def _iq4_xs(blocks: Tensor) -> AffineCodes:
    lower, upper = _nibbles(blocks[:, 4:8], 1).flatten(1), _shifted(blocks[:, 2:4], 1, 2)
    scales = (lower | (upper.flatten(1) << 4)).float().sub_(32).unsqueeze(2).mul_(_of_block(blocks, 0))
    return AffineCodes(_iq4_codes(_nibbles(blocks[:, 8:], 16).reshape(-1, 8, 32)), scales)


def _iq4_codes(places: Tensor) -> Tensor:
    """Return the numbers at places of the table, 128 too large."""
    codes = torch.tensor([value + 128 for value in _IQ4_VALUES], dtype=torch.uint8, device=places.device)
    return codes.index_select(0, places.flatten().int()).view(places.shape)


_CODES: Mapping[str, Callable[[Tensor], AffineCodes]] = {
    "Q1_0": _q1_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
