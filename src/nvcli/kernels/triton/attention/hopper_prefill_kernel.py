"""Paged prefill attention for Hopper GPUs: FlashAttention-3's schedule (Shah et al., 2024) over keys and values read
through block tables, in Gluon, the layer of Triton that says which warps do what.

A program has three groups of warps. One brings tiles of 128 keys and of their values to shared memory by TMA, from two
halves of 64 that may lie in different blocks. The other two attend 64 rows of queries each, in turns: while one
multiplies, the other computes weights. Within a group, the next scores are multiplied while the values of the last ones
still are. Rows are laid out as in `prefill_attention.py`, and listed by `prefill_tiles.py` in tiles of 128.

There are as many programs as multiprocessors, and they share out the list, which is sorted by how long a tile takes.
What a tile's loads, its queries and its result take is hidden behind another tile's work. Of a tile, the keys that not
all rows see come first, with masks, and then the others without. Of a prefix that chunks share, all rows see all keys.

On an H200 a layer of 32 query heads and 8 KV heads of 128 in bfloat16 takes, in microseconds, against
`prefill_attention.py`: 1,799 against 2,696 for two prompts of 8,192 tokens, 3,857 against 5,497 for one of 16,384,
4,755 against 6,916 for 8,192 tokens that end at 24,576, 136 against 156 for 20 of 200 to 600, 97 against 98 for 150 of
50. With 16 query heads it takes 928 against 1,313, 1,679 against 2,684, 2,337 against 3,253, 74 against 82, and 58
against 55: nowhere much more. cuDNN takes 1,738 and 3,855 for the first two, from contiguous tensors of 32 KV heads.
Lists were then in the order of prompts (`prefill_tiles.py` says what sorting them is for).

`prefill_choice.py` says what it serves. Gluon has no interpreter: tests simulate it.
Shapes: T tokens of all chunks, H query heads, KV heads, G = H / KV, D head_dim.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nvcli.kernels.triton.attention.attention_fold import ITEM_FIELDS
from nvcli.kernels.triton.launch.triton_version import reinterpret, tma_load

_LOG2_E = gl.constexpr(1.4426950408889634)
ROWS = gl.constexpr(128)
"""Rows of a tile, half of them for each group of warps."""
PART = gl.constexpr(64)
"""Keys and columns of what one TMA load brings: 64 columns of 16 bits are the 128 bytes of its swizzle."""
_STAGES = gl.constexpr(2)
"""Tiles of keys, and of values, that are being loaded or used."""
_LOADING_WARPS = gl.constexpr(4)


@gluon.jit
def list_item(step, count):
    """Return the next item of the list for this program, one of `count`. Programs take items in one direction and then
    in the other, so that none gets the longer one of every round."""
    place = gl.program_id(0)
    return step * count + gl.where(step % 2 == 0, place, count - 1 - place)


@gluon.jit
def stage_of(i, STAGES: gl.constexpr):
    """Return the place in shared memory of the i-th tile, and the phase of its barriers."""
    return i % STAGES, (i // STAGES) & 1


@gluon.jit
def make_barriers(STAGES: gl.constexpr):
    """Return the barriers that say, of each stage, that its keys are there and that its values are, and that both
    groups have read them; and those of the groups' turns."""
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_free.index(stage), count=2)
    for group in gl.static_range(2):
        mbarrier.init(turns.index(group), count=1)
    fence_async_shared()
    return k_full, v_full, k_free, v_free, turns


@gluon.jit
def _read_tile(tiles, members, item, KIND: gl.constexpr, IS_PREFIX: gl.constexpr):
    """Return the slot, the first row, the chunk's first token and its number of tokens, the tokens before the chunk
    (below 0 for tokens that attend to nothing), how many keys are attended without masks, a whole number of tiles, and
    how many are seen by any row, the request's keys, and the first key.

    Of a segment: the slot of the tile's first row, 0, the place of its first member and their number, 0, the keys that
    count as those of a prefix do, and the first key: that of the segment's chunk, from which the others count."""
    KEYS: gl.constexpr = KIND.hopper_keys
    tile = tiles + item // KIND.num_kv_heads * ITEM_FIELDS
    if members is not None:
        first_member = gl.load(tile) + gl.load(tile + 1)
        num_members = gl.load(tile + 2)
        first_key = gl.load(tile + 3)
        num_keys = gl.load(tile + 4) - first_key
        slot = gl.load(tile + 6)
        full = gl.maximum(num_keys - 1, 0) // KEYS * KEYS
        return slot, 0, first_member, num_members, 0, full, num_keys, num_keys, first_key
    slot = gl.load(tile)
    first_row = gl.load(tile + 1)
    first_token = gl.load(tile + 2)
    num_tokens = gl.load(tile + 3)
    num_keys = gl.load(tile + 4)
    prefix = num_keys - num_tokens
    if IS_PREFIX:
        # The last tile takes the masks, which it may need at its end.
        full = gl.maximum(num_keys - 1, 0) // KEYS * KEYS
        end = num_keys
    else:
        last_token = gl.minimum((first_row + ROWS - 1) // KIND.group, num_tokens - 1)
        full = gl.maximum(prefix + first_row // KIND.group, 0) // KEYS * KEYS
        end = gl.maximum(prefix + last_token + 1, 0)
    return slot, first_row, first_token, num_tokens, prefix, full, end, num_keys, 0


@gluon.jit
def _copy_part(cache, offset, row_stride, num_rows, part):
    """Store the first `num_rows` of 64 rows to shared memory, followed by zeros."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [_LOADING_WARPS, 1], [1, 0])
    rows = gl.arange(0, PART, gl.SliceLayout(1, layout))
    columns = gl.arange(0, PART, gl.SliceLayout(0, layout))
    places = offset + rows[:, None] * row_stride + columns[None, :]
    part.store(gl.load(cache + places, mask=(rows < num_rows)[:, None], other=0.0))


@gluon.jit
def _load(cache, work, k_stages, v_stages, KIND: gl.constexpr, IS_PREFIX: gl.constexpr):
    """Run the group of warps that loads: for each tile of rows the keys from `full` to `end`, then those up to `full`.
    `attend_tiles` makes the other arguments."""
    k_desc, v_desc, v_cache, block_tables, block_table_stride = cache
    tiles, members, _first_partials, num_items, num_programs = work
    k_smem, k_tail_smem, k_full, k_free = k_stages
    v_smem, v_full, v_free = v_stages
    KEYS: gl.constexpr = KIND.hopper_keys
    HALVES: gl.constexpr = KEYS // PART
    PANELS: gl.constexpr = KIND.head_dim // PART
    KEY_BYTES: gl.constexpr = KEYS * (KIND.head_dim + KIND.tail_dim) * 2
    VALUE_BYTES: gl.constexpr = KEYS * KIND.head_dim * 2
    ROW_STRIDE: gl.constexpr = KIND.row_size
    BLOCK_SIZE: gl.constexpr = KIND.block_size
    BLOCK_ROWS: gl.constexpr = KIND.block_stride // ROW_STRIDE
    # The last panel of keys may be one that all heads share.
    OWN_PANELS: gl.constexpr = PANELS - 1 if KIND.shared_column > 0 and KIND.tail_dim == 0 else PANELS
    # A tile of keys lies in shared memory as panels of 64 columns, each of its halves one behind the other.
    k_parts = reinterpret(k_smem, k_smem.dtype, [_STAGES * PANELS * HALVES, PART, PART], k_desc.layout)
    v_parts = reinterpret(v_smem, v_smem.dtype, [_STAGES * PANELS * HALVES, PART, PART], v_desc.layout)
    if KIND.tail_dim > 0:
        tail_parts = reinterpret(k_tail_smem, k_tail_smem.dtype, [_STAGES * HALVES, PART, PART], k_desc.layout)
    i = 0
    step = 0
    item = list_item(step, num_programs)
    while item < num_items:
        slot, _, _, _, _, full, end, num_keys, first_key = _read_tile(tiles, members, item, KIND, IS_PREFIX)
        table = block_tables + slot.to(gl.int64) * block_table_stride + first_key // BLOCK_SIZE
        last_key = gl.maximum(num_keys - 1, 0)
        num_masked = gl.maximum(gl.cdiv(end - full, KEYS), 1)
        column = item % KIND.num_kv_heads * KIND.head_stride
        # The next blocks' ids are loaded ahead of their use.
        block = gl.load(table + gl.minimum(full, last_key) // BLOCK_SIZE)
        second_block = gl.load(table + gl.minimum(full + PART, last_key) // BLOCK_SIZE)
        for n in range(num_masked + full // KEYS):
            start = gl.where(n < num_masked, full + n * KEYS, (n - num_masked) * KEYS)
            row = block * BLOCK_ROWS + start % BLOCK_SIZE
            second_row = second_block * BLOCK_ROWS + (start + PART) % BLOCK_SIZE
            m = n + 1
            next_start = gl.where(m < num_masked, full + m * KEYS, (m - num_masked) * KEYS)
            block = gl.load(table + gl.minimum(next_start, last_key) // BLOCK_SIZE)
            second_block = gl.load(table + gl.minimum(next_start + PART, last_key) // BLOCK_SIZE)
            stage, phase = stage_of(i, _STAGES)
            i += 1
            mbarrier.wait(k_free.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), KEY_BYTES)
            full_bar = k_full.index(stage)
            for panel in gl.static_range(PANELS):
                at = (stage * PANELS + panel) * HALVES
                place = column + panel * PART
                if panel >= OWN_PANELS:
                    place = KIND.shared_column
                tma_load(k_desc, [row, place], full_bar, k_parts.index(at))
                if HALVES == 2:
                    tma_load(k_desc, [second_row, place], full_bar, k_parts.index(at + 1))
            if KIND.tail_dim > 0:
                tma_load(k_desc, [row, KIND.shared_column], full_bar, tail_parts.index(stage * HALVES))
                if HALVES == 2:
                    tma_load(k_desc, [second_row, KIND.shared_column], full_bar, tail_parts.index(stage * HALVES + 1))
            mbarrier.wait(v_free.index(stage), phase ^ 1)
            if start + KEYS <= end:
                mbarrier.expect(v_full.index(stage), VALUE_BYTES)
                for panel in gl.static_range(PANELS):
                    at = (stage * PANELS + panel) * HALVES
                    place = column + panel * PART
                    full_bar = v_full.index(stage)
                    tma_load(v_desc, [row, place], full_bar, v_parts.index(at))
                    if HALVES == 2:
                        tma_load(v_desc, [second_row, place], full_bar, v_parts.index(at + 1))
            else:
                # Behind the last key lies what an earlier owner of the block left: 0 × NaN would be NaN.
                offset = row.to(gl.int64) * ROW_STRIDE + column
                second_offset = second_row.to(gl.int64) * ROW_STRIDE + column
                left = end - start
                for panel in gl.static_range(PANELS):
                    at = (stage * PANELS + panel) * HALVES
                    shift = panel * PART
                    _copy_part(v_cache, offset + shift, ROW_STRIDE, left, v_parts.index(at))
                    if HALVES == 2:
                        _copy_part(v_cache, second_offset + shift, ROW_STRIDE, left - PART, v_parts.index(at + 1))
                fence_async_shared()
                mbarrier.arrive(v_full.index(stage), count=1)
        step += 1
        item = list_item(step, num_programs)


@gluon.jit
def _soft_capped(scores, SOFT_CAP: gl.constexpr):
    """Compute SOFT_CAP × tanh(scores / SOFT_CAP), for scores times log2(e)."""
    powers = gl.exp2(scores * (2.0 * _LOG2_E / SOFT_CAP))
    return SOFT_CAP - 2.0 * SOFT_CAP / (powers + 1.0)


@gluon.jit
def _weights(scores, highest, weight_sum, keys, positions, scale_log2, MASKED: gl.constexpr, SOFT_CAP: gl.constexpr):
    """Return the weights of scores, the decay of earlier weights, and the running maximum and sum."""
    unit = scale_log2
    if SOFT_CAP > 0:
        scores = _soft_capped(scores * scale_log2, SOFT_CAP)
        unit = 1.0
    if MASKED:
        scores = gl.where(keys[None, :] <= positions[:, None], scores, -float("inf"))
    new_highest = gl.maximum(highest, gl.max(scores, 1) * unit)
    reference = new_highest
    if MASKED:  # a row that sees no key: -inf minus -inf would be NaN
        reference = gl.where(new_highest == -float("inf"), 0.0, new_highest)
    decay = gl.exp2(highest - reference)
    weights = gl.exp2(scores * unit - reference[:, None])
    return weights, decay, new_highest, weight_sum * decay + gl.sum(weights, 1)


@gluon.jit
def begin_scores(query, query_tail, k_smem, k_tail_smem, stage, no_scores, TAIL: gl.constexpr):
    """Begin to multiply a tile's keys, and return the product."""
    product = warpgroup_mma(query, k_smem.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    if TAIL > 0:
        product = warpgroup_mma(query_tail, k_tail_smem.index(stage).permute((1, 0)), product, is_async=True)
    return product


@gluon.jit
def _masked_weights(
    query, query_tail, k_stages, i, keys, positions, scale_log2, acc, highest, weight_sum, KIND: gl.constexpr
):
    """Return the weights of the i-th tile of keys as an operand, where not all rows see all of them, and the running
    result, maximum and sum."""
    k_smem, k_tail_smem, k_full, k_free = k_stages
    KEYS: gl.constexpr = KIND.hopper_keys
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    of_result: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KIND.head_dim, 16])
    stage, phase = stage_of(i, _STAGES)
    mbarrier.wait(k_full.index(stage), phase)
    no_scores = gl.zeros([ROWS // 2, KEYS], gl.float32, of_scores)
    product = begin_scores(query, query_tail, k_smem, k_tail_smem, stage, no_scores, KIND.tail_dim)
    scores = warpgroup_mma_wait(0, deps=[product])
    mbarrier.arrive(k_free.index(stage), count=1)
    weights, decay, highest, weight_sum = _weights(
        scores, highest, weight_sum, keys, positions, scale_log2, True, KIND.soft_cap
    )
    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, of_result))[:, None]
    weights = gl.convert_layout(weights.to(query.dtype), gl.DotOperandLayout(0, of_result, 2))
    return weights, acc, highest, weight_sum


@gluon.jit
def _attend(
    inputs, work, q_parts, k_stages, v_stages, turns,
    SELF: gl.constexpr,  # 0 or 1
    KIND: gl.constexpr, IS_PREFIX: gl.constexpr,
):  # fmt: skip
    """Run a group of warps that attends its half of each tile of rows. `attend_tiles` makes the arguments."""
    q, out, sinks, log_sums, scale_log2, q_stride = inputs
    tiles, members, first_partials, num_items, num_programs = work
    k_smem, k_tail_smem, k_full, k_free = k_stages
    v_smem, v_full, v_free = v_stages
    KEYS: gl.constexpr = KIND.hopper_keys
    NUM_KV_HEADS: gl.constexpr = KIND.num_kv_heads
    GROUP: gl.constexpr = KIND.group
    HEAD_DIM: gl.constexpr = KIND.head_dim
    OWN_ROWS: gl.constexpr = ROWS // 2
    in_memory: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    tail_in_memory: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    of_result: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    of_weights: gl.constexpr = gl.DotOperandLayout(0, of_result, 2)
    score_rows: gl.constexpr = gl.SliceLayout(1, of_scores)
    result_rows: gl.constexpr = gl.SliceLayout(1, of_result)
    dtype: gl.constexpr = q.dtype.element_ty
    q_smem, q_tail_smem = q_parts
    query = q_smem.index(SELF)
    query_tail = None
    if q_tail_smem is not None:
        query_tail = q_tail_smem.index(SELF)
    no_scores = gl.zeros([OWN_ROWS, KEYS], gl.float32, of_scores)
    i = 0
    turn = 0
    step = 0
    item = list_item(step, num_programs)
    while item < num_items:
        _, first_row, first_token, num_tokens, prefix, full, end, num_keys, _ = _read_tile(
            tiles, members, item, KIND, IS_PREFIX
        )
        first_head = item % NUM_KV_HEADS * GROUP
        own_row = first_row + SELF * OWN_ROWS
        rows = own_row + gl.arange(0, OWN_ROWS, gl.SliceLayout(1, in_memory))
        dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, in_memory))
        token = rows // GROUP
        head = first_head + rows % GROUP
        in_chunk = (token < num_tokens)[:, None]
        q_row = first_token + token
        if members is not None:
            q_row = gl.load(members + q_row, mask=token < num_tokens, other=0)
        q_offset = q_row.to(gl.int64) * q_stride + head * (HEAD_DIM + KIND.tail_dim)
        query.store(gl.load(q + q_offset[:, None] + dims[None, :], mask=in_chunk, other=0.0))
        if query_tail is not None:
            tail_rows = own_row + gl.arange(0, OWN_ROWS, gl.SliceLayout(1, tail_in_memory))
            tail_dims = HEAD_DIM + gl.arange(0, KIND.tail_dim, gl.SliceLayout(0, tail_in_memory))
            tail_token = tail_rows // GROUP
            tail_row = (first_token + tail_token).to(gl.int64) * q_stride
            tail_offset = tail_row + (first_head + tail_rows % GROUP) * (HEAD_DIM + KIND.tail_dim)
            tail_mask = (tail_token < num_tokens)[:, None]
            query_tail.store(gl.load(q + tail_offset[:, None] + tail_dims[None, :], mask=tail_mask, other=0.0))
        fence_async_shared()

        score_row = own_row + gl.arange(0, OWN_ROWS, score_rows)
        positions = prefix + score_row // GROUP
        if IS_PREFIX:
            positions = gl.full([OWN_ROWS], 0, gl.int32, score_rows) + (num_keys - 1)
        lanes = gl.arange(0, KEYS, gl.SliceLayout(0, of_scores))
        acc = gl.zeros([OWN_ROWS, HEAD_DIM], gl.float32, of_result)
        highest = gl.full([OWN_ROWS], -float("inf"), gl.float32, score_rows)
        weight_sum = gl.zeros([OWN_ROWS], gl.float32, score_rows)
        if KIND.has_sinks and members is None:
            highest = gl.load(sinks + first_head + score_row % GROUP) * _LOG2_E
            weight_sum += 1.0

        # With masks: one tile of keys, or two.
        last_start = full + gl.maximum(end - full - 1, 0) // KEYS * KEYS
        for start in range(full, last_start, KEYS):
            keys = start + lanes
            weights, acc, highest, weight_sum = _masked_weights(
                query, query_tail, k_stages, i, keys, positions, scale_log2, acc, highest, weight_sum, KIND
            )
            stage, phase = stage_of(i, _STAGES)
            i += 1
            mbarrier.wait(v_full.index(stage), phase)
            result = warpgroup_mma(weights, v_smem.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[result])
            mbarrier.arrive(v_free.index(stage), count=1)
        keys = last_start + lanes
        weights, acc, highest, weight_sum = _masked_weights(
            query, query_tail, k_stages, i, keys, positions, scale_log2, acc, highest, weight_sum, KIND
        )
        stage, phase = stage_of(i, _STAGES)
        i += 1

        # Without masks: the scores of a tile are multiplied together with the values of the one before.
        num_full = full // KEYS
        if num_full > 0:
            mbarrier.wait(k_full.index(i % _STAGES), (i // _STAGES) & 1)
        for n in range(num_full):
            last_stage = stage
            last_phase = phase
            stage, phase = stage_of(i, _STAGES)
            i += 1
            mbarrier.wait(turns.index(SELF), (turn + SELF + 1) & 1)
            product = begin_scores(query, query_tail, k_smem, k_tail_smem, stage, no_scores, KIND.tail_dim)
            mbarrier.wait(v_full.index(last_stage), last_phase)
            result = warpgroup_mma(weights, v_smem.index(last_stage), acc, is_async=True)
            mbarrier.arrive(turns.index(1 - SELF), count=1)
            turn += 1
            scores = warpgroup_mma_wait(1, deps=[product])
            mbarrier.arrive(k_free.index(stage), count=1)
            weights, decay, highest, weight_sum = _weights(
                scores, highest, weight_sum, lanes, positions, scale_log2, False, KIND.soft_cap
            )
            weights = gl.convert_layout(weights.to(dtype), of_weights)
            # ptxas would wait for the values first and compute the weights behind that, were there not a loop between.
            mbarrier.wait(k_full.index(i % _STAGES), (i // _STAGES) & 1, pred=n + 1 < num_full)
            acc = warpgroup_mma_wait(0, deps=[result])
            mbarrier.arrive(v_free.index(last_stage), count=1)
            acc = acc * gl.convert_layout(decay, result_rows)[:, None]
        mbarrier.wait(v_full.index(stage), phase)
        result = warpgroup_mma(weights, v_smem.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[result])
        mbarrier.arrive(v_free.index(stage), count=1)

        # Tokens that attend to nothing get zeros. The result goes out through the place of the queries.
        divisor = gl.convert_layout(gl.where(weight_sum > 0, weight_sum, 1.0), result_rows)
        query.store((acc / divisor[:, None]).to(dtype))
        out_row = q_row
        if members is not None:
            tile = tiles + item // NUM_KV_HEADS * ITEM_FIELDS
            first_partial = gl.load(first_partials + gl.load(tile) + q_row, mask=token < num_tokens, other=0)
            out_row = first_partial + gl.load(tile + 5)
        out_offset = (out_row.to(gl.int64) * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
        gl.store(out + out_offset[:, None] + dims[None, :], query.load(in_memory), mask=in_chunk)
        if IS_PREFIX:
            score_token = score_row // GROUP
            sums_row = first_token + score_token
            if members is not None:
                sums_row = gl.convert_layout(out_row, score_rows)
            place = sums_row.to(gl.int64) * (NUM_KV_HEADS * GROUP) + first_head + score_row % GROUP
            gl.store(log_sums + place, highest + gl.log2(weight_sum), mask=score_token < num_tokens)
        step += 1
        item = list_item(step, num_programs)


@gluon.jit(do_not_specialize=["window", "block_table_stride"], do_not_specialize_on_alignment=["block_tables"])
def hopper_prefill_kernel(
    q,  # [T, H, D], tokens q_stride apart
    k_desc,  # of the cache as [rows, KV × D], a row for each token
    v_desc,
    block_tables,  # [slots, ...] int32, rows block_table_stride apart
    sinks,  # [H] float32, if heads have them
    v_cache,  # what v_desc describes
    out,  # [T, H, D], contiguous
    tiles,  # [capacity, ITEM_FIELDS] int32
    num_tiles,  # [1] int32
    log_sums,  # [T, H] float32, log-sum-exp of the scores, base 2, written with IS_PREFIX
    window,  # there is none
    scale_log2,
    q_stride,
    block_table_stride,
    KIND: gl.constexpr,
    IS_PREFIX: gl.constexpr,  # every row sees all keys
):
    num_items = gl.load(num_tiles) * KIND.num_kv_heads
    if gl.program_id(0) >= num_items:
        return
    work = tiles, None, None, num_items, gl.num_programs(0)
    attend_tiles(
        q, k_desc, v_desc, block_tables, sinks, v_cache, out, log_sums, work, scale_log2, q_stride, block_table_stride,
        KIND, IS_PREFIX,
    )  # fmt: skip


@gluon.jit
def attend_tiles(
    q,
    k_desc,
    v_desc,
    block_tables,
    sinks,
    v_cache,
    out,
    log_sums,
    work,  # tiles; of segments the members and first partial results of `hopper_segment_kernel.py`, else None; number
    # of tiles × KV heads; number of programs, of which the first so many take these in turns
    scale_log2,
    q_stride,
    block_table_stride,
    KIND: gl.constexpr,
    IS_PREFIX: gl.constexpr,
):
    """Attend this program's share of the tiles; the other arguments are those of the kernel."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = q.dtype.element_ty
    KEYS: gl.constexpr = KIND.hopper_keys
    q_smem = gl.allocate_shared_memory(dtype, [2, ROWS // 2, KIND.head_dim], layout)
    k_smem = gl.allocate_shared_memory(dtype, [_STAGES, KEYS, KIND.head_dim], layout)
    v_smem = gl.allocate_shared_memory(dtype, [_STAGES, KEYS, KIND.head_dim], layout)
    k_full, v_full, k_free, v_free, turns = make_barriers(_STAGES)
    if KIND.tail_dim > 0:
        q_parts = q_smem, gl.allocate_shared_memory(dtype, [2, ROWS // 2, KIND.tail_dim], layout)
        k_tail_smem = gl.allocate_shared_memory(dtype, [_STAGES, KEYS, KIND.tail_dim], layout)
        k_stages = k_smem, k_tail_smem, k_full, k_free
    else:
        q_parts = q_smem, None
        k_stages = k_smem, None, k_full, k_free
    v_stages = v_smem, v_full, v_free
    inputs = q, out, sinks, log_sums, scale_log2, q_stride
    cache = k_desc, v_desc, v_cache, block_tables, block_table_stride
    gl.warp_specialize(
        [
            (_attend, (inputs, work, q_parts, k_stages, v_stages, turns, 0, KIND, IS_PREFIX)),
            (_attend, (inputs, work, q_parts, k_stages, v_stages, turns, 1, KIND, IS_PREFIX)),
            (_load, (cache, work, k_stages, v_stages, KIND, IS_PREFIX)),
        ],
        [4, _LOADING_WARPS],
        [224, 56] if KIND.tail_dim > 0 else [232, 40],
    )
