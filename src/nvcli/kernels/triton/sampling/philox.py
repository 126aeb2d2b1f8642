"""The counter-based random numbers of `nvcli.kernels.philox`, bit for bit, inside kernels, and Gumbel noise of them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _uniform(word):
    """Turn 32 random bits into float32. The top 23 bits are the mantissa of a number in [1, 2); the subtraction leaves
    them and a half, exactly."""
    return ((word >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 0.999999940395355224609375


@triton.jit
def draw_of(columns, slot, position):
    """Return the key of a row's numbers for the next two functions: everything but the token. columns: pointers to
    `SamplingColumns`."""
    return tl.load(columns.seed + slot), position, tl.load(columns.row + slot), tl.load(columns.sample + slot)


@triton.jit
def quad_uniforms(quads, draw):
    """Make the uniform numbers of the tokens 4 q to 4 q + 3 for each q of `quads`: [Q] int32 → [Q, 4] float32.

    `tl.philox` is Philox4x32-10 with the same order of key and counter words as ours.
    """
    seed, position, row, sample = draw
    words = tl.philox(
        seed, quads.to(tl.uint32, bitcast=True), position.to(tl.uint32), row.to(tl.uint32), sample.to(tl.uint32)
    )
    even = tl.join(words[0], words[2])
    odd = tl.join(words[1], words[3])
    word = tl.reshape(tl.join(even, odd), (quads.shape[0], 4))  # [q, i, j] is word 2 i + j
    return _uniform(word)


@triton.jit
def uniforms_at(tokens, draw):
    """Make the same numbers for tokens in any order: [T] int32 → [T] float32."""
    seed, position, row, sample = draw
    quads = (tokens // 4).to(tl.uint32, bitcast=True)
    words = tl.philox(seed, quads, position.to(tl.uint32), row.to(tl.uint32), sample.to(tl.uint32))
    place = tokens % 4
    even = tl.where(place == 0, words[0], words[2])
    odd = tl.where(place == 1, words[1], words[3])
    return _uniform(tl.where(place % 2 == 0, even, odd))


@triton.jit
def _log2(x, APPROXIMATE: tl.constexpr):
    """Compute log2(x) of any shape; with APPROXIMATE by the GPU's own instruction, right to 2^-22, instead of the 25
    instructions of libdevice."""
    if APPROXIMATE:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.log2(x)
    return y


@triton.jit
def gumbel(uniform, APPROXIMATE: tl.constexpr):
    """Compute -log(-log(uniform)) of any shape, to about 1e-6. The largest noise, which wins, comes from numbers next
    to 1, of which an approximate logarithm says nothing: there it is the series of -log(1 - rest), and `rest` is
    exact."""
    LOG_2: tl.constexpr = 0.6931471805599453
    rest = 1.0 - uniform
    series = 1 / 2 + rest * (1 / 3 + rest * (1 / 4 + rest * (1 / 5 + rest * (1 / 6 + rest * (1 / 7)))))
    series = rest + rest * rest * series
    return -LOG_2 * _log2(tl.where(rest < 0.125, series, -LOG_2 * _log2(uniform, APPROXIMATE)), APPROXIMATE)
