"""Keys and values in FP8 within Triton kernels: where their scales stand, and how heads are quantised.

The pool's layout is said in `attention/kv_cache.py`. Kernels know an FP8 cache by its type, so that a cache in another
type compiles to the same instructions as if there were none.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
    """Pointers to the scales of keys (or values), by block, offset in the block and head.

    Shapes broadcast; `block` is int64. `block_stride` is in bytes, which are the elements of an FP8 cache.
    """
    FIRST: tl.constexpr = BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM // 2
    scales = cache.to(tl.pointer_type(tl.bfloat16))
    return scales + block * (block_stride // 2) + (FIRST + head * BLOCK_SIZE + offset)


@triton.jit
def load_scales(
    k_cache,
    v_cache,
    table,
    start,
    end,
    kv_head,
    TILE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
):
    """Load the scales of keys [start, start + TILE) of a row and of their values: [TILE] bfloat16 each, 0 from `end`
    on. `table` is the row's block table.

    The attention kernels call it a tile ahead of the scales' use: Triton's pipeline takes keys and values alone, and a
    load in place would be waited for in every tile. The block ids are loaded once more for it, because a loop whose ids
    are carried over two tiles is not pipelined at all (seen with Triton 3.6).
    """
    keys = start + tl.arange(0, TILE)
    is_key = keys < end
    if BLOCK_SIZE % TILE == 0:
        block = tl.load(table + tl.minimum(start, tl.maximum(end - 1, 0)) // BLOCK_SIZE)
    else:
        block = tl.load(table + tl.minimum(keys, tl.maximum(end - 1, 0)) // BLOCK_SIZE)
    block, offset = block.to(tl.int64), keys % BLOCK_SIZE
    k_scales = scale_pointers(k_cache, block, offset, kv_head, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE)
    v_scales = scale_pointers(v_cache, block, offset, kv_head, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE)
    return tl.load(k_scales, mask=is_key, other=0.0), tl.load(v_scales, mask=is_key, other=0.0)


@triton.jit
def quantise_heads(first, second, static_scale, STATIC: tl.constexpr):
    """Halves of some heads [heads, D/2] float32 → the same in float32, ready to be rounded to e4m3, and scales [heads]
    bfloat16. With STATIC the scale is given [heads]; see `kernels/fp8_kv.py`."""
    if STATIC:
        scale = static_scale.to(tl.bfloat16)
    else:
        amax = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
        scale = (tl.maximum(amax, 1e-30) * (1 / 448.0)).to(tl.bfloat16)
    inverse = tl.div_rn(1.0, scale.to(tl.float32))[:, None]
    return _clamped(first * inverse), _clamped(second * inverse), scale


@triton.jit
def _clamped(x):
    """The nearest number within the range of e4m3; NaN stays NaN."""
    return tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
