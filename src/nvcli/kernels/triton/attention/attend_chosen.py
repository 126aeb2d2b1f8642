"""Attention to chosen keys: a program takes some heads of one token, decoded or of a prompt, and a part of its chosen
keys, which all heads share, and of those of its window, if these are attended, too. Where a step has few tokens, a
second kernel merges the parts (FlashDecoding; Dao et al., 2023).

Shapes: T tokens, N heads, K most keys of a token, V numbers of a value, the first of a key.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.chosen_keys import TokenKeys, WindowKeys
from nvcli.kernels.triton.attention.attention_fold import LOG2_E, Tile, load_sinks
from nvcli.kernels.triton.launch.multiprocessors import num_multiprocessors, shared_memory_bytes
from nvcli.kernels.whole_numbers import ceil_div, next_power_of_2

_LEAST = tl.constexpr(-1e30)
"""The initial maximum of scores, before any key: finite, so that it can be subtracted from itself."""
_MOST_PARTS = 8
_MERGED = 2048
"""Elements of the output that a program merges."""


@triton.jit
def _places(chosen, first, table, lane, last, block_stride, BLOCK_SIZE: tl.constexpr, CACHE_ROW: tl.constexpr):
    """Return where the keys `lane` of a token's choice are in the cache, without a choice counted from `first`; none
    behind the one numbered `last`."""
    lane = tl.minimum(lane, last)
    position = first + lane if chosen is None else tl.load(chosen + lane)
    block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
    return block * block_stride + position % BLOCK_SIZE * CACHE_ROW


@triton.jit
def _fold(
    query,
    tail,
    highest,
    weight_sum,
    acc,
    cache,
    value_cache,
    chosen,
    first,
    count,
    table,
    block_stride,
    scale_log2,
    part,
    VALUE: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CACHE_ROW: tl.constexpr,
    PARTS: tl.constexpr,
    KEYS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Fold a part of a token's `count` keys into the running maxima, sums of weights and weighted values of heads."""
    lanes, values = tl.arange(0, KEYS), tl.arange(0, VALUE)
    share = tl.cdiv(tl.cdiv(count, KEYS), PARTS) * KEYS
    begin = part * share
    end = tl.minimum(begin + share, count)
    last = tl.maximum(end - 1, 0)
    # The next tile's places are loaded ahead of their use, as in `attention_fold.fold_keys`.
    next_places = _places(chosen, first, table, begin + lanes, last, block_stride, BLOCK_SIZE, CACHE_ROW)
    for start in tl.range(begin, end, KEYS, num_stages=NUM_STAGES):
        rows = next_places[:, None]
        next_places = _places(chosen, first, table, start + KEYS + lanes, last, block_stride, BLOCK_SIZE, CACHE_ROW)
        is_key = start + lanes < end
        key = tl.load(cache + rows + values[None, :], mask=is_key[:, None], other=0.0)
        value = key
        if value_cache is not None:
            value = tl.load(value_cache + rows + values[None, :], mask=is_key[:, None], other=0.0)
        scores = tl.dot(query, key.T, input_precision="ieee")
        if TAIL > 0:
            tails = VALUE + tl.arange(0, TAIL)
            key_tail = tl.load(cache + rows + tails[None, :], mask=is_key[:, None], other=0.0)
            scores = tl.dot(tail, key_tail.T, scores, input_precision="ieee")
        scores = tl.where(is_key[None, :], scores * scale_log2, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        decay = tl.exp2(highest - new_highest)
        weights = tl.exp2(scores - new_highest[:, None])
        weight_sum = weight_sum * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(key.dtype), value, acc * decay[:, None], input_precision="ieee")
        highest = new_highest
    return highest, weight_sum, acc


@triton.jit(
    do_not_specialize=["table_stride", "window_table_stride"],
    do_not_specialize_on_alignment=["tables", "window_tables"],
)
def _attend_chosen_kernel(
    queries,  # [T, NUM_HEADS, VALUE + TAIL], contiguous
    cache,  # blocks block_stride apart, tokens CACHE_ROW
    value_cache,  # values of VALUE numbers, as far apart, or None: they are the first of a key
    seen,  # [T] int32
    slots,  # [T] int64
    tables,  # [slots, ...] int32, rows table_stride apart
    chosen,  # [T, TOP_K] int32, rows chosen_stride apart, or None: all keys
    window_cache,  # None, or blocks window_block_stride apart, tokens WINDOW_ROW
    window_seen,  # [T] int32
    window_tables,  # [slots, ...] int32, rows window_table_stride apart
    sinks,  # None, or [NUM_HEADS] float32
    out,  # [T, NUM_HEADS, VALUE], contiguous; with PARTS > 1 [T, PARTS, NUM_HEADS, VALUE] float32
    log_sums,  # [T, PARTS, NUM_HEADS] float32, base 2, with PARTS > 1
    scale_log2,
    block_stride: tl.int64,
    table_stride,
    chosen_stride: tl.int64,
    window_block_stride: tl.int64,
    window_table_stride,
    NUM_HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CACHE_ROW: tl.constexpr,
    TOP_K: tl.constexpr,
    WINDOW: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,
    WINDOW_ROW: tl.constexpr,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Program (token and HEADS of its heads, part of its keys)."""
    TILES: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    token = (tl.program_id(0) // TILES).to(tl.int64)
    part = tl.program_id(1)
    heads = tl.program_id(0) % TILES * HEADS + tl.arange(0, HEADS)
    values = tl.arange(0, VALUE)
    is_head = (heads < NUM_HEADS)[:, None]
    query_rows = ((token * NUM_HEADS + heads) * (VALUE + TAIL))[:, None]
    query = tl.load(queries + query_rows + values[None, :], mask=is_head, other=0.0).to(cache.dtype.element_ty)
    tail = query
    if TAIL > 0:
        tails = VALUE + tl.arange(0, TAIL)
        tail = tl.load(queries + query_rows + tails[None, :], mask=is_head, other=0.0).to(cache.dtype.element_ty)
    count = tl.load(seen + token)
    slot = tl.load(slots + token)
    if chosen is not None:
        count = tl.minimum(count, TOP_K)
        chosen += token * chosen_stride
    highest = tl.full([HEADS], _LEAST, tl.float32)
    weight_sum = tl.zeros([HEADS], tl.float32)
    if sinks is not None and part == 0:  # of one part alone, so that the sum over parts has it once
        highest = load_sinks(sinks, heads, heads < NUM_HEADS)
        weight_sum += 1.0
    acc = tl.zeros([HEADS, VALUE], tl.float32)
    if WINDOW > 0:
        near = tl.load(window_seen + token)
        num_near = tl.minimum(near, WINDOW)
        highest, weight_sum, acc = _fold(
            query,
            tail,
            highest,
            weight_sum,
            acc,
            window_cache,
            None,
            None,
            near - num_near,
            num_near,
            window_tables + slot * window_table_stride,
            window_block_stride,
            scale_log2,
            part,
            VALUE,
            TAIL,
            WINDOW_BLOCK,
            WINDOW_ROW,
            PARTS,
            KEYS,
            NUM_STAGES,
        )
    highest, weight_sum, acc = _fold(
        query,
        tail,
        highest,
        weight_sum,
        acc,
        cache,
        value_cache,
        chosen,
        0,
        count,
        tables + slot * table_stride,
        block_stride,
        scale_log2,
        part,
        VALUE,
        TAIL,
        BLOCK_SIZE,
        CACHE_ROW,
        PARTS,
        KEYS,
        NUM_STAGES,
    )
    acc = acc / tl.where(weight_sum > 0, weight_sum, 1.0)[:, None]
    row = (token * PARTS + part) * NUM_HEADS + heads
    tl.store(out + row[:, None] * VALUE + values[None, :], acc.to(out.dtype.element_ty), mask=is_head)
    if PARTS > 1:
        tl.store(log_sums + row, highest + tl.log2(weight_sum), mask=heads < NUM_HEADS)


@triton.jit
def _merge_parts_kernel(
    parts,  # [T, PARTS, NUM_HEADS, VALUE] float32
    log_sums,  # [T, PARTS, NUM_HEADS] float32, base 2
    out,  # [T, NUM_HEADS, VALUE], contiguous, written
    NUM_HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Program (token, HEADS heads)."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    values = tl.arange(0, VALUE)
    is_head = heads < NUM_HEADS
    highest = tl.full([HEADS], _LEAST, tl.float32)
    for part in tl.static_range(PARTS):
        row = (token * PARTS + part) * NUM_HEADS + heads
        highest = tl.maximum(highest, tl.load(log_sums + row, mask=is_head, other=-float("inf")))
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, VALUE], tl.float32)
    for part in tl.static_range(PARTS):
        row = (token * PARTS + part) * NUM_HEADS + heads
        weight = tl.exp2(tl.load(log_sums + row, mask=is_head, other=-float("inf")) - highest)
        total += weight
        acc += tl.load(parts + row[:, None] * VALUE + values[None, :], mask=is_head[:, None]) * weight[:, None]
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    places = (token * NUM_HEADS + heads)[:, None] * VALUE + values[None, :]
    tl.store(out + places, acc.to(out.dtype.element_ty), mask=is_head[:, None])


def _tile(heads: int, cache: Tensor) -> Tile:
    """Choose the tiles of a program: as many keys as fit twice into the shared memory beside the queries."""
    is_large = shared_memory_bytes(cache.device) >= 200 << 10
    keys = 16 if cache.dtype.itemsize > 2 else 64 if is_large else 32
    return Tile(rows=heads, keys=keys, num_warps=8 if heads > 32 else 4, num_stages=2)


def attend_chosen(
    queries: Tensor,
    cache: Tensor,
    tokens: TokenKeys,
    chosen: Tensor | None,
    out: Tensor,
    *,
    scale: float,
    sinks: Tensor | None = None,
    values: Tensor | None = None,
    window: WindowKeys | None = None,
) -> None:
    """See `nvcli.kernels.chosen_keys.attend_chosen`."""
    num_tokens, num_heads, size = queries.shape
    value_dim, device = out.shape[2], queries.device
    assert queries.is_contiguous()
    assert out.is_contiguous()
    assert cache.stride(2) == tokens.tables.stride(1) == 1
    assert chosen is None or chosen.stride(1) == 1
    assert values is None or (values.stride() == cache.stride() and window is None)
    near = window or WindowKeys(cache, tokens, 0)
    assert near.cache.stride(2) == near.tokens.tables.stride(1) == 1
    heads = min(64, max(16, next_power_of_2(num_heads)))
    tiles = ceil_div(num_heads, heads)
    num_parts = 1
    while num_parts < _MOST_PARTS and 2 * num_parts * num_tokens * tiles <= num_multiprocessors(device):
        num_parts *= 2
    results, log_sums = out, None
    if num_parts > 1:
        results = torch.empty(num_tokens, num_parts, num_heads, value_dim, dtype=torch.float32, device=device)
        log_sums = torch.empty(num_tokens, num_parts, num_heads, dtype=torch.float32, device=device)
    tile = _tile(heads, cache)
    _attend_chosen_kernel[num_tokens * tiles, num_parts](
        queries,
        cache,
        values,
        *tokens,
        chosen,
        None if window is None else near.cache,
        near.tokens.seen,
        near.tokens.tables,
        sinks,
        results,
        log_sums,
        scale * LOG2_E,
        cache.stride(0),
        tokens.tables.stride(0),
        0 if chosen is None else chosen.stride(0),
        near.cache.stride(0),
        near.tokens.tables.stride(0),
        NUM_HEADS=num_heads,
        VALUE=value_dim,
        TAIL=size - value_dim,
        BLOCK_SIZE=cache.shape[1],
        CACHE_ROW=cache.stride(1),
        TOP_K=0 if chosen is None else chosen.shape[1],
        WINDOW=near.size,
        WINDOW_BLOCK=near.cache.shape[1],
        WINDOW_ROW=near.cache.stride(1),
        PARTS=num_parts,
        HEADS=heads,
        KEYS=tile.keys,
        NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )
    if log_sums is None:
        return
    of_program = min(next_power_of_2(num_heads), max(1, _MERGED // value_dim))
    _merge_parts_kernel[num_tokens, ceil_div(num_heads, of_program)](
        results, log_sums, out, NUM_HEADS=num_heads, VALUE=value_dim, PARTS=num_parts, HEADS=of_program, num_warps=4
    )
