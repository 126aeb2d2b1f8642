"""FP8 keys and values as numbers, for the kernels in Gluon that have them in registers as words of four."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nvcli.kernels.triton.attention.fp8_kv import NUMBERS_OF_A_WORD, NUMBERS_OF_TWO_KEYS


@gluon.jit
def numbers_of_bytes(words, PACK: gl.constexpr):
    """Return the numbers of bytes 0, 1, 2 and 3 of words, each of the words' shape, in float16. With PACK 1 those of
    bytes 0 and 1, and of 2 and 3, stand in one register; with PACK 2 the numbers of two keys do."""
    return gl.inline_asm_elementwise(
        NUMBERS_OF_A_WORD if PACK == 1 else NUMBERS_OF_TWO_KEYS,
        "=h,=h,=h,=h,r" if PACK == 1 else "=r,=r,=r,=r,r,r",
        [words],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=PACK,
    )
