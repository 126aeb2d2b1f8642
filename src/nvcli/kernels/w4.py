"""W4A16: weights of 4 bits, which are multiplied by activations of 16 bits or more. Plain torch is the reference; CUDA
tensors take the Triton kernels that are held to it.

Whatever a checkpoint's layout is, ranks keep a weight [out, in] in one:

    words   [out, in / 4] int16. 4 P columns are a tile and have P words: word j has the codes of the columns j, j + P,
            j + 2 P and j + 3 P of its tile, from its lowest bits on. P is 32, or 16 for NVFP4. A last tile that is not
            full ends in codes of 0.
    scales  integers: [groups, out] int32, where a group is 32, 64 or 128 neighbours of a row. A value is
            (code - zero) × scale; the lowest 8 bits hold the zero, the others those of the scale in float32.
            MXFP4: [tiles, out] int32, the scales of a tile's four blocks, 8 bits each, from the lowest bits on.
            NVFP4: [1 + tiles, out] int32, first the float32 by which all scales of a row are multiplied, then those of
            each tile's four blocks in e4m3, as for MXFP4.

The scales of integers lose 8 bits of 24, those that scales in 16 bits do not have. Products of few rows are exact but
for the order of their sums: (code - zero) is a number of any half type, and its scale is applied to sums in float32.
With more rows values are rounded to the type of x, as they are where a weight is kept in it. A number of FP4 times its
block's scale is one of bfloat16 and of float16. How many rows are few, and
how products are launched, is in `triton/w4_linear.py`. Shapes: T rows, `in` and `out` features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nvcli.kernels.activation import ACTIVATE_AND_MUL, Activation
from nvcli.kernels.fp8_types import FP8, numbers
from nvcli.kernels.linear import gated_linear, linear, linear_for_sum
from nvcli.kernels.mxfp4 import numbers_of_codes, powers_of_scales
from nvcli.kernels.weight_formats import W4_PARTS, W4Format

LARGEST_FP4_SCALE = 128
"""The largest scale of MXFP4 that can be kept: 2, with a bias of 127. Kernels have it 2^126 times as large."""


def pack(codes: Tensor, format: W4Format) -> Tensor:
    """Pack codes [out, in] uint8, each below 16, into words [out, in / 4] int16."""
    rows, columns = codes.shape
    padded = F.pad(codes, (0, -columns % format.tile))
    first, second, third, fourth = padded.view(rows, -1, W4_PARTS, format.part).unbind(2)
    halves = torch.stack((first | (second << 4), third | (fourth << 4)), dim=-1)  # the lower byte comes first
    return halves.view(torch.int16).flatten(1)


def unpack(words: Tensor, columns: int, format: W4Format) -> Tensor:
    """Return the codes of words: [out, columns] uint8."""
    shifts = torch.arange(0, 16, 4, dtype=torch.int16, device=words.device).view(1, 1, -1, 1)
    codes = (words.view(len(words), -1, 1, format.part) >> shifts) & 15
    return codes.flatten(1)[:, :columns].to(torch.uint8)


def join_scales(scales: Tensor, zeros: Tensor) -> Tensor:
    """Join scales and zeros of integers, [out, groups] float32 both, zeros from 0 to 255: [groups, out] int32."""
    bits = scales.float().contiguous().view(torch.int32)
    return (((bits + 0x80) & ~0xFF) | zeros.int()).t().contiguous()


def part_scales(joined: Tensor) -> tuple[Tensor, Tensor]:
    """Undo `join_scales`."""
    scales = (joined & ~0xFF).view(torch.float32)
    return scales.t(), (joined & 0xFF).float().t()


def join_exponents(scales: Tensor, format: W4Format) -> Tensor:
    """Join the scales of MXFP4, [out, in / 32] uint8 (`kernels/mxfp4.py`): [tiles, out] int32."""
    padded = F.pad(scales, (0, -scales.shape[1] % (format.tile // format.group))).contiguous()
    return padded.view(torch.int32).t().contiguous()


def join_block_scales(scales: Tensor, factor: Tensor, format: W4Format) -> Tensor:
    """Join the scales of NVFP4, [out, in / 16] e4m3, and the number by which a row's are multiplied, [out] float32:
    [1 + tiles, out] int32."""
    return torch.cat((factor.float().view(1, -1).view(torch.int32), join_exponents(scales.view(torch.uint8), format)))


def dequantise(words: Tensor, scales: Tensor, columns: int, format: W4Format) -> Tensor:
    """Return the values of a weight in float32: [out, columns]."""
    codes = unpack(words, columns, format)
    if format.kind != "integer":
        is_nv = format.kind == "nvfp4"
        places = torch.arange(0, 32, 8, dtype=torch.int32, device=scales.device)
        eights = ((scales[is_nv:].t().unsqueeze(-1) >> places) & 255).to(torch.uint8).flatten(1)
        factors = numbers(eights.view(FP8)) if is_nv else powers_of_scales(eights).float()
        values = numbers_of_codes(codes).float() * factors.repeat_interleave(format.group, 1)[:, :columns]
        return values * scales[0].view(torch.float32).unsqueeze(1) if is_nv else values
    factors, zeros = (part.repeat_interleave(format.group, 1)[:, :columns] for part in part_scales(scales))
    return (codes.float() - zeros) * factors


def w4_linear(
    x: Tensor, words: Tensor, scales: Tensor, format: W4Format, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """x Wᵀ + b. x: [T, in]; bias: [out] → [T, out], in `out` (contiguous) if that is given."""
    if x.is_cuda and len(x):
        from nvcli.kernels.triton.products import w4_linear as kernels

        result = kernels.linear("plain", x, words, scales, format, out)
        if result is not None:
            return result if bias is None else result.add_(bias)
    return linear(x, values_for(x, words, scales, format), bias, out)


def w4_linear_for_sum(
    x: Tensor, words: Tensor, scales: Tensor, format: W4Format, residual: Tensor | None
) -> Tensor | None:
    """x Wᵀ, for the residual sum after it, as `linear_for_sum` gives it."""
    if x.is_cuda and len(x):
        from nvcli.kernels.triton.products import w4_linear as kernels

        result = kernels.linear("sum", x, words, scales, format)
        if result is not None:
            return result
    return linear_for_sum(x, values_for(x, words, scales, format), residual)


def w4_gated_linear(x: Tensor, words: Tensor, scales: Tensor, format: W4Format, activation: Activation) -> Tensor:
    """activation(x Gᵀ) × (x Uᵀ) for a weight that holds G above U. [T, in] → [T, out / 2]."""
    if x.is_cuda and len(x):
        from nvcli.kernels.triton.products import w4_linear as kernels

        result = kernels.linear("gated", x, words, scales, format, gate=activation)
        if result is None:
            result = kernels.linear("plain", x, words, scales, format)
            result = None if result is None else ACTIVATE_AND_MUL[activation](result)
        if result is not None:
            return result
    return gated_linear(x, values_for(x, words, scales, format), activation)


def values_for(x: Tensor, words: Tensor, scales: Tensor, format: W4Format) -> Tensor:
    """Return the values of a weight [out, in] in the type of `x` [T, in]."""
    if x.is_cuda:
        from nvcli.kernels.triton.products import w4_linear as kernels

        return kernels.dequantise(words, scales, x.shape[1], format, x.dtype)
    return dequantise(words, scales, x.shape[1], format).to(x.dtype)
