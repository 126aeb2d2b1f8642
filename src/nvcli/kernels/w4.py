"""Weights of 4 bits, which are multiplied by activations of 16 bits or more (W4A16), or those of experts in MXFP4 also
by activations in FP8 (W4A8). Plain torch is the reference; CUDA tensors take the Triton kernels that are held to it.

Whatever a checkpoint's layout is, ranks keep a weight [out, in] in one:

    words   [out / R, tiles, R, P] int16, in memory; tensors are [out, in / 4]. 4 P columns are a tile and have P words:
            word j has the codes of the columns j, j + P, j + 2 P and j + 3 P of its tile, from its lowest bits on. P is
            32, or 16 for NVFP4. A last tile that is not full ends in codes of 0. R rows of a tile follow one another:
            32, or what divides the rows of all parts of a weight.
    scales  integers: [groups, out] int32, where a group is 32, 64 or 128 neighbours of a row. A value is
            (code - zero) × scale; the lowest 8 bits hold the zero, the others those of the scale in float32.
            affine: [groups, out] int32, where a group is 16 or 32 neighbours of a row. A value is
            (code - 8) × scale + offset; the lower half holds the offset, the upper one the scale, in float16.
            MXFP4: [tiles, out] int32, the scales of a tile's four blocks, 8 bits each, from the lowest bits on.
            NVFP4: [1 + tiles, out] int32, first the float32 by which all scales of a row are multiplied, then those of
            each tile's four blocks in e4m3, as for MXFP4.

What a checkpoint has in more than 4 bits beside affine codes has 8 here, in words of two codes: that of column j in the
lower half, that of column j + P in the upper one. A tile is then 2 P columns, and the code of an offset is 128.

For activations in FP8 a number of MXFP4 becomes one of e4m3: its bits are looked up in a table of eight bytes that
holds the numbers of its block. A row's words of a tile are in an order for this:

    words   Of columns 4 j to 4 j + 3 of a tile's first two parts, words 4 j and 4 j + 1 hold the codes, and the next
            two words those of the other parts. In these 32 bits are the codes of the four columns for the first part,
            from the lowest bits on, then those for the second part; where codes have their signs, bit 8 k + 7 has the
            sign of column k for the first part, bit 8 k + 3 for the second.
    scales  [1 + tiles, out] int32: first a power of 2 in float32, by which a row's sums are multiplied, then how many
            times each of a tile's four blocks is doubled relative to 2^-5, 0 to 11. Blocks of a row that are smaller
            by 2^12 than its largest are 0.

The scales of integers lose 8 bits of 24, those that scales in 16 bits do not have. Products of few rows are exact but
for the order of their sums: (code - zero) is a number of any half type, and its scale is applied to sums in float32.
Scales and offsets of affine codes are at most 2^-12 of themselves away from those of GGUF, products of a number in
float16 and one of 4 to 8 bits, none of which is too small: all are multiples of 2^-24. Their values, and with more
rows those of other integers, are rounded to the type of x, as they are where a weight is kept in it. A number of FP4
times its block's scale is one of bfloat16 and of float16. How many rows are few, and how products are launched, is in
`triton/w4_linear.py`. Shapes: T rows, `in` and `out` features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nvcli.kernels.activation import ACTIVATE_AND_MUL, Activation
from nvcli.kernels.fp8_types import FP8, numbers
from nvcli.kernels.linear import gated_linear, linear, linear_for_sum
from nvcli.kernels.mxfp4 import SCALE_BIAS, numbers_of_codes, powers_of_scales
from nvcli.kernels.weight_formats import AFFINE_KINDS, CONVERTED_ROWS, W4Format

LARGEST_FP4_SCALE = 128
"""The largest scale of MXFP4 that can be kept: 2, with a bias of 127. Kernels have it 2^126 times as large."""
LARGEST_HALF = 65504.0
"""The largest number in float16."""
_LEAST_POWER, _NUM_POWERS = -5, 12
"""The powers of 2 by which e4m3 holds all numbers of FP4: from 2^-5 on, 12 of them."""


def pack(codes: Tensor, format: W4Format) -> Tensor:
    """Pack codes [out, in] uint8, of 4 bits below 16, into words int16: [out, in / 4], or of 8 bits [out, in / 2]."""
    rows, columns = codes.shape
    padded = F.pad(codes, (0, -columns % format.tile))
    num_tiles = padded.shape[1] // format.tile
    parts = padded.view(-1, format.row_block, num_tiles, format.parts, format.part).transpose(1, 2)
    if format.kind == "mxfp4 for fp8":
        return _pack_for_fp8(parts).view(rows, -1)
    if format.bits == 4:
        parts = parts[..., ::2, :] | (parts[..., 1::2, :] << 4)
    halves = parts.transpose(-2, -1).contiguous()  # the lower byte comes first
    return halves.view(torch.int16).view(rows, -1)


def _pack_for_fp8(parts: Tensor) -> Tensor:
    """Pack codes [..., 4, 32] into words in the order for activations in FP8."""
    pairs = parts.reshape(-1, 2, 2, 8, 4).permute(0, 3, 1, 2, 4).int()
    words = torch.zeros(pairs.shape[:-2], dtype=torch.int32, device=pairs.device)
    for half in range(2):
        for column in range(4):
            code = pairs[..., half, column]
            words |= (code & 7) << (16 * half + 4 * column)
            words |= (code >> 3) << (8 * column + 7 - 4 * half)
    return words.view(torch.int16)


def _unpack_for_fp8(words: Tensor) -> Tensor:
    """Undo `_pack_for_fp8`: words [..., 32] → codes [..., 4, 32]."""
    pairs = words.view(torch.int32).view(-1, 8, 2)
    found = [
        ((pairs >> (16 * half + 4 * column)) & 7) | (((pairs >> (8 * column + 7 - 4 * half)) & 1) << 3)
        for half in range(2)
        for column in range(4)
    ]
    codes = torch.stack(found, dim=-1).view(-1, 8, 2, 2, 4).permute(0, 2, 3, 1, 4)
    return codes.reshape(*words.shape[:-1], 4, words.shape[-1])


def unpack(words: Tensor, columns: int, format: W4Format) -> Tensor:
    """Return the codes of words: [out, columns] uint8."""
    tiles = words.contiguous().view(-1, words.shape[1] // format.part, format.row_block, format.part)
    if format.kind == "mxfp4 for fp8":
        parts = _unpack_for_fp8(tiles)
    else:
        shifts = torch.arange(0, 16, format.bits, dtype=torch.int16, device=words.device).view(-1, 1)
        parts = (tiles.unsqueeze(-2) >> shifts) & ((1 << format.bits) - 1)
    return parts.to(torch.uint8).transpose(1, 2).reshape(len(words), -1)[:, :columns]


def join_scales(scales: Tensor, zeros: Tensor) -> Tensor:
    """Join scales and zeros of integers, [out, groups] float32 both, zeros from 0 to 255: [groups, out] int32."""
    bits = scales.float().contiguous().view(torch.int32)
    return (((bits + 0x80) & ~0xFF) | zeros.int()).t().contiguous()


def part_scales(joined: Tensor) -> tuple[Tensor, Tensor]:
    """Undo `join_scales`."""
    scales = (joined & ~0xFF).view(torch.float32)
    return scales.t(), (joined & 0xFF).float().t()


def join_halves(scales: Tensor, offsets: Tensor) -> Tensor:
    """Join scales and offsets of affine codes, [out, groups] float32 both: [groups, out] int32. Numbers above
    LARGEST_HALF become infinite."""
    return torch.stack((offsets.half().t(), scales.half().t()), dim=-1).contiguous().view(torch.int32).squeeze(-1)


def part_halves(joined: Tensor) -> tuple[Tensor, Tensor]:
    """Undo `join_halves`."""
    offsets, scales = joined.contiguous().unsqueeze(-1).view(torch.float16).float().unbind(-1)
    return scales.t(), offsets.t()


def join_exponents(scales: Tensor, format: W4Format) -> Tensor:
    """Join the scales of MXFP4, [out, in / 32] uint8 (`kernels/mxfp4.py`): [tiles, out] int32."""
    padded = F.pad(scales, (0, -scales.shape[1] % (format.tile // format.group))).contiguous()
    return padded.view(torch.int32).t().contiguous()


def pack_mxfp4(codes: Tensor, scales: Tensor, format: W4Format) -> tuple[Tensor, Tensor]:
    """Return the words and the joined scales of MXFP4: codes [out, in] uint8, scales [out, in / 32] uint8."""
    if format.kind == "mxfp4":
        return pack(codes, format), join_exponents(scales, format)
    exponents = scales.int()
    lowest = exponents.amax(1, keepdim=True) - (_NUM_POWERS - 1)
    powers = exponents - lowest
    codes = codes.masked_fill((powers < 0).repeat_interleave(format.group, 1), 0)
    factors = torch.exp2((lowest - (SCALE_BIAS + _LEAST_POWER)).float()).view(torch.int32).t()
    joined = join_exponents(powers.clamp(min=0).to(torch.uint8), format)
    return pack(codes, format), torch.cat((factors, joined)).contiguous()


def join_block_scales(scales: Tensor, factor: Tensor, format: W4Format) -> Tensor:
    """Join the scales of NVFP4, [out, in / 16] e4m3, and the number by which a row's are multiplied, [out] float32:
    [1 + tiles, out] int32."""
    return torch.cat((factor.float().view(1, -1).view(torch.int32), join_exponents(scales.view(torch.uint8), format)))


def dequantise(words: Tensor, scales: Tensor, columns: int, format: W4Format) -> Tensor:
    """Return the values of a weight in float32: [out, columns]."""
    codes = unpack(words, columns, format)
    if format.kind in AFFINE_KINDS:
        factors, offsets = (part.repeat_interleave(format.group, 1)[:, :columns] for part in part_halves(scales))
        return (codes.float() - format.zero) * factors + offsets
    if format.kind != "integer":
        has_factors = format.has_row_factors
        places = torch.arange(0, 32, 8, dtype=torch.int32, device=scales.device)
        eights = ((scales[has_factors:].t().unsqueeze(-1) >> places) & 255).to(torch.uint8).flatten(1)
        if format.kind == "nvfp4":
            factors = numbers(eights.view(FP8))
        elif format.kind == "mxfp4":
            factors = powers_of_scales(eights).float()
        else:
            factors = torch.exp2(eights.float() + _LEAST_POWER)
        values = numbers_of_codes(codes).float() * factors.repeat_interleave(format.group, 1)[:, :columns]
        return values * scales[0].view(torch.float32).unsqueeze(1) if has_factors else values
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
    if len(words) <= CONVERTED_ROWS:
        return linear(x, values_for(x, words, scales, format), bias, out)
    out = torch.empty(len(x), len(words), dtype=x.dtype, device=x.device) if out is None else out
    for first in range(0, len(words), CONVERTED_ROWS):
        part = slice(first, first + CONVERTED_ROWS)
        values = values_for(x, words[part], scales[:, part].contiguous(), format)
        out[:, part] = linear(x, values, None if bias is None else bias[part])
    return out


def w4_rows(ids: Tensor, words: Tensor, scales: Tensor, format: W4Format, start: int, out: Tensor) -> Tensor:
    """Look up the rows of `ids` in the part of a weight [in, out] that begins with row `start`, into `out`; others get
    zeros. ids: [T]; out: [T, in], contiguous, which is returned."""
    if ids.is_cuda:
        from nvcli.kernels.triton.products import w4_linear as kernels

        return kernels.dequantise_rows(ids, words, scales, format, start, out)
    local = ids.long() - start
    mine = (local >= 0) & (local < len(words))
    places = local.where(mine, 0)
    tiles = words.view(-1, words.shape[1] // format.part, format.row_block, format.part)
    found = tiles[places // format.row_block, :, places % format.row_block].flatten(1)
    values = dequantise(found, scales[:, places], out.shape[1], format.for_rows(1))
    return out.copy_(values.masked_fill_(~mine.unsqueeze(-1), 0))


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
