"""The numbers of ggml's blocks: codes of a few bits, with scales (and minima) for the neighbours that share them.

torch computes the common types, on the device that a weight goes to: numpy's way (`gguf.quants`, the library of
llama.cpp's authors, which tests hold these to) makes 100 to 200 MB/s of bfloat16 on a core. It makes the rare ones.
Layouts: github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h. Shapes: n blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from nvcli.errors import LoadError
from nvcli.kernels.mxfp4 import numbers_of_codes, powers_of_scales
from nvcli.models.tensor_info import MXFP4, Q4_0

Q4_0_ZERO = 8
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The numbers that 4-bit codes of IQ4_NL and IQ4_XS stand for."""


def numbers_of_blocks(blocks: Tensor, kind: str) -> Tensor:
    """Compute the numbers of blocks [n, bytes] uint8 of a type of `BLOCK_TYPES`: [n, numbers] float32. Raises LoadError
    if that takes a library which is not installed."""
    compute = _COMPUTED.get(kind)
    return _by_library(blocks, kind) if compute is None else compute(blocks).flatten(1)


def _by_library(blocks: Tensor, kind: str) -> Tensor:
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError:
        raise LoadError(
            f"weights in {kind} are read by a library that is not installed: pip install 'nvcli[gguf]', or choose "
            f"another quantisation of the model, such as Q4_K_M"
        ) from None
    return torch.from_numpy(quants.dequantize(blocks.cpu().numpy(), GGMLQuantizationType[kind])).to(blocks.device)


def _half(blocks: Tensor, place: int) -> Tensor:
    """Read a number in float16 of each block: [n, 1] float32."""
    return blocks[:, place : place + 2].contiguous().view(torch.float16).float()


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


def codes_of_blocks(blocks: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return the codes of blocks in Q4_0, whose zero is `Q4_0_ZERO`, or MXFP4, [n, 32] uint8, and their scales, [n, 1]:
    float32, or for MXFP4 exponents in uint8 (`kernels/mxfp4.py`)."""
    if kind == MXFP4:
        return _nibbles(blocks[:, 1:], 16).flatten(1), blocks[:, :1]
    return _nibbles(blocks[:, 2:], 16).flatten(1), _half(blocks, 0)


def _q4_0(blocks: Tensor) -> Tensor:
    codes, scales = codes_of_blocks(blocks, Q4_0)
    return codes.float().sub_(Q4_0_ZERO).mul_(scales)


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:], 16).flatten(1).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 6:], 16).flatten(1) | (_bits(blocks[:, 2:6]) << 4)
    return codes.float().sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 8:], 16).flatten(1) | (_bits(blocks[:, 4:8]) << 4)
    return codes.float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _q2_k(blocks: Tensor) -> Tensor:
    scales = blocks[:, :16].unsqueeze(2)
    codes = _shifted(blocks[:, 16:80], 32, 2).reshape(-1, 16, 16).float()
    minima = (scales >> 4) * _half(blocks, 82).unsqueeze(2)
    return codes.mul_((scales & 15) * _half(blocks, 80).unsqueeze(2)).sub_(minima)


def _q3_k(blocks: Tensor) -> Tensor:
    packed = blocks[:, 96:108]
    lower, upper = _nibbles(packed[:, :8], 8).flatten(1), _shifted(packed[:, 8:], 4, 2).flatten(1)
    scales = (lower | (upper << 4)).float().sub_(32).mul_(_half(blocks, 108)).unsqueeze(2)
    codes = _shifted(blocks[:, 32:96], 32, 2) | (_shifted(blocks[:, :32], 32, 1) << 2)
    return codes.reshape(-1, 16, 16).float().sub_(4).mul_(scales)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Read the scales and minima of Q4_K and Q5_K, of 6 bits each, with their factors: [n, 8, 1] both."""
    first, second, third = blocks[:, 4:16].reshape(-1, 3, 4).unbind(1)
    scales = torch.cat((first & 63, (third & 15) | (first >> 2 & 48)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | (second >> 2 & 48)), dim=1)
    return (scales * _half(blocks, 0)).unsqueeze(2), (minima * _half(blocks, 2)).unsqueeze(2)


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(blocks)
    return _nibbles(blocks[:, 16:], 32).float().mul_(scales).sub_(minima)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(blocks)
    codes = _nibbles(blocks[:, 48:], 32) | (_shifted(blocks[:, 16:48], 32, 1) << 4)
    return codes.float().mul_(scales).sub_(minima)


def _q6_k(blocks: Tensor) -> Tensor:
    scales = (blocks[:, 192:208].view(torch.int8) * _half(blocks, 208)).unsqueeze(2)
    lower = _nibbles(blocks[:, :128], 64).reshape(-1, 8, 32)
    codes = lower | (_shifted(blocks[:, 128:192], 32, 2) << 4)
    return codes.reshape(-1, 16, 16).float().sub_(32).mul_(scales)


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _iq4_values(_nibbles(blocks[:, 2:], 16).flatten(1)).mul_(_half(blocks, 0))


def _iq4_xs(blocks: Tensor) -> Tensor:
    lower, upper = _nibbles(blocks[:, 4:8], 1).flatten(1), _shifted(blocks[:, 2:4], 1, 2)
    scales = (lower | (upper.flatten(1) << 4)).float().sub_(32).mul_(_half(blocks, 0)).unsqueeze(2)
    return _iq4_values(_nibbles(blocks[:, 8:], 16).reshape(-1, 8, 32)).mul_(scales)


def _mxfp4(blocks: Tensor) -> Tensor:
    codes, scales = codes_of_blocks(blocks, MXFP4)
    return numbers_of_codes(codes).float().mul_(powers_of_scales(scales).float())


def _iq4_values(codes: Tensor) -> Tensor:
    values = torch.tensor(_IQ4_VALUES, dtype=torch.float32, device=codes.device)
    return values.index_select(0, codes.flatten().int()).view(codes.shape)


_COMPUTED: Mapping[str, Callable[[Tensor], Tensor]] = {
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
    "MXFP4": _mxfp4,
}
