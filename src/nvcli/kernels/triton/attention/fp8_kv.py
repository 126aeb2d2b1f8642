"""FP8 keys and values in Triton kernels: the place of their scales, and the quantisation of heads.

`attention/kv_cache.py` defines the pool's layout. Kernels recognise an FP8 cache by its type, so that for other types
they compile to the same instructions as if FP8 did not exist.
"""

from __future__ import annotations

import triton
import triton.language as tl

NUMBERS_OF_A_WORD = tl.constexpr("""{
    .reg .b16 low, high;
    .reg .b32 first_two, last_two;
    mov.b32 {low, high}, $4;
    cvt.rn.f16x2.e4m3x2 first_two, low;
    cvt.rn.f16x2.e4m3x2 last_two, high;
    mov.b32 {$0, $1}, first_two;
    mov.b32 {$2, $3}, last_two;
}""")
"""PTX: a word of four FP8 numbers, $4, to float16: $0 to $3 have those of bytes 0 to 3."""
NUMBERS_OF_TWO_KEYS = tl.constexpr("""{
    .reg .b32 first_two, last_two;
    .reg .b16 low, high;
    prmt.b32 first_two, $4, $5, 0x5140;
    prmt.b32 last_two, $4, $5, 0x7362;
    mov.b32 {low, high}, first_two;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
    mov.b32 {low, high}, last_two;
    cvt.rn.f16x2.e4m3x2 $2, low;
    cvt.rn.f16x2.e4m3x2 $3, high;
}""")
"""PTX: words of four FP8 numbers of two keys, $4 and $5, to float16: $0 to $3 have those of bytes 0 to 3."""


@triton.jit
def scale_pointers(
    cache,
    block,
    offset,
    head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    block_stride,
):
    """Return pointers to the scales of keys (or values), by block, offset in the block and head.

    Shapes broadcast; `block` is int64. `block_stride` is in bytes, which are the elements of an FP8 cache.
    """
    FIRST: tl.constexpr = BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM // 2
    scales = cache.to(tl.pointer_type(tl.bfloat16))
    return scales + block * (block_stride // 2) + (FIRST + head * BLOCK_SIZE + offset)


@triton.jit
def numbers_of_words(words, DTYPE: tl.constexpr, ON_GPU: tl.constexpr):
    """Return the numbers of words of four: those of byte 0, of byte 1, 2 and 3, each of the words' shape, in float16 or
    float32. words: [keys, words of a head] int32.

    What a product reads into a register is two numbers of neighbouring keys. Bytes that were read one by one from
    shared memory, as Triton does for such an operand, would take 128 loads where words take 32 (heads of 128, 64 keys,
    two warps). On a GPU the bytes of two keys are brought together in pairs, each of which becomes two numbers in one
    instruction; the interpreter, which knows no assembly, takes them one by one, as float32 is.
    """
    if ON_GPU and tl.float16 == DTYPE:
        numbers = tl.inline_asm_elementwise(
            NUMBERS_OF_TWO_KEYS,
            "=r,=r,=r,=r,r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        numbers = (
            words.to(tl.int8).to(tl.float8e4nv, bitcast=True).to(DTYPE),
            (words >> 8).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(DTYPE),
            (words >> 16).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(DTYPE),
            (words >> 24).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(DTYPE),
        )
    return numbers


@triton.jit
def quantise_heads(first, second, static_scale, STATIC: tl.constexpr):
    """Divide the halves of some heads, [heads, D/2] float32, by their scales: → the halves in float32, to be rounded to
    e4m3, and the scales [heads] bfloat16. With STATIC the scales are given [heads]; see `kernels/fp8_kv.py`."""
    if STATIC:
        scale = static_scale.to(tl.bfloat16)
    else:
        amax = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
        scale = (tl.maximum(amax, 1e-30) * (1 / 448.0)).to(tl.bfloat16)
    inverse = tl.div_rn(1.0, scale.to(tl.float32))[:, None]
    return _clamped(first * inverse), _clamped(second * inverse), scale


@triton.jit
def divide_by_scale(x, amax):
    """Divide numbers, float32, by the scale of a head whose largest one is `amax`: → the numbers, to be rounded to
    e4m3, and the scale in bfloat16; see `kernels/fp8_kv.py`."""
    scale = (tl.maximum(amax, 1e-30) * (1 / 448.0)).to(tl.bfloat16)
    return _clamped(x * tl.div_rn(1.0, scale.to(tl.float32))), scale


@triton.jit
def _clamped(x):
    """Clamp to the range of e4m3; NaN stays NaN."""
    return tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
