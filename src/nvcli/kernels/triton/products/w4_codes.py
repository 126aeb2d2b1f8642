"""Weights of 4 bits in registers: from words of four codes to numbers that a product takes, or of two codes of 8 bits.

Part i of a tile of columns is in bits 4 i to 4 i + 3 of the tile's words (`kernels/w4.py`): no number changes its
place between threads when words are read. An integer becomes a number by being put into the lowest bits of one whose
other bits are known, and a number of MXFP4 by having its bits put where bfloat16 has such ones, which divides it by a
power of two. In a register are two neighbours of a row, and both become numbers at once. The interpreter, which knows
no assembly, takes them one by one (PACKED false).
"""

from __future__ import annotations

import triton
import triton.language as tl

_MASK_AND_OR = "{{ .reg .b32 t; shr.b32 t, $1, {}; lop3.b32 $0, t, {}, {}, 0xEA; }}"
_BF16_INTEGERS = tl.constexpr(
    tuple(_MASK_AND_OR.format(4 * part, "0x000F000F", "0x43004300") for part in range(4))  # 128 + code
)
_F16_INTEGERS = tl.constexpr(
    tuple(_MASK_AND_OR.format(4 * part, "0x000F000F", "0x64006400") for part in range(4))  # 1024 + code
)
_BF16_CODES = tuple(
    f"shr.b32 t, $1, {4 * part}; lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; mov.b32 u, 0xC308C308; "
    "mov.b32 v, 0x3F803F80; fma.rn.bf16x2 t, t, v, u;"  # 128 + code, minus 136
    for part in range(4)
) + tuple(
    f"shr.b32 t, $1, {8 * part}; lop3.b32 u, t, 0x00800080, 0x43804380, 0x6A; "
    "lop3.b32 t, t, 0x007F007F, 0x43004300, 0xEA; mov.b32 v, 0xBF80BF80; fma.rn.bf16x2 t, u, v, t;"
    for part in range(2)  # 128 + the lower 7 bits, minus 256 or where the upper bit is set 128
)
_F16_CODES = tuple(
    f"shr.b32 t, $1, {bits * part}; lop3.b32 t, t, {mask}, 0x64006400, 0xEA; mov.b32 u, {zero}; sub.f16x2 t, t, u;"
    for bits, mask, zero in ((4, "0x000F000F", "0x64086408"), (8, "0x00FF00FF", "0x64806480"))  # 1024 + code
    for part in range(16 // bits)
)
BF16_AFFINE, F16_AFFINE = (
    tl.constexpr(tuple(f"{{ .reg .b32 t, u, v; {codes} fma.rn.{kind} $0, t, $2, $4; }}" for codes in of_parts))
    for kind, of_parts in (("bf16x2", _BF16_CODES), ("f16x2", _F16_CODES))
)
"""For each part of words of four codes, then of words of two: words, scales and offsets → two numbers."""
BF16_HALVES = tl.constexpr(
    "{ .reg .b16 s, o; .reg .f32 f; mov.b32 {o, s}, $2; cvt.f32.f16 f, s; cvt.rn.bf16x2.f32 $0, f, f; "
    "cvt.f32.f16 f, o; cvt.rn.bf16x2.f32 $1, f, f; }"
)
F16_HALVES = tl.constexpr("{ .reg .b16 s, o; mov.b32 {o, s}, $2; mov.b32 $0, {s, s}; mov.b32 $1, {o, o}; }")
"""Scales and offsets of groups, joined → each twice."""
_SIGN_AND_NUMBER = (
    "{{ .reg .b32 s, t; shl.b32 s, $1, {}; and.b32 s, s, 0x80008000; {}.b32 t, $1, {}; "
    "lop3.b32 $0, t, 0x01C001C0, s, 0xEA; }}"
)
_BF16_NUMBERS = tl.constexpr(
    tuple(_SIGN_AND_NUMBER.format(12 - 4 * part, "shl" if part < 2 else "shr", abs(6 - 4 * part)) for part in range(4))
)
_TABLES = "{{ .reg .b32 t, s; {}and.b32 t, t, 0x7777; prmt.b32 t, $3, $7, t; {}lop3.b32 $0, s, 0x80808080, t, 0xEA; }}"
_FP8_NUMBERS = tl.constexpr(
    tuple(
        _TABLES.format(f"{move_codes} ", f"{move_signs} ")
        for word in ("$1", "$2")
        for move_codes, move_signs in (
            (f"mov.b32 t, {word};", f"mov.b32 s, {word};"),
            (f"shr.b32 t, {word}, 16;", f"shl.b32 s, {word}, 4;"),
        )
    )
)
"""For each part: words, and both halves of the table of its numbers → four numbers."""
_LEAST_NUMBERS = tl.constexpr((0x14100800, 0x24201C18))
"""The numbers of FP4 without signs, times 2^-5, in e4m3: those of codes 0 to 3, from the lowest byte on, and of codes 4
to 7."""
_DOUBLED = tl.constexpr((0x08080800, 0x08080808))
"""The increments that double them."""
_ZERO_MASK = tl.constexpr(0xFF)
NVFP4_UNIT = tl.constexpr(2.0**8)


@triton.jit
def scales_and_zeros(pairs, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """Split joined scales [N] int32 (`kernels/w4.py`) into scales [N] float32, and the zeros for `integers`: [N, 1] of
    DTYPE."""
    zeros = (pairs & _ZERO_MASK).to(tl.float32)
    if PACKED and tl.bfloat16 == DTYPE:
        zeros += 128
    elif PACKED and tl.float16 == DTYPE:
        zeros += 1024
    return (pairs & ~_ZERO_MASK).to(tl.float32, bitcast=True), zeros.to(DTYPE)[:, None]


@triton.jit
def integers(words, zeros, PART: tl.constexpr, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """Return code - zero of one part, exactly. words: [N, PART's size] int16; zeros: those of `scales_and_zeros` → as
    many of DTYPE."""
    if PACKED and tl.bfloat16 == DTYPE:
        numbers = tl.inline_asm_elementwise(
            _BF16_INTEGERS[PART], "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif PACKED and tl.float16 == DTYPE:
        numbers = tl.inline_asm_elementwise(
            _F16_INTEGERS[PART], "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        numbers = ((words >> (4 * PART)) & 15).to(DTYPE)
    return numbers - zeros


@triton.jit
def affine_numbers(words, pairs, PART: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """Return the numbers of one part of affine codes of 4 or 8 bits. words: [N, PART's size] int16; pairs: [N] int32,
    the scales and offsets of its group (`kernels/w4.py`) → as many of DTYPE.

    In bfloat16 scales and offsets are rounded before, which with the rounding of the result is an error of 0.23 % of a
    weight's norm, where one that is kept in bfloat16 has 0.17 % and Q4_K itself 8 %. In two halves, so that they lose
    nothing, scales take an H200 12 to 22 % more time for a product of up to 16 rows.
    """
    FIRST: tl.constexpr = PART + (4 if BITS == 8 else 0)
    if PACKED and (tl.bfloat16 == DTYPE or tl.float16 == DTYPE):
        scales, offsets = tl.inline_asm_elementwise(
            BF16_HALVES if tl.bfloat16 == DTYPE else F16_HALVES,
            "=&r,=&r,r",
            [pairs],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        numbers = tl.inline_asm_elementwise(
            BF16_AFFINE[FIRST] if tl.bfloat16 == DTYPE else F16_AFFINE[FIRST],
            "=r,r,r,r,r,r",
            [words, scales[:, None], offsets[:, None]],
            dtype=tl.bfloat16 if tl.bfloat16 == DTYPE else tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        codes = ((words.to(tl.int32) >> (BITS * PART)) & ((1 << BITS) - 1)) - (1 << (BITS - 1))
        scales = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        offsets = pairs.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        numbers = (codes.to(tl.float32) * scales[:, None] + offsets[:, None]).to(DTYPE)
    return numbers


@triton.jit
def fp4_numbers(words, exponents, PART: tl.constexpr, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """Return the numbers of one part of MXFP4, exactly. words: [N, 32] int16; exponents: [N] int32, those of the tile's
    four parts (`kernels/w4.py`) → [N, 32] of DTYPE.

    The bits of a code, put where a larger type has such ones, are 2^126 times too small. The factor with which they are
    multiplied is therefore 2^126 times the block's 2^(exponent - 127).
    """
    factors = ((exponents >> (8 * PART)) & 255) + 126
    numbers = _fp4_codes(words, PART, PACKED)
    if PACKED:
        numbers *= (factors << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)[:, None]
    else:
        numbers *= (factors << 23).to(tl.float32, bitcast=True)[:, None]
    return numbers.to(DTYPE)


@triton.jit
def nvfp4_numbers(words, scales, PART: tl.constexpr, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """Return the numbers of one part of NVFP4, exactly, but NVFP4_UNIT times too small. words: [N, 16] int16; scales:
    [N] int32, those of the tile's four parts in e4m3 → [N, 16] of DTYPE.

    A number of FP4 times a scale has at most 6 bits and is a number of each type. A scale's bits, put where float32 has
    such ones, are 2^120 times too small, and 2^126 times its value would be too large.
    """
    bits = ((scales >> (8 * PART)) & 127) << 20
    factors = bits.to(tl.float32, bitcast=True) * 2.0**120 * (2.0**126 / NVFP4_UNIT)
    numbers = _fp4_codes(words, PART, PACKED)
    return (numbers * factors.to(numbers.dtype)[:, None]).to(DTYPE)


@triton.jit
def fp8_numbers(words, powers, PART: tl.constexpr, PACKED: tl.constexpr):
    """Return the numbers of one part of MXFP4 for activations in FP8, exactly, except for the factor of their row.
    words: [N, 32] int16; powers: [N] int32, those of the tile's four parts (`kernels/w4.py`) → [N, 32] of e4m3."""
    power = (powers >> (8 * PART)) & 255
    low = power * _DOUBLED[0] + _LEAST_NUMBERS[0]
    high = power * _DOUBLED[1] + _LEAST_NUMBERS[1]
    if PACKED:
        numbers = tl.inline_asm_elementwise(
            _FP8_NUMBERS[PART],
            "=r,r,r,r,r,r,r,r,r,r,r",
            [words, low[:, None], high[:, None]],
            dtype=tl.float8e4nv,
            is_pure=True,
            pack=4,
        )
    else:
        ROWS: tl.constexpr = words.shape[0]
        fours = (words.to(tl.int64) & 0xFFFF).reshape([ROWS, 8, 4])
        column = tl.arange(0, 4)[None, None, :]
        bits = tl.sum(fours << (16 * column), axis=2)[:, :, None] >> (32 * (PART // 2))
        code = ((bits >> (4 * column + 16 * (PART % 2))) & 7).reshape([ROWS, 32])
        sign = ((bits >> (8 * column + 7 - 4 * (PART % 2))) & 1).reshape([ROWS, 32])
        table = tl.where(code < 4, low[:, None], high[:, None])
        number = (table >> (8 * (code % 4)).to(tl.int32)) & 0x7F
        numbers = (number | (sign.to(tl.int32) << 7)).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return numbers


@triton.jit
def _fp4_codes(words, PART: tl.constexpr, PACKED: tl.constexpr):
    """Return the numbers of a part's codes, 2^126 times too small: in bfloat16 if PACKED, else in float32."""
    if PACKED:
        numbers = tl.inline_asm_elementwise(
            _BF16_NUMBERS[PART], "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        codes = (words.to(tl.int32) >> (4 * PART)) & 15
        numbers = (((codes & 8) << 28) | ((codes & 7) << 22)).to(tl.float32, bitcast=True)
    return numbers


@triton.jit
def first_words(rows, row_size, ROW_BLOCK: tl.constexpr, PART: tl.constexpr):
    """Return where rows [N] have the words of their first tile: [N, PART] int64. Those of the next tile are
    ROW_BLOCK × PART behind. `row_size`: the words of a row."""
    blocks = (rows // ROW_BLOCK * ROW_BLOCK).to(tl.int64) * row_size
    return blocks[:, None] + (rows % ROW_BLOCK * PART)[:, None] + tl.arange(0, PART)[None, :]


@triton.jit
def add_tile(
    total,  # [OUT_TILE, ROW_TILE] float32
    words_ptrs,  # [OUT_TILE, PART], to the words of the first tile
    scales_ptrs,  # [OUT_TILE], to the scales of the first group
    x_ptrs,  # [PART, ROW_TILE], to the first tile
    tile,
    is_row,  # [ROW_TILE]
    is_feature,  # [OUT_TILE]
    scales_stride,
    in_features,
    KIND: tl.constexpr,  # `TileKind`
):
    """Add the product of one tile of input features to `total`.

    `scales_stride` is how far the scales of two groups (of FP4: of two tiles) are apart. The sums of a group of
    integers are multiplied by their scales, which is exact, and takes registers for these sums.
    """
    PARTS: tl.constexpr = KIND.parts
    TILE: tl.constexpr = KIND.in_tile
    PART: tl.constexpr = TILE // PARTS
    codes = tl.load(words_ptrs + tile * (KIND.row_block * PART), mask=is_feature[:, None], other=0)
    if KIND.weight == "mxfp4 for fp8":
        powers = tl.load(scales_ptrs + (tile + 1) * scales_stride, mask=is_feature, other=0)
        sums = tl.zeros_like(total)  # of at most 128 products by the units
        for part in tl.static_range(PARTS):
            inputs = _load_part(x_ptrs, tile * TILE, is_row, part, in_features, PART, KIND.is_whole)
            sums = tl.dot(fp8_numbers(codes, powers, part, KIND.is_packed), inputs, sums)
        total += sums
    elif KIND.is_affine:
        for part in tl.static_range(PARTS):
            group = tile * PARTS + part
            has_group = is_feature
            if not KIND.is_whole:
                has_group = is_feature & (group * PART < in_features)
            pairs = tl.load(scales_ptrs + group * scales_stride, mask=has_group, other=0)
            inputs = _load_part(x_ptrs, tile * TILE, is_row, part, in_features, PART, KIND.is_whole)
            numbers = affine_numbers(codes, pairs, part, 16 // PARTS, inputs.dtype, KIND.is_packed)
            total = tl.dot(numbers, inputs, total, input_precision="ieee")
    elif KIND.weight != "integer":
        group = tile + 1 if KIND.weight == "nvfp4" else tile  # the first are the factors of rows
        scales = tl.load(scales_ptrs + group * scales_stride, mask=is_feature, other=0)
        for part in tl.static_range(PARTS):
            inputs = _load_part(x_ptrs, tile * TILE, is_row, part, in_features, PART, KIND.is_whole)
            if KIND.weight == "nvfp4":
                numbers = nvfp4_numbers(codes, scales, part, inputs.dtype, KIND.is_packed)
            else:
                numbers = fp4_numbers(codes, scales, part, inputs.dtype, KIND.is_packed)
            total = tl.dot(numbers, inputs, total, input_precision="ieee")
    else:
        GROUP_PARTS: tl.constexpr = KIND.group // PART
        for first in tl.static_range(0, PARTS, GROUP_PARTS):
            group = tile * (TILE // KIND.group) + first // GROUP_PARTS
            has_group = is_feature
            if not KIND.is_whole:
                has_group = is_feature & (group * KIND.group < in_features)
            pairs = tl.load(scales_ptrs + group * scales_stride, mask=has_group, other=0)
            sums = tl.zeros_like(total)
            for part in tl.static_range(first, first + GROUP_PARTS):
                inputs = _load_part(x_ptrs, tile * TILE, is_row, part, in_features, PART, KIND.is_whole)
                _, zeros = scales_and_zeros(pairs, inputs.dtype, KIND.is_packed)
                numbers = integers(codes, zeros, part, inputs.dtype, KIND.is_packed)
                sums = tl.dot(numbers, inputs, sums, input_precision="ieee")
            scales, _ = scales_and_zeros(pairs, tl.float32, KIND.is_packed)
            total += sums * scales[:, None]
    return total


@triton.jit
def _load_part(x_ptrs, start, is_row, part, in_features, PART: tl.constexpr, IS_WHOLE: tl.constexpr):
    """Load one part of a tile of x, which begins at feature `start`: [PART, ROW_TILE]."""
    mask = is_row[None, :]
    if not IS_WHOLE:
        mask = mask & (start + part * PART + tl.arange(0, PART) < in_features)[:, None]
    return tl.load(x_ptrs + start + part * PART, mask=mask, other=0.0)
