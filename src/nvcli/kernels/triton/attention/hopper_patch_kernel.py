"""Attention within segments of patches for Hopper GPUs: FlashAttention-3's schedule (Shah et al., 2024), in Gluon.

Every patch of a segment, which is an image or a window of one, attends to all of it. There is no cache: queries, keys
and values lie in the product of the layer's projections. The schedule is that of `hopper_prefill_kernel.py`: a program
has a group of warps that loads tiles of 128 keys and of their values by TMA, and two that attend 64 rows of queries
each, in turns, and programs share out the list of tiles.

Heads of 72 or 80 would be padded to 128 by kernels that take powers of two. Here a head is 64 columns and a tail of 16,
32 or 64, each with its own place in shared memory and its own products. The columns behind a head's end are zero in the
queries; those that are loaded with keys and values belong to the next head, and come to nothing.

On an H200 a layer of 16 heads of 72 in bfloat16 takes 515 us for five images of 3,072 patches, where cuDNN takes 573
from contiguous tensors and FlashAttention-2 955, and 419 us for images of 8 to 5,001 patches, where cuDNN takes 583
with a call and copies for each size. With stages for two tiles it takes 531, and 561 where groups take no turns.

Gluon has no interpreter: tests simulate it. Shapes: P patches, H heads, D numbers of a head.
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

from nvcli.kernels.triton.attention.hopper_prefill_kernel import begin_scores, list_item, make_barriers, stage_of
from nvcli.kernels.triton.launch.triton_version import tma_load

KEYS = gl.constexpr(128)
"""Keys of a tile, and rows of what one TMA load brings."""
BODY = gl.constexpr(64)
"""Columns of a head before its tail: the 128 bytes of a swizzle."""
TILE_FIELDS = gl.constexpr(3)
"""Numbers of a tile in the list: its first row, and the first row and the end of its segment."""
_STAGES = gl.constexpr(3)
"""Tiles of keys, and of values, that are being loaded or used."""
_OWN_ROWS = gl.constexpr(64)
_LOADING_WARPS = gl.constexpr(1)


@gluon.jit
def _read_tile(tiles, item, NUM_HEADS: gl.constexpr):
    """Return the first row of a tile, the first one of its segment, its end, and where the segment's last tile of keys
    begins."""
    tile = tiles + item // NUM_HEADS * TILE_FIELDS
    begin = gl.load(tile + 1)
    end = gl.load(tile + 2)
    return gl.load(tile), begin, end, begin + (end - begin - 1) // KEYS * KEYS


@gluon.jit
def _load_part(body_desc, tail_desc, row, column, stage, smem, tail_smem, full, free, phase, TAIL: gl.constexpr):
    """Load a tile of keys, or of values."""
    mbarrier.wait(free.index(stage), phase ^ 1)
    bar = full.index(stage)
    mbarrier.expect(bar, KEYS * (BODY + TAIL) * 2)
    tma_load(body_desc, [row, column], bar, smem.index(stage))
    if TAIL > 0:
        tma_load(tail_desc, [row, column + BODY], bar, tail_smem.index(stage))


@gluon.jit
def _load(source, work, k_stages, v_stages, NUM_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, TAIL: gl.constexpr):
    """Run the group of warps that loads: for each tile of rows the last keys of its segment, then those before."""
    body_desc, tail_desc = source
    tiles, num_items, num_programs = work
    k_smem, k_tail_smem, k_full, k_free = k_stages
    v_smem, v_tail_smem, v_full, v_free = v_stages
    i = 0
    step = 0
    item = list_item(step, num_programs)
    while item < num_items:
        _, begin, _, last = _read_tile(tiles, item, NUM_HEADS)
        column = (NUM_HEADS + item % NUM_HEADS) * HEAD_DIM
        for n in range((last - begin) // KEYS + 1):
            row = gl.where(n == 0, last, begin + (n - 1) * KEYS)
            stage, phase = stage_of(i, _STAGES)
            i += 1
            _load_part(body_desc, tail_desc, row, column, stage, k_smem, k_tail_smem, k_full, k_free, phase, TAIL)
            place = column + NUM_HEADS * HEAD_DIM
            _load_part(body_desc, tail_desc, row, place, stage, v_smem, v_tail_smem, v_full, v_free, phase, TAIL)
        step += 1
        item = list_item(step, num_programs)


@gluon.jit
def _weights(scores, highest, weight_sum, scale_log2):
    """Return the weights of scores, the decay of earlier weights, and the running maximum and sum."""
    new_highest = gl.maximum(highest, gl.max(scores, 1) * scale_log2)
    decay = gl.exp2(highest - new_highest)
    weights = gl.exp2(scores * scale_log2 - new_highest[:, None])
    return weights, decay, new_highest, weight_sum * decay + gl.sum(weights, 1)


@gluon.jit
def _attend(
    inputs, work, q_parts, k_stages, v_stages, turns,
    SELF: gl.constexpr,  # 0 or 1
    NUM_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Run a group of warps that attends its half of each tile of rows."""
    qkv, out, scale_log2 = inputs
    tiles, num_items, num_programs = work
    k_smem, k_tail_smem, k_full, k_free = k_stages
    v_smem, v_tail_smem, v_full, v_free = v_stages
    TAIL_WIDTH: gl.constexpr = TAIL if TAIL > 0 else 16
    in_memory: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tail_in_memory: gl.constexpr = gl.BlockedLayout([1, 8], [256 // TAIL_WIDTH, TAIL_WIDTH // 8], [4, 1], [1, 0])
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    of_result: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BODY, 16])
    of_tail: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL_WIDTH, 16])
    score_rows: gl.constexpr = gl.SliceLayout(1, of_scores)
    dtype: gl.constexpr = qkv.dtype.element_ty
    q_smem, q_tail_smem = q_parts
    query = q_smem.index(SELF)
    query_tail = None
    if TAIL > 0:
        query_tail = q_tail_smem.index(SELF)
    no_scores = gl.zeros([_OWN_ROWS, KEYS], gl.float32, of_scores)
    i = 0
    turn = 0
    step = 0
    item = list_item(step, num_programs)
    while item < num_items:
        first_row, begin, end, last = _read_tile(tiles, item, NUM_HEADS)
        own_row = first_row + SELF * _OWN_ROWS
        column = item % NUM_HEADS * HEAD_DIM
        rows = own_row + gl.arange(0, _OWN_ROWS, gl.SliceLayout(1, in_memory))
        dims = gl.arange(0, BODY, gl.SliceLayout(0, in_memory))
        inside = (rows < end)[:, None]
        places = rows.to(gl.int64)[:, None] * (NUM_HEADS * HEAD_DIM) + (column + dims)[None, :]
        q_places = rows.to(gl.int64)[:, None] * (3 * NUM_HEADS * HEAD_DIM) + (column + dims)[None, :]
        query.store(gl.load(qkv + q_places, mask=inside, other=0.0))
        if query_tail is not None:
            tail_rows = own_row + gl.arange(0, _OWN_ROWS, gl.SliceLayout(1, tail_in_memory))
            tail_dims = BODY + gl.arange(0, TAIL, gl.SliceLayout(0, tail_in_memory))
            tail_inside = (tail_rows < end)[:, None] & (tail_dims < HEAD_DIM)[None, :]
            tail_row = tail_rows.to(gl.int64)[:, None] * (NUM_HEADS * HEAD_DIM)
            tail_column = (column + tail_dims)[None, :]
            query_tail.store(gl.load(qkv + 3 * tail_row + tail_column, mask=tail_inside, other=0.0))
        fence_async_shared()

        acc = gl.zeros([_OWN_ROWS, BODY], gl.float32, of_result)
        acc_tail = gl.zeros([_OWN_ROWS, TAIL_WIDTH], gl.float32, of_tail)
        highest = gl.full([_OWN_ROWS], -float("inf"), gl.float32, score_rows)
        weight_sum = gl.zeros([_OWN_ROWS], gl.float32, score_rows)

        # The last keys of the segment come first, with masks.
        stage, phase = stage_of(i, _STAGES)
        i += 1
        mbarrier.wait(k_full.index(stage), phase)
        product = begin_scores(query, query_tail, k_smem, k_tail_smem, stage, no_scores, TAIL)
        scores = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(k_free.index(stage), count=1)
        keys = last + gl.arange(0, KEYS, gl.SliceLayout(0, of_scores))
        scores = gl.where((keys < end)[None, :], scores, -float("inf"))
        weights, decay, highest, weight_sum = _weights(scores, highest, weight_sum, scale_log2)
        weights = weights.to(dtype)

        # Then the scores of a tile are multiplied together with the values of the one before.
        num_full = (last - begin) // KEYS
        if num_full > 0:
            mbarrier.wait(k_full.index(i % _STAGES), (i // _STAGES) & 1)
        for n in range(num_full):
            last_stage = stage
            last_phase = phase
            stage, phase = stage_of(i, _STAGES)
            i += 1
            mbarrier.wait(turns.index(SELF), (turn + SELF + 1) & 1)
            product = begin_scores(query, query_tail, k_smem, k_tail_smem, stage, no_scores, TAIL)
            mbarrier.wait(v_full.index(last_stage), last_phase)
            operand = gl.convert_layout(weights, gl.DotOperandLayout(0, of_result, 2))
            result = warpgroup_mma(operand, v_smem.index(last_stage), acc, is_async=True)
            if TAIL > 0:
                operand = gl.convert_layout(weights, gl.DotOperandLayout(0, of_tail, 2))
                result_tail = warpgroup_mma(operand, v_tail_smem.index(last_stage), acc_tail, is_async=True)
            mbarrier.arrive(turns.index(1 - SELF), count=1)
            turn += 1
            scores = warpgroup_mma_wait(2 if TAIL > 0 else 1, deps=[product])
            mbarrier.arrive(k_free.index(stage), count=1)
            weights, decay, highest, weight_sum = _weights(scores, highest, weight_sum, scale_log2)
            weights = weights.to(dtype)
            # ptxas would wait for the values first and compute the weights behind that, were there not a loop between.
            mbarrier.wait(k_full.index(i % _STAGES), (i // _STAGES) & 1, pred=n + 1 < num_full)
            if TAIL > 0:
                acc, acc_tail = warpgroup_mma_wait(0, deps=[result, result_tail])
                acc_tail = acc_tail * gl.convert_layout(decay, gl.SliceLayout(1, of_tail))[:, None]
            else:
                acc = warpgroup_mma_wait(0, deps=[result])
            mbarrier.arrive(v_free.index(last_stage), count=1)
            acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, of_result))[:, None]
        mbarrier.wait(v_full.index(stage), phase)
        operand = gl.convert_layout(weights, gl.DotOperandLayout(0, of_result, 2))
        result = warpgroup_mma(operand, v_smem.index(stage), acc, is_async=True)
        if TAIL > 0:
            operand = gl.convert_layout(weights, gl.DotOperandLayout(0, of_tail, 2))
            result_tail = warpgroup_mma(operand, v_tail_smem.index(stage), acc_tail, is_async=True)
            acc, acc_tail = warpgroup_mma_wait(0, deps=[result, result_tail])
        else:
            acc = warpgroup_mma_wait(0, deps=[result])
        mbarrier.arrive(v_free.index(stage), count=1)

        # The result goes out through the place of the queries.
        divisor = gl.convert_layout(weight_sum, gl.SliceLayout(1, of_result))
        query.store((acc / divisor[:, None]).to(dtype))
        gl.store(out + places, query.load(in_memory), mask=inside)
        if query_tail is not None:
            divisor = gl.convert_layout(weight_sum, gl.SliceLayout(1, of_tail))
            query_tail.store((acc_tail / divisor[:, None]).to(dtype))
            gl.store(out + tail_row + tail_column, query_tail.load(tail_in_memory), mask=tail_inside)
        step += 1
        item = list_item(step, num_programs)


@gluon.jit(do_not_specialize=["num_tiles"])
def hopper_patch_kernel(
    qkv,  # [P, 3, H, D]
    body_desc,  # of the same as [P, 3 × H × D], for loads of KEYS rows and BODY columns
    tail_desc,  # the same for the columns of a tail, if there are any
    out,  # [P, H, D], written
    tiles,  # [num_tiles, TILE_FIELDS] int32
    num_tiles,
    scale_log2,
    NUM_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    TAIL: gl.constexpr,  # columns of a head behind BODY, rounded up to 0, 16, 32 or 64
):
    """A program takes its share of the tiles × heads."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = qkv.dtype.element_ty
    q_smem = gl.allocate_shared_memory(dtype, [2, _OWN_ROWS, BODY], layout)
    k_smem = gl.allocate_shared_memory(dtype, [_STAGES, KEYS, BODY], layout)
    v_smem = gl.allocate_shared_memory(dtype, [_STAGES, KEYS, BODY], layout)
    k_full, v_full, k_free, v_free, turns = make_barriers(_STAGES)
    if TAIL > 0:
        tail_layout: gl.constexpr = gl.NVMMASharedLayout(2 * TAIL, 16, 2)
        q_parts = q_smem, gl.allocate_shared_memory(dtype, [2, _OWN_ROWS, TAIL], tail_layout)
        k_stages = k_smem, gl.allocate_shared_memory(dtype, [_STAGES, KEYS, TAIL], tail_layout), k_full, k_free
        v_stages = v_smem, gl.allocate_shared_memory(dtype, [_STAGES, KEYS, TAIL], tail_layout), v_full, v_free
    else:
        q_parts = q_smem, None
        k_stages = k_smem, None, k_full, k_free
        v_stages = v_smem, None, v_full, v_free
    work = tiles, num_tiles * NUM_HEADS, gl.num_programs(0)
    inputs = qkv, out, scale_log2
    gl.warp_specialize(
        [
            (_attend, (inputs, work, q_parts, k_stages, v_stages, turns, 0, NUM_HEADS, HEAD_DIM, TAIL)),
            (_attend, (inputs, work, q_parts, k_stages, v_stages, turns, 1, NUM_HEADS, HEAD_DIM, TAIL)),
            (_load, ((body_desc, tail_desc), work, k_stages, v_stages, NUM_HEADS, HEAD_DIM, TAIL)),
        ],
        [4, _LOADING_WARPS],
        [240, 24],
    )
