"""The kernel of `invariant_attention.py`, which says what it promises. Shapes: T tokens, B rows of one token, H query
heads, KV heads, G = H / KV, D head_dim."""

from __future__ import annotations

import triton
import triton.language as tl

from nvcli.kernels.triton.decode_attention import log2_scores, soft_capped


@triton.jit
def _fold(
    query,  # [ROWS, D]
    k_cache,
    v_cache,
    table,  # the request's row of the block tables
    kv_head,
    begin,  # a multiple of KEYS
    end,
    first_seen,  # keys before it are seen by no row, and not read
    positions,  # [ROWS]
    window,
    scale_log2,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Attend keys [begin, end) of one split: → highest score [ROWS], sum of weights [ROWS], weighted values [ROWS, D];
    -inf, 0 and 0 for a row that sees none of them. Without MASKED every row sees all of them, and they are a whole
    number of tiles."""
    ONE_BLOCK: tl.constexpr = BLOCK_SIZE % KEYS == 0  # a tile of keys never straddles blocks
    lanes = tl.arange(0, KEYS)
    dims = tl.arange(0, HEAD_DIM)
    last_key = tl.maximum(end - 1, 0)
    # The next tile's block id is loaded ahead: see decode_attention.
    if ONE_BLOCK:
        next_block = tl.load(table + tl.minimum(begin, last_key) // BLOCK_SIZE)
    else:
        next_block = tl.load(table + tl.minimum(begin + lanes, last_key) // BLOCK_SIZE)
    highest = tl.full([ROWS], -float("inf"), tl.float32)
    sums = tl.zeros([ROWS, 16], tl.float32)  # 16 equal columns
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    ones = tl.full([KEYS, 16], 1.0, v_cache.dtype.element_ty)
    for start in tl.range(begin, end, KEYS, num_stages=NUM_STAGES):
        keys = start + lanes
        block = next_block.to(tl.int64)
        if ONE_BLOCK:
            next_block = tl.load(table + tl.minimum(start + KEYS, last_key) // BLOCK_SIZE)
            offset = start % BLOCK_SIZE + lanes
        else:
            next_block = tl.load(table + tl.minimum(keys + KEYS, last_key) // BLOCK_SIZE)
            offset = keys % BLOCK_SIZE
        row_offset = block * BLOCK_STRIDE + (offset * NUM_KV_HEADS + kv_head) * HEAD_DIM
        cache_offset = row_offset[:, None] + dims[None, :]
        if MASKED:
            # What lies before the first key or behind the last may be anything: 0 × NaN would be NaN.
            is_read = keys < end
            if HAS_WINDOW:
                is_read = is_read & (keys >= first_seen)
            key = tl.load(k_cache + cache_offset, mask=is_read[:, None], other=0.0)
        else:
            key = tl.load(k_cache + cache_offset)
        scores = tl.dot(query, key.T, input_precision="ieee")
        unit = scale_log2
        if SOFT_CAP > 0:
            scores = soft_capped(scores * scale_log2, SOFT_CAP)
            unit = 1.0
        if MASKED:
            is_seen = keys[None, :] <= positions[:, None]
            if HAS_WINDOW:
                is_seen = is_seen & (keys[None, :] > positions[:, None] - window)
            scores = tl.where(is_seen, scores, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1) * unit)
        reference = new_highest
        if MASKED:  # a row that has seen nothing yet: -inf minus -inf would be NaN
            reference = tl.where(new_highest == -float("inf"), 0.0, new_highest)
        decay = tl.exp2(highest - reference)
        weights = tl.exp2(tl.fma(scores, unit, -reference[:, None]))
        if MASKED:
            value = tl.load(v_cache + cache_offset, mask=is_read[:, None], other=0.0)
        else:
            value = tl.load(v_cache + cache_offset)
        weights = weights.to(value.dtype)
        sums = tl.dot(weights, ones, sums * decay[:, None], input_precision="ieee")
        acc = tl.dot(weights, value, acc * decay[:, None], input_precision="ieee")
        highest = new_highest
    return highest, tl.max(sums, 1), acc


@triton.jit
def _merge(total_highest, total_sum, total, highest, weight_sum, acc):
    """Put the results of a split behind those of the splits before it; -inf, 0 and 0 stand for no keys."""
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
    first_partial,
    num_parts,
    arrival,
    kv_head,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Put the parts of a row that was cut together, in the program that is the last of them: → whether this one is, or
    is the only one, and the row's sum and weighted values."""
    is_last = True
    if num_parts > 1:
        # All threads have stored before one of them says so; acquire and release order it across programs.
        is_last = tl.atomic_add(arrival, 1, sem="acq_rel") == num_parts - 1
        if is_last:
            tl.store(arrival, 0)  # for the next layer
            rows = tl.arange(0, ROWS)
            dims = tl.arange(0, HEAD_DIM)
            total_highest = start_highest
            total_sum = start_sum
            total = tl.zeros([ROWS, HEAD_DIM], tl.float32)
            for part in tl.range(0, num_parts, num_stages=1):
                place = ((first_partial + part) * NUM_KV_HEADS + kv_head) * GROUP + rows
                place_offset = place[:, None] * HEAD_DIM + dims[None, :]
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


@triton.jit(
    do_not_specialize=["block_table_stride", "window"],
    do_not_specialize_on_alignment=["block_tables"],
)
def invariant_attention_kernel(
    q,  # [T, H, D], tokens q_stride apart
    k_cache,  # [num_blocks, BLOCK_SIZE, KV, D]
    v_cache,
    out,  # [T, H, D], contiguous
    block_tables,  # [slots, ...] int32, rows block_table_stride apart
    items,  # [capacity, ITEM_FIELDS] int32: tiles of `prefill_tiles.py`, or with IS_DECODE entries of splits
    num_items,  # [1] int32
    partial_out,  # [MAX_PARTIALS + B, KV, G, D] float32; this and the next three with IS_DECODE
    partial_highest,  # [MAX_PARTIALS + B, KV, G] float32
    partial_sum,  # [MAX_PARTIALS + B, KV, G] float32
    arrivals,  # [B, KV] int32, 0 between launches
    sinks,  # [H] float32, scores that belong to no key, with HAS_SINKS
    window,  # keys that a row sees at most, where HAS_WINDOW
    scale_log2,  # scale × log2(e); positive
    q_stride,
    block_table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,  # elements from one block to the next
    HAS_WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,  # soft cap × log2(e); 0: none
    HAS_SINKS: tl.constexpr,
    IS_DECODE: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_PARTIALS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    ITEM_FIELDS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Program i takes KV head i % KV, and items i / KV, i / KV + programs of a head and so on. Row r of an item's tile
    is head r % G of token r / G of the request's chunk."""
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM)
    for index in range(tl.program_id(0) // NUM_KV_HEADS, tl.load(num_items), tl.num_programs(0) // NUM_KV_HEADS):
        item = items + index * ITEM_FIELDS
        if IS_DECODE:
            first_token = tl.load(item)
            slot = tl.load(item + 1)
            num_keys = tl.load(item + 2)
            first_split = tl.load(item + 3)
            end_split = tl.load(item + 4)
            num_parts = tl.load(item + 6)
            num_tokens = 1
            first_row = 0
        else:
            slot = tl.load(item)
            first_row = tl.load(item + 1)
            first_token = tl.load(item + 2)
            num_tokens = tl.load(item + 3)
            num_keys = tl.load(item + 4)
        prefix = num_keys - num_tokens  # below 0 for tokens that attend to nothing
        token = (first_row + rows) // GROUP
        in_chunk = token < num_tokens
        head = kv_head * GROUP + (first_row + rows) % GROUP
        end = tl.maximum(prefix + tl.minimum((first_row + ROWS - 1) // GROUP, num_tokens - 1) + 1, 0)
        seen_by_all = prefix + first_row // GROUP + 1
        first_seen = 0
        seen_from = 0  # from here on every row's window has begun
        if HAS_WINDOW:
            first_seen = tl.maximum(prefix + first_row // GROUP - window + 1, 0)
            seen_from = end - window
        if not IS_DECODE:
            first_split = first_seen // SPLIT
            end_split = tl.cdiv(end, SPLIT)
        flat_token = (first_token + token).to(tl.int64)
        query = tl.load(
            q + (flat_token * q_stride + head * HEAD_DIM)[:, None] + dims[None, :], mask=in_chunk[:, None], other=0.0
        ).to(k_cache.dtype.element_ty)
        table = block_tables + slot.to(tl.int64) * block_table_stride

        start_highest = tl.full([ROWS], -float("inf"), tl.float32)
        start_sum = tl.zeros([ROWS], tl.float32)
        if HAS_SINKS:
            start_highest = log2_scores(tl.load(sinks + head, mask=in_chunk, other=0.0))
            start_sum += 1.0
        if IS_DECODE:
            # A part of a cut row leaves its result in a place of its own, and any other row its running one.
            is_cut = num_parts > 1
            place = tl.where(is_cut, tl.load(item + 5) + tl.load(item + 7), MAX_PARTIALS + first_token)
            place = (place * NUM_KV_HEADS + kv_head) * GROUP + rows
            place_offset = place[:, None] * HEAD_DIM + dims[None, :]
        total_highest = start_highest
        total_sum = start_sum
        total = tl.zeros([ROWS, HEAD_DIM], tl.float32)
        for split in range(first_split, end_split):
            begin = split * SPLIT
            if HAS_WINDOW:
                begin = tl.maximum(begin, first_seen // KEYS * KEYS)
            is_seen_by_all = (split + 1) * SPLIT <= seen_by_all and begin >= seen_from
            if not IS_DECODE and is_seen_by_all:
                highest, weight_sum, acc = _fold(
                    query, k_cache, v_cache, table, kv_head, begin, (split + 1) * SPLIT, first_seen,
                    prefix + token, window, scale_log2, False, HAS_WINDOW, SOFT_CAP,
                    NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, ROWS, KEYS, NUM_STAGES,
                )  # fmt: skip
            else:
                highest, weight_sum, acc = _fold(
                    query, k_cache, v_cache, table, kv_head, begin, tl.minimum((split + 1) * SPLIT, end), first_seen,
                    prefix + token, window, scale_log2, True, HAS_WINDOW, SOFT_CAP,
                    NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, ROWS, KEYS, NUM_STAGES,
                )  # fmt: skip
            if IS_DECODE:
                # The running result waits in memory: registers are what limits how many programs run at a time.
                is_behind = in_chunk & (split > first_split)
                total_highest = tl.load(partial_highest + place, mask=is_behind, other=-float("inf"))
                total_sum = tl.load(partial_sum + place, mask=is_behind, other=0.0)
                total = tl.load(partial_out + place_offset, mask=is_behind[:, None], other=0.0)
                if HAS_SINKS:  # of a cut row it is counted when the parts are put together
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
                tl.load(item + 5), num_parts, arrivals + first_token * NUM_KV_HEADS + kv_head, kv_head,
                NUM_KV_HEADS, GROUP, HEAD_DIM, ROWS,
            )  # fmt: skip
        if is_last:
            # Tokens that attend to nothing get zeros.
            result = total / tl.where(total_sum > 0, total_sum, 1.0)[:, None]
            out_offset = (flat_token * (NUM_KV_HEADS * GROUP) + head)[:, None] * HEAD_DIM + dims[None, :]
            tl.store(out + out_offset, result.to(out.dtype.element_ty), mask=in_chunk[:, None])
