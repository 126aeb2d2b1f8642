"""The choice of each token's keys by their index scores: a kernel that computes the scores, and one that selects the
highest of each token.

The selection finds the K-th highest score by its bits, eight at a time from the highest (radix select): each pass
counts how many scores that agree so far have each value of the next eight. It takes five passes over a token's scores,
which the L2 cache mostly holds, and gives positions in ascending order, the same ones whatever else is in the batch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.chosen_keys import TokenKeys
from nvcli.kernels.pool_settings import SINGLE_KEYS, Pools
from nvcli.kernels.triton.launch.multiprocessors import num_multiprocessors, shared_memory_bytes
from nvcli.kernels.whole_numbers import ceil_div, next_power_of_2

_KEYS, _WARPS = 128, 4
"""The tile of scores."""
_STAGES, _SHARED_MEMORY, _FEWER_STAGES = 3, 112 << 10, 2
"""Tiles of a 16-bit cache that a program holds where it may have more shared memory than this, and elsewhere. With 64
heads an H200 takes 162 µs with three for 64 rows of 32,768 keys and 1.31 ms for 2,048 tokens of a prompt behind 14,336;
with two 187 and 1.58."""
_PROGRAMS_PER_PROCESSOR = 4
_SELECTED, _SELECT_WARPS = 2048, 8
_SELECTED_ALONE, _SELECT_WARPS_ALONE = 8192, 16
"""Scores that the selection reads at a time, and its warps: where multiprocessors have several programs, and where they
have one at most. For one row of 32,768 keys an H200 takes 61 and 41 µs, for 2,048 tokens of a prompt 277 and 378."""
_SELECTED_BY_WARP = 256
"""Scores among which a warp selects, where tokens have few."""
_TOGETHER, _FEW_TOGETHER, _MANY = 64, 16, 1024
"""Tokens that a program multiplies with a tile of keys where the best key of a pool counts: in steps of more than _MANY
tokens, and in others. An H200 takes 124 µs for 8,192 tokens of prompts of 8,000 with one head of 128 (Triton 3.8), and
took 1,262 for one token at a time (3.6)."""
_BINS = tl.constexpr(256)


@triton.jit(do_not_specialize=["first_token", "table_stride"], do_not_specialize_on_alignment=["tables"])
def _index_scores_kernel(
    queries,  # [T, NUM_HEADS, SIZE], contiguous
    weights,  # [T, NUM_HEADS] float32
    cache,  # blocks cache_block_stride apart, tokens CACHE_ROW
    seen,  # [T] int32
    slots,  # [T] int64
    tables,  # [slots, ...] int32, rows table_stride apart
    scores,  # [tokens of the launch, most keys] float32, rows score_stride apart, written
    first_token,
    cache_block_stride: tl.int64,
    table_stride,
    score_stride: tl.int64,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,  # NUM_HEADS, rounded up to a power of two, 16 or more
    BLOCK_NUMBERS: tl.constexpr,  # SIZE, rounded up likewise
    BLOCK_SIZE: tl.constexpr,
    CACHE_ROW: tl.constexpr,
    TOP_K: tl.constexpr,
    POOL: tl.constexpr,
    NUM_LAST: tl.constexpr,
    KEYS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Program (token of the launch, part of its tiles of keys). Key i lies in the place of the last token of pool i."""
    row = tl.program_id(0).to(tl.int64)
    token = first_token + row
    count = tl.maximum(tl.load(seen + token) - NUM_LAST, 0) // POOL
    if count <= TOP_K:
        return
    heads, numbers, lanes = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_NUMBERS), tl.arange(0, KEYS)
    is_head, is_number = heads < NUM_HEADS, numbers < SIZE
    places = (token * NUM_HEADS + heads)[:, None] * SIZE + numbers[None, :]
    query = tl.load(queries + places, mask=is_head[:, None] & is_number[None, :], other=0.0)
    query = query.to(cache.dtype.element_ty)
    weight = tl.load(weights + token * NUM_HEADS + heads, mask=is_head, other=0.0)
    table = tables + tl.load(slots + token) * table_stride
    begin, step, last = tl.program_id(1) * KEYS, tl.num_programs(1) * KEYS, count - 1
    # The next tile's blocks are loaded ahead of their use, as in `attention_fold.fold_keys`.
    next_block = tl.load(table + (tl.minimum(begin + lanes, last) * POOL + (POOL - 1)) // BLOCK_SIZE)
    for start in tl.range(begin, count, step, num_stages=NUM_STAGES):
        keys = start + lanes
        block, offset = next_block.to(tl.int64), (keys * POOL + (POOL - 1)) % BLOCK_SIZE
        next_block = tl.load(table + (tl.minimum(keys + step, last) * POOL + (POOL - 1)) // BLOCK_SIZE)
        is_read = (keys <= last)[:, None] & is_number[None, :]
        key_places = (block * cache_block_stride + offset * CACHE_ROW)[:, None] + numbers[None, :]
        key = tl.load(cache + key_places, mask=is_read, other=0.0)
        products = tl.dot(key, query.T, input_precision="ieee")
        found = tl.sum(tl.maximum(products, 0.0) * weight[None, :], 1)
        tl.store(scores + row * score_stride + keys, found, mask=keys <= last)


@triton.jit(do_not_specialize=["first_token", "num_rows", "table_stride"], do_not_specialize_on_alignment=["tables"])
def _best_scores_kernel(
    queries,  # [T, SIZE], contiguous
    cache,  # blocks cache_block_stride apart, tokens CACHE_ROW
    seen,  # [T] int32
    slots,  # [T] int64
    tables,  # [slots, ...] int32, rows table_stride apart
    scores,  # [tokens of the launch, most pools] float32, rows score_stride apart, written
    first_token,
    num_rows,  # tokens of the launch
    cache_block_stride: tl.int64,
    table_stride,
    score_stride: tl.int64,
    SIZE: tl.constexpr,
    BLOCK_NUMBERS: tl.constexpr,  # SIZE, rounded up to a power of two, 16 or more
    BLOCK_SIZE: tl.constexpr,
    CACHE_ROW: tl.constexpr,
    TOP_K: tl.constexpr,
    POOL: tl.constexpr,
    NUM_LAST: tl.constexpr,
    KEYS: tl.constexpr,  # a multiple of POOL
    TOKENS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Program (TOKENS tokens of the launch, part of their tiles of keys): the score of a pool is the highest product of
    its keys. Tokens of one request are multiplied together, as those of a prompt are, and requests one by one."""
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    token = first_token + row
    is_row = row < num_rows
    count = tl.maximum(tl.load(seen + token, mask=is_row, other=0) - NUM_LAST, 0) // POOL
    count = tl.where(count > TOP_K, count, 0)
    slot = tl.where(count > 0, tl.load(slots + token, mask=is_row, other=0), -1)
    numbers, lanes = tl.arange(0, BLOCK_NUMBERS), tl.arange(0, KEYS)
    is_number = numbers < SIZE
    query_places = token.to(tl.int64)[:, None] * SIZE + numbers[None, :]
    query = tl.load(queries + query_places, mask=is_row[:, None] & is_number[None, :], other=0.0)
    query = query.to(cache.dtype.element_ty)
    score_rows = scores + row.to(tl.int64) * score_stride
    begin, step = tl.program_id(1) * KEYS, tl.num_programs(1) * KEYS
    current = tl.max(slot)
    while current >= 0:
        table = tables + current * table_stride
        own_count = tl.where(slot == current, count, 0)
        end = tl.max(own_count) * POOL
        # The next tile's blocks are loaded ahead of their use, as in `attention_fold.fold_keys`.
        next_block = tl.load(table + tl.minimum(begin + lanes, end - 1) // BLOCK_SIZE)
        for start in tl.range(begin, end, step, num_stages=NUM_STAGES):
            keys = start + lanes
            block = next_block.to(tl.int64)
            next_block = tl.load(table + tl.minimum(keys + step, end - 1) // BLOCK_SIZE)
            key_places = (block * cache_block_stride + keys % BLOCK_SIZE * CACHE_ROW)[:, None] + numbers[None, :]
            key = tl.load(cache + key_places, mask=(keys < end)[:, None] & is_number[None, :], other=0.0)
            products = tl.dot(query, key.T, input_precision="ieee")
            found = tl.max(tl.reshape(products, [TOKENS, KEYS // POOL, POOL]), 2)
            pool = start // POOL + tl.arange(0, KEYS // POOL)
            tl.store(score_rows[:, None] + pool[None, :], found, mask=pool[None, :] < own_count[:, None])
        current = tl.max(tl.where(slot < current, slot, -1))


@triton.jit
def _load_ordered(scores, places, is_read):
    """Load scores as whole numbers of 32 bits without a sign, whose order is theirs."""
    score = tl.load(scores + places, mask=is_read, other=0.0)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # 0 has two signs
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["first_token"])
def _select_keys_kernel(
    scores,  # [tokens of the launch, most keys] float32, rows score_stride apart
    seen,  # [T] int32
    chosen,  # [T, TOP_K] int32, rows chosen_stride apart, written
    first_token,
    score_stride: tl.int64,
    chosen_stride: tl.int64,
    TOP_K: tl.constexpr,
    POOL: tl.constexpr,
    NUM_LAST: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Program (token of the launch)."""
    row = tl.program_id(0).to(tl.int64)
    token = first_token + row
    count = tl.maximum(tl.load(seen + token) - NUM_LAST, 0) // POOL
    scores += row * score_stride
    chosen += token * chosen_stride
    lanes = tl.arange(0, KEYS)
    if count <= TOP_K:
        for start in tl.range(0, count, KEYS):
            tl.store(chosen + start + lanes, start + lanes, mask=start + lanes < count)
        return
    bins = tl.arange(0, _BINS)
    left = TOP_K  # how many are still to be found among scores whose first bits are `prefix`
    prefix = tl.full([], 0, tl.uint32)
    for number in tl.static_range(4):
        shift = 24 - 8 * number
        counts = tl.zeros([_BINS], tl.int32)
        for start in tl.range(0, count, KEYS):
            is_read = start + lanes < count
            ordered = _load_ordered(scores, start + lanes, is_read)
            digit = (ordered >> shift) & 255
            if number > 0:
                is_read = is_read & ((ordered >> (shift + 8)) == prefix)
            # Those that do not count fall into the lowest bin, which is asked last.
            counts += tl.histogram(tl.where(is_read, digit, 0).to(tl.int32), _BINS)
        up_to = tl.cumsum(counts, 0, reverse=True)
        above = up_to - counts
        is_bin = (above < left) & (up_to >= left)
        prefix = (prefix << 8) | tl.sum(tl.where(is_bin, bins, 0), 0).to(tl.uint32)
        left -= tl.sum(tl.where(is_bin, above, 0), 0)
    written = 0
    for start in tl.range(0, count, KEYS):
        is_read = start + lanes < count
        ordered = _load_ordered(scores, start + lanes, is_read)
        is_equal = (is_read & (ordered == prefix)).to(tl.int32)
        is_taken = is_read & ((ordered > prefix) | ((is_equal > 0) & (tl.cumsum(is_equal, 0) <= left)))
        left -= tl.sum(is_equal, 0)
        taken = is_taken.to(tl.int32)
        tl.store(chosen + written + tl.cumsum(taken, 0) - 1, start + lanes, mask=is_taken)
        written += tl.sum(taken, 0)


def choose_keys(
    queries: Tensor,
    weights: Tensor | None,
    cache: Tensor,
    tokens: TokenKeys,
    chosen: Tensor,
    scores: Tensor,
    pools: Pools = SINGLE_KEYS,
) -> None:
    """See `nvcli.kernels.chosen_keys.choose_keys`."""
    num_tokens, num_heads, size = queries.shape
    top_k, max_rows = chosen.shape[1], len(scores)
    assert queries.is_contiguous()
    assert weights.is_contiguous() if weights is not None else num_heads == 1
    assert cache.stride(2) == chosen.stride(1) == tokens.tables.stride(1) == scores.stride(1) == 1
    processors = num_multiprocessors(queries.device)
    programs = _PROGRAMS_PER_PROCESSOR * processors
    is_alone = min(num_tokens, max_rows) <= processors
    has_room = shared_memory_bytes(queries.device) > _SHARED_MEMORY and cache.dtype.itemsize <= 2
    selected, warps = (_SELECTED_ALONE, _SELECT_WARPS_ALONE) if is_alone else (_SELECTED, _SELECT_WARPS)
    of_score, together = 1, 1  # keys that make a score, and tokens of a program
    if weights is None:
        of_score, together = pools.size, _TOGETHER if num_tokens > _MANY else _FEW_TOGETHER
    keys = max(_KEYS, of_score)
    selected = min(selected, max(32, next_power_of_2(scores.shape[1])))
    warps = min(warps, max(1, selected // _SELECTED_BY_WARP))
    constants = {
        "SIZE": size,
        "BLOCK_NUMBERS": max(16, next_power_of_2(size)),
        "BLOCK_SIZE": cache.shape[1],
        "CACHE_ROW": cache.stride(1),
        "TOP_K": top_k,
        "POOL": pools.size,
        "NUM_LAST": pools.num_last,
        "KEYS": keys,
        "NUM_STAGES": _STAGES if has_room else _FEWER_STAGES,
        "num_warps": _WARPS,
    }
    strides = cache.stride(0), tokens.tables.stride(0), scores.stride(0)
    for first in range(0, num_tokens, max_rows):
        num_rows = min(max_rows, num_tokens - first)
        tiles = ceil_div(num_rows, together)
        num_parts = max(1, min(ceil_div(scores.shape[1] * of_score, keys), ceil_div(programs, tiles)))
        if weights is None:
            _best_scores_kernel[tiles, num_parts](
                queries, cache, *tokens, scores, first, num_rows, *strides, TOKENS=together, **constants
            )
        else:
            _index_scores_kernel[tiles, num_parts](
                queries,
                weights,
                cache,
                *tokens,
                scores,
                first,
                *strides,
                NUM_HEADS=num_heads,
                BLOCK_HEADS=max(16, next_power_of_2(num_heads)),
                **constants,
            )
        _select_keys_kernel[(num_rows,)](
            scores,
            tokens.seen,
            chosen,
            first,
            scores.stride(0),
            chosen.stride(0),
            TOP_K=top_k,
            POOL=pools.size,
            NUM_LAST=pools.num_last,
            KEYS=selected,
            num_warps=warps,
        )
