"""The kernel for paged decode attention in Triton: rows of one query token, or of a last token and its drafts, over
their keys and values in blocks.

A program takes one chunk of the work list (`decode_work_list.py`) and one KV head. The last chunk of a row to finish
reduces all of them, so no second kernel is needed (the split is FlashDecoding's, Dao et al. 2023).

Where rows may have several tokens, the query heads of a row's tokens stand side by side in a tile, so that keys are
read once for all of them; a row that does not fit into one tile has several. Each token sees the keys up to its own.
The kernel reads on the device how many tokens each row has. Where all rows have one, it is compiled without any of
this.

Shapes: B rows, T tokens, H query heads, KV heads, G = H / KV, D head_dim, ROWS queries of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nvcli.kernels.triton.attention.attention_fold import (
    ITEM_FIELDS,
    bias_rows,
    fold_keys,
    load_query,
    load_query_tail,
    load_sinks,
    weighted_mean,
)
from nvcli.kernels.triton.launch.dependent_launch import await_kernel_before

_LEAST = tl.constexpr(-1e30)
"""The initial maximum of the scores of a query, before any key: finite, so that it can be subtracted from itself."""
_REDUCE_STAGES = tl.constexpr(3)
"""How many loads of results are under way at a time, where that fits in shared memory."""
_MOST_STAGED, _FEW_STAGED = tl.constexpr(8192), tl.constexpr(4096)
"""The most numbers of a tile's results in a chunk that are loaded at a time, and up to which several chunks are."""


@triton.jit(do_not_specialize=["window", "block_table_stride"], do_not_specialize_on_alignment=["block_tables"])
def decode_attention_kernel(
    q,  # [T, H, D], tokens q_stride apart
    k_cache,
    v_cache,
    block_tables,  # [slots, ...] int32, rows block_table_stride apart
    sinks,  # [H] float32, if heads have them
    out,  # [T, H, D], contiguous
    items,  # [capacity, ITEM_FIELDS] int32
    num_items,  # [1] int32
    starts,  # [B + 1] int32, the first token of each row; None: they have one each
    log_sums,  # [T, H] float32, log-sum-exp of each token's scores, base 2, written; None: not wanted
    partial_out,  # [chunks of cut rows, KV, G, D] float32; with `starts` a tile of queries in place of G
    partial_lse,  # the same without D, base 2
    arrivals,  # [B, KV] int32, or [B, KV, tiles of queries], 0 between launches
    bias,  # `DistanceBias`, its two tensors; None: there is none
    bias_positions,
    window,
    scale_log2,
    q_stride,
    block_table_stride,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    IS_BESIDE: tl.constexpr,  # the kernel launched before may still be running; this one ends after it
    DEPENDENT: tl.constexpr,
):
    """Program (KV head, entry of the work list); with `starts`, or more heads than a tile has rows, the first axis is
    (KV head, tile of the row's queries)."""
    kv_head = tl.program_id(0)
    HAS_TILES: tl.constexpr = starts is not None or KIND.group > TILE.rows
    num_tiles = 1
    query_tile = 0
    if HAS_TILES:
        num_tiles = tl.num_programs(0) // KIND.num_kv_heads
        query_tile = kv_head % num_tiles
        kv_head = kv_head // num_tiles
    index = tl.program_id(1)
    await_kernel_before(DEPENDENT)
    if IS_BESIDE:
        is_last = (tl.program_id(0) == tl.num_programs(0) - 1) & (index == tl.num_programs(1) - 1)
        if is_last:
            tl.extra.cuda.gdc_wait()
    if index >= tl.load(num_items):
        return
    item = items + index * ITEM_FIELDS
    row = tl.load(item)
    begin = tl.load(item + 1)
    end = tl.load(item + 2)
    num_chunks = tl.load(item + 3)
    table = block_tables + tl.load(item + 6).to(tl.int64) * block_table_stride

    IS_FP8: tl.constexpr = k_cache.dtype.element_ty == tl.float8e4nv
    ROWS: tl.constexpr = TILE.rows
    HEAD_DIM: tl.constexpr = KIND.head_dim
    lanes = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM)
    first_seen = None
    firsts = None
    lasts = None
    PARTIALS: tl.constexpr = ROWS if HAS_TILES else KIND.group
    first_query = query_tile * ROWS
    num_places = KIND.num_kv_heads * num_tiles
    place = row * num_places + kv_head * num_tiles + query_tile
    if starts is None:
        token = row.to(tl.int64)
        is_query = first_query + lanes < KIND.group
        head = kv_head * KIND.group + first_query + lanes
        highest = tl.full([ROWS], -float("inf"), tl.float32)
        if KIND.has_window:
            first_seen = tl.load(item + 7)
    else:
        # Query i of a row is head i % G of its token i // G.
        first_token = tl.load(starts + row)
        num_tokens = tl.load(starts + row + 1) - first_token
        if first_query >= num_tokens * KIND.group:
            return
        number = (first_query + lanes) // KIND.group
        token = (first_token + number).to(tl.int64)
        is_query = number < num_tokens
        head = kv_head * KIND.group + (first_query + lanes) % KIND.group
        highest = tl.full([ROWS], _LEAST, tl.float32)  # a token may see no key of a chunk
        num_before = tl.load(item + 7) - num_tokens  # keys before the row's own tokens
        lasts = num_before + number
        if KIND.has_window:
            first_seen = tl.maximum(num_before + first_query // KIND.group - window + 1, 0)
            firsts = lasts - window + 1
    query, unit = load_query(q, k_cache, token, head, is_query, q_stride, scale_log2, KIND)
    tail = None
    if KIND.tail_dim:
        tail = load_query_tail(q, k_cache, token, head, is_query, q_stride, unit, scale_log2, KIND)
    near = bias_rows(bias, token, head, KIND)
    positions = None
    if bias is not None:
        positions = tl.load(bias_positions + token + 0 * lanes, mask=is_query, other=-1)
    weight_sum = tl.zeros([ROWS], tl.float32)
    acc_unit = tl.zeros([ROWS], tl.float32)
    if KIND.has_sinks:
        # Only a row's first chunk counts the sink, so that the sum over chunks has it once.
        is_first = tl.load(item + 5) == 0
        highest = tl.where(is_first, load_sinks(sinks, head, is_query), highest)
        weight_sum = tl.where(is_first, 1.0, weight_sum)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    highest, weight_sum, acc, acc_unit = fold_keys(
        query, tail, unit, highest, weight_sum, acc, acc_unit, k_cache, v_cache, table, kv_head, begin, end, None,
        first_seen, firsts, lasts, KIND, TILE.keys, TILE.num_stages, True,
        IS_FP8 and starts is None and KIND.tail_dim == 0, near, positions,
    )  # fmt: skip
    acc = weighted_mean(acc, weight_sum, acc_unit, IS_FP8)

    out_head = token * (KIND.num_kv_heads * KIND.group) + head
    if num_chunks == 1:
        tl.store(out + out_head[:, None] * HEAD_DIM + dims[None, :], acc.to(out.dtype.element_ty), is_query[:, None])
        if log_sums is not None:
            tl.store(log_sums + out_head, highest + tl.log2(weight_sum), mask=is_query)
    else:
        first_partial = tl.load(item + 4) * num_places + place - row * num_places
        partial = (first_partial + tl.load(item + 5) * num_places) * PARTIALS + lanes
        tl.store(partial_out + partial[:, None] * HEAD_DIM + dims[None, :], acc, mask=is_query[:, None])
        tl.store(partial_lse + partial, highest + tl.log2(weight_sum), mask=is_query)
        # All threads store before one of them signals it; acquire and release order this across programs.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + place, 1, sem="acq_rel")
        if arrived == num_chunks - 1:
            tl.store(arrivals + place, 0)  # for the next layer
            if HAS_TILES:
                _reduce_chunks(
                    out, log_sums, partial_out, partial_lse, out_head, is_query, first_partial, num_places, num_chunks,
                    PARTIALS, ROWS, HEAD_DIM,
                )  # fmt: skip
            else:  # a tile may have more rows than there are heads
                members = tl.arange(0, KIND.padded_group)
                member_head = (token * KIND.num_kv_heads + kv_head) * KIND.group + members
                _reduce_chunks(
                    out, log_sums, partial_out, partial_lse, member_head, members < KIND.group, first_partial,
                    num_places, num_chunks, PARTIALS, KIND.padded_group, HEAD_DIM,
                )  # fmt: skip


@triton.jit
def _reduce_chunks(
    out,  # [T, H, D], contiguous, written
    log_sums,
    partial_out,
    partial_lse,
    out_head,  # [ROWS] int64, the place of each query among the tokens' heads
    is_query,
    first_partial,  # the tile's results in the row's first chunk, in tiles
    num_places,  # tiles of a chunk's results
    num_chunks,
    PARTIALS: tl.constexpr,  # results of a tile in a chunk
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Combine the partial results of a tile of queries into their outputs, one or some chunks at a time."""
    WIDTH: tl.constexpr = HEAD_DIM if ROWS * HEAD_DIM <= _MOST_STAGED else _MOST_STAGED // ROWS
    CHUNKS: tl.constexpr = max(1, _FEW_STAGED // (ROWS * WIDTH))
    lanes = tl.arange(0, ROWS)
    chunks = tl.arange(0, CHUNKS)
    for first_dim in tl.static_range(0, HEAD_DIM, WIDTH):
        dims = first_dim + tl.arange(0, WIDTH)
        highest = tl.full([ROWS], _LEAST, tl.float32)
        weight_sum = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, WIDTH], tl.float32)
        for start in tl.range(0, num_chunks, CHUNKS, num_stages=_REDUCE_STAGES):
            is_read = (start + chunks < num_chunks)[:, None] & is_query[None, :]
            partial = (first_partial + (start + chunks) * num_places)[:, None] * PARTIALS + lanes[None, :]
            # .cg bypasses the L1 cache, which may hold values from before the other programs stored theirs.
            lse = tl.load(partial_lse + partial, mask=is_read, other=-float("inf"), cache_modifier=".cg")
            value = tl.load(
                partial_out + partial[:, :, None] * HEAD_DIM + dims[None, None, :],
                mask=is_read[:, :, None], other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            new_highest = tl.maximum(highest, tl.max(lse, 0))
            decay = tl.exp2(highest - new_highest)
            weights = tl.exp2(lse - new_highest[None, :])
            weight_sum = weight_sum * decay + tl.sum(weights, 0)
            acc = acc * decay[:, None] + tl.sum(value * weights[:, :, None], 0)
            highest = new_highest
        acc = acc / tl.where(weight_sum > 0, weight_sum, 1.0)[:, None]
        tl.store(out + out_head[:, None] * HEAD_DIM + dims[None, :], acc.to(out.dtype.element_ty), is_query[:, None])
    if log_sums is not None:
        tl.store(log_sums + out_head, highest + tl.log2(weight_sum), mask=is_query)
