"""Paged attention in Triton that gives a token the same bits in every batch: decoded or in a chunk of any prompt, and
however many other rows there are.

A token's keys are cut into splits of SPLIT keys (`decode_work_list.py`), counted from the request's first token, and a
split into tiles of KEYS keys. Within a split the softmax runs on from tile to tile (FlashAttention-2; Dao, 2023); the
splits' results are put together in their order. A tile whose keys a token does not see changes nothing of its result.
So the result follows from the token's position, whatever tile of queries it stands in, whichever program computes a
split, and whether one program computes all of a row's splits or a program each.

One kernel serves decode rows and prefill chunks. It is compiled for tiles of few queries and of many, which must not
show in the result: sums over a tile's keys are matrix products, too, whose order is the same in both, and what the
compiler might fuse is fused by hand.

Held to `attention/torch_backend.py` by tests/attention. Shapes: T tokens, B rows of one token, H query heads, KV heads,
G = H / KV, D head_dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nvcli.kernels.triton.attention.attention_fold import (
    ITEM_FIELDS,
    Tile,
    fold_keys,
    load_query,
    load_query_tail,
    load_sinks,
    weighted_mean,
)
from nvcli.kernels.triton.attention.attention_launch import AttentionShape
from nvcli.kernels.triton.attention.decode_work_list import MAX_PARTIALS, SPLIT
from nvcli.kernels.triton.attention.prefill_tiles import read_tile
from nvcli.kernels.whole_numbers import next_power_of_2

_TILE_BYTES = 16 << 10
"""Bytes of keys, and as many of values, in each pipeline stage."""
_DECODE_STAGES = 3
_SMALL_STAGES, _SMALL_REGISTERS = 2, 128
"""Stages of decode programs of two warps with heads of up to 64, and registers of a thread: more programs fit on a
multiprocessor. An H200 takes 28 µs for 256 rows with windows of 128, and 31 with three stages and 168 registers;
without windows 120 and 121."""
_FEW_ROWS = 64
"""Up to this many decode rows, programs of more warps are faster: Qwen3-8B's layer on an H200 takes 19 us for 16 rows
of 860 keys with 4 warps and 25 with 2, and 219 and 215 us for 256 rows."""
_VERIFIED_CAPABILITY = (9, 0)
"""GPUs on which the matrix instructions of large tiles were seen to give the bits of those of small tiles."""


@triton.jit
def _fold_split(
    query,
    tail,
    unit,
    k_cache,
    v_cache,
    table,
    kv_head,
    begin,  # a multiple of the keys of a tile
    end,
    first_read,
    firsts,
    lasts,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend keys of one split; the arguments are those of `fold_keys`: → highest score [ROWS], sum of weights [ROWS],
    weighted values [ROWS, D]; -inf, 0 and 0 for a row that sees none of them."""
    ROWS: tl.constexpr = TILE.rows
    HEAD_DIM: tl.constexpr = KIND.head_dim
    highest, sums, acc, _ = fold_keys(
        query, tail, unit, tl.full([ROWS], -float("inf"), tl.float32), tl.zeros([ROWS, 16], tl.float32),
        tl.zeros([ROWS, HEAD_DIM], tl.float32), tl.zeros([ROWS], tl.float32), k_cache, v_cache, table, kv_head, begin,
        end, None, first_read, firsts, lasts, KIND, TILE.keys, TILE.num_stages, MASKED, False,
    )  # fmt: skip
    return highest, tl.max(sums, 1), acc


@triton.jit
def _merge(total_highest, total_sum, total, highest, weight_sum, acc):
    """Add a split's results to those of the splits before it; -inf, 0 and 0 stand for no keys."""
    new_highest = tl.maximum(total_highest, highest)
    reference = tl.where(new_highest == -float("inf"), 0.0, new_highest)
    decay = tl.exp2(total_highest - reference)
    growth = tl.exp2(highest - reference)
    total_sum = tl.fma(total_sum, decay, weight_sum * growth)
    total = tl.fma(total, decay[:, None], acc * growth[:, None])
    return new_highest, total_sum, total


@triton.jit
def _join_parts(
    total_sum,
    total,
    start_highest,
    start_sum,
    in_chunk,
    partial_out,
    partial_highest,
    partial_sum,
    first_place,  # [ROWS], the places of the tile's queries in the first part
    part_queries,  # places of a part
    num_parts,
    arrival,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Join the parts of a row that was cut, in the last of their programs to finish: → whether this is the last
    program, or the only one, and the row's sum and weighted values."""
    is_last = True
    if num_parts > 1:
        # All threads have stored before one of them says so; acquire and release order it across programs.
        is_last = tl.atomic_add(arrival, 1, sem="acq_rel") == num_parts - 1
        if is_last:
            tl.store(arrival, 0)  # for the next layer
            total_highest = start_highest
            total_sum = start_sum
            total = tl.zeros([ROWS, HEAD_DIM], tl.float32)
            for part in tl.range(0, num_parts, num_stages=1):
                place = first_place + part * part_queries
                place_offset = place[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
                # .cg: past the L1 cache, which may hold what was there before the other programs stored.
                total_highest, total_sum, total = _merge(
                    total_highest,
                    total_sum,
                    total,
                    tl.load(partial_highest + place, mask=in_chunk, other=-float("inf"), cache_modifier=".cg"),
                    tl.load(partial_sum + place, mask=in_chunk, other=0.0, cache_modifier=".cg"),
                    tl.load(partial_out + place_offset, mask=in_chunk[:, None], other=0.0, cache_modifier=".cg"),
                )
    return is_last, total_sum, total


@triton.jit(do_not_specialize=["block_table_stride", "window"], do_not_specialize_on_alignment=["block_tables"])
def invariant_attention_kernel(
    q,  # [T, H, D], tokens q_stride apart
    k_cache,
    v_cache,
    block_tables,  # [slots, ...] int32, rows block_table_stride apart
    sinks,  # [H] float32, if heads have them
    out,  # [T, H, D], contiguous
    items,  # [capacity, ITEM_FIELDS] int32: tiles of `prefill_tiles.py`, or with IS_DECODE chunks of whole splits
    num_items,  # [1] int32
    starts,  # with IS_DECODE, [B + 1] int32, the first token of each row; None: they have one each
    log_sums,  # None
    partial_out,  # [most parts + B, KV, G, D] float32; this and the next three with IS_DECODE
    partial_highest,  # [most parts + B, KV, G] float32; with `starts` tiles of queries in place of G
    partial_sum,  # the same
    arrivals,  # [B, KV] int32, or [B, KV, tiles of queries], 0 between launches
    window,
    scale_log2,
    q_stride,
    block_table_stride,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    IS_DECODE: tl.constexpr,
):
    """Program i takes KV head i % KV, and items i / KV, i / KV + programs of a head and so on; with `starts` program
    (i, j) takes tile i % tiles of the queries in KV head i / tiles, and items j, j + programs and so on. Row r of an
    item's tile is head r % G of token r / G of the request's chunk."""
    ROWS: tl.constexpr = TILE.rows
    HEAD_DIM: tl.constexpr = KIND.head_dim
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM)
    if starts is None:
        kv_head = tl.program_id(0) % KIND.num_kv_heads
        first_program, num_programs = tl.program_id(0) // KIND.num_kv_heads, tl.num_programs(0) // KIND.num_kv_heads
    else:
        num_tiles = tl.num_programs(0) // KIND.num_kv_heads
        query_tile = tl.program_id(0) % num_tiles
        kv_head = tl.program_id(0) // num_tiles
        first_program, num_programs = tl.program_id(1), tl.num_programs(1)
    for index in range(first_program, tl.load(num_items), num_programs):
        item = items + index * ITEM_FIELDS
        first_seen = None  # the first key that any row sees, and that each one does
        first_of_row = None
        last_of_row = None
        if IS_DECODE:
            batch_row = tl.load(item)
            end = tl.load(item + 2)
            num_parts = tl.load(item + 3)
            slot = tl.load(item + 6)
            first_split = tl.load(item + 1) // SPLIT
            if starts is None:
                first_token = batch_row
                first_row = 0
                num_tokens = 1
                if KIND.has_window:
                    first_seen = tl.load(item + 7)
            else:
                first_token = tl.load(starts + batch_row)
                first_row = query_tile * ROWS
                num_tokens = tl.load(starts + batch_row + 1) - first_token
                prefix = tl.load(item + 7) - num_tokens
                last_of_row = prefix + (first_row + rows) // KIND.group
                if KIND.has_window:
                    first_seen = tl.maximum(prefix + first_row // KIND.group - window + 1, 0)
                    first_of_row = last_of_row - window + 1
        else:
            slot, first_row, first_token, num_tokens, num_keys = read_tile(items, index)
            prefix = num_keys - num_tokens  # below 0 for tokens that attend to nothing
            end = tl.maximum(prefix + tl.minimum((first_row + ROWS - 1) // KIND.group, num_tokens - 1) + 1, 0)
            seen_by_all = prefix + first_row // KIND.group + 1
            last_of_row = prefix + (first_row + rows) // KIND.group
            first_split = 0
            if KIND.has_window:
                first_seen = tl.maximum(prefix + first_row // KIND.group - window + 1, 0)
                first_of_row = last_of_row - window + 1
                first_split = first_seen // SPLIT
        token = (first_row + rows) // KIND.group
        in_chunk = token < num_tokens
        head = kv_head * KIND.group + (first_row + rows) % KIND.group
        flat_token = (first_token + token).to(tl.int64)
        query, unit = load_query(q, k_cache, flat_token, head, in_chunk, q_stride, scale_log2, KIND)
        tail = None
        if KIND.tail_dim:
            tail = load_query_tail(q, k_cache, flat_token, head, in_chunk, q_stride, unit, scale_log2, KIND)
        table = block_tables + slot.to(tl.int64) * block_table_stride

        start_highest = tl.full([ROWS], -float("inf"), tl.float32)
        start_sum = tl.zeros([ROWS], tl.float32)
        if KIND.has_sinks:
            start_highest = load_sinks(sinks, head, in_chunk)
            start_sum += 1.0
        if IS_DECODE:
            # A part of a cut row leaves its result in a place of its own, and any other row its running one.
            is_cut = num_parts > 1
            if starts is None:
                place = tl.where(is_cut, tl.load(item + 4) + tl.load(item + 5), MAX_PARTIALS + first_token)
                place = (place * KIND.num_kv_heads + kv_head) * KIND.group + rows
                arrival = arrivals + first_token * KIND.num_kv_heads + kv_head
                part_queries = KIND.num_kv_heads * KIND.group
            else:
                place = tl.where(is_cut, tl.load(item + 4) + tl.load(item + 5), batch_row)
                place = (place * KIND.num_kv_heads + kv_head) * num_tiles + query_tile
                place = place * ROWS + rows + tl.where(is_cut, 0, MAX_PARTIALS * (KIND.num_kv_heads * KIND.group))
                arrival = arrivals + (batch_row * KIND.num_kv_heads + kv_head) * num_tiles + query_tile
                part_queries = KIND.num_kv_heads * num_tiles * ROWS
            place_offset = place[:, None] * HEAD_DIM + dims[None, :]
        total_highest = start_highest
        total_sum = start_sum
        total = tl.zeros([ROWS, HEAD_DIM], tl.float32)
        end_split = tl.cdiv(end, SPLIT)
        for split in range(first_split, end_split):
            begin = split * SPLIT
            is_seen_by_all = False
            if not IS_DECODE:
                is_seen_by_all = begin + SPLIT <= seen_by_all
            if KIND.has_window:
                begin = tl.maximum(begin, first_seen // TILE.keys * TILE.keys)
                if not IS_DECODE:
                    is_seen_by_all = is_seen_by_all and begin >= end - window  # every row's window has begun
            if is_seen_by_all:
                highest, weight_sum, acc = _fold_split(
                    query, tail, unit, k_cache, v_cache, table, kv_head, begin, (split + 1) * SPLIT, None, None, None,
                    KIND, TILE, False,
                )  # fmt: skip
            else:
                highest, weight_sum, acc = _fold_split(
                    query, tail, unit, k_cache, v_cache, table, kv_head, begin, tl.minimum((split + 1) * SPLIT, end),
                    first_seen, first_of_row, last_of_row, KIND, TILE, True,
                )  # fmt: skip
            if IS_DECODE:
                # The running result waits in memory: registers are what limits how many programs run at a time.
                is_behind = in_chunk & (split > first_split)
                total_highest = tl.load(partial_highest + place, mask=is_behind, other=-float("inf"))
                total_sum = tl.load(partial_sum + place, mask=is_behind, other=0.0)
                total = tl.load(partial_out + place_offset, mask=is_behind[:, None], other=0.0)
                if KIND.has_sinks:  # of a cut row it is counted when the parts are put together
                    is_start = (split == first_split) & (num_parts == 1)
                    total_highest = tl.where(is_start, start_highest, total_highest)
                    total_sum = tl.where(is_start, start_sum, total_sum)
            total_highest, total_sum, total = _merge(total_highest, total_sum, total, highest, weight_sum, acc)
            if IS_DECODE:
                is_stored = in_chunk & (is_cut | (split + 1 < end_split))
                tl.store(partial_out + place_offset, total, mask=is_stored[:, None])
                tl.store(partial_highest + place, total_highest, mask=is_stored)
                tl.store(partial_sum + place, total_sum, mask=is_stored)
                tl.debug_barrier()

        is_last = True
        if IS_DECODE:
            is_last, total_sum, total = _join_parts(
                total_sum, total, start_highest, start_sum, in_chunk, partial_out, partial_highest, partial_sum,
                place - tl.load(item + 5) * part_queries, part_queries, num_parts, arrival, ROWS, HEAD_DIM,
            )  # fmt: skip
        if is_last:
            out_offset = (flat_token * (KIND.num_kv_heads * KIND.group) + head)[:, None] * HEAD_DIM + dims[None, :]
            result = weighted_mean(total, total_sum, start_sum, False)
            tl.store(out + out_offset, result.to(out.dtype.element_ty), mask=in_chunk[:, None])


def _keys(shape: AttentionShape) -> int:
    """Choose the keys of a tile by head size and type alone, as results depend on it."""
    keys = min(64, max(16, _TILE_BYTES // (shape.tile_dim * shape.dtype.itemsize)))
    assert SPLIT.value % keys == 0
    return keys


def invariant_decode_tile(shape: AttentionShape, num_rows: int) -> Tile:
    """Choose the tile for a step of this many decode rows."""
    rows = max(16, next_power_of_2(shape.group))
    num_warps = _warps_of_large_heads(shape, rows) or (4 if num_rows <= _FEW_ROWS else 2)
    num_stages = _SMALL_STAGES if _is_small(shape, num_warps) else _DECODE_STAGES
    return Tile(rows=rows, keys=_keys(shape), num_warps=num_warps, num_stages=num_stages)


def invariant_draft_tile(shape: AttentionShape, width: int) -> Tile:
    """Choose the tile for decode rows of up to `width` tokens."""
    rows = min(64, max(16, next_power_of_2(width * shape.group)))
    num_warps = _warps_of_large_heads(shape, rows) or (4 if rows >= 64 else 2)
    return Tile(rows=rows, keys=_keys(shape), num_warps=num_warps, num_stages=2)


def _warps_of_large_heads(shape: AttentionShape, rows: int) -> int:
    """Return the warps of decode programs with heads above 256, in whose registers the results of `rows` queries
    stand; 0 for smaller heads."""
    return 0 if shape.tile_dim <= 256 else 4 if rows <= 32 else 8


def invariant_registers(shape: AttentionShape, tile: Tile) -> int | None:
    """Return the most registers of a thread of decode programs; None: no limit."""
    return _SMALL_REGISTERS if _is_small(shape, tile.num_warps) else None


def _is_small(shape: AttentionShape, num_warps: int) -> bool:
    return shape.tile_dim <= 64 and num_warps == 2


def invariant_prefill_tile(shape: AttentionShape) -> Tile:
    """Choose the tile for chunks."""
    if shape.dtype.itemsize > 2:  # float32 runs without tensor cores: for tests
        rows, num_warps = 16, 4
    elif shape.tile_dim > 256:
        rows, num_warps = 32, 8
    elif torch.cuda.get_device_capability(shape.device) != _VERIFIED_CAPABILITY:
        rows, num_warps = 32, 2 if shape.tile_dim <= 128 else 4
    else:
        rows, num_warps = 128 if shape.tile_dim <= 128 else 64, 8
    return Tile(rows=rows, keys=_keys(shape), num_warps=num_warps, num_stages=2)
