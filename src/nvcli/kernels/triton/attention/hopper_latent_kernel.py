"""Paged attention over latents for Hopper GPUs, in Gluon, of decode rows, or of single tokens to a choice of their keys
or to compressed ones and a window: queries of all heads against one key, whose first numbers are its value.

A group of warps brings tiles of 64 keys to shared memory (`hopper_latent_loads.py`). Up to 32 queries are multiplied by
one other group, with keys as the left operand of its products, [keys, D] × [D, queries] and [D, keys] × [keys,
queries], as the tensor cores take 64 rows at least: with queries in their place most rows would be padding. 64 queries
are multiplied by two groups, with queries as the left operand. Each computes the weights of every second tile, for
both, and half of the values' numbers, so that one multiplies while the other computes weights (after FlashMLA,
https://github.com/deepseek-ai/FlashMLA).

There is a program for each multiprocessor. Each takes an equal share of all keys (`latent_shares.py`), and the next
share's keys are on their way while a result is stored (`hopper_latent_results.py`).

A key of an FP8 cache has one scale, for its scores and as a value. Weights times scales are what is multiplied, so the
scale counts in the reference: the highest product so far.

On an H200 a layer of heads over latents of 512 and tails of 64 in bfloat16 takes, in microseconds, against
`decode_kernel.py` (in brackets), with Triton 3.8:

    heads                           16           20           32           64            128
    64 rows of 16,000 keys          281 (311)    296 (424)    301 (408)    325 (647)     549 (1,092)
    256 rows of 1,500               120 (115)    132 (151)    137 (142)    153 (221)     260 (414)
    256 rows of 1,000               80 (81)      90 (108)     95 (102)     102 (154)     194 (286)
    64 rows of 100 to 1,620         33 (34)      43 (49)      45 (47)      58 (67)       83 (94)
    256 rows of 100 to 1,620        81 (70)      99 (93)      106 (86)     135 (135)     197 (258)
    16 rows of 4,000                35 (46)      46 (74)      51 (72)      63 (107)      75 (167)
    one row of 16,000               35 (60)      43 (128)     51 (123)     66 (235)      80 (265)

281 µs are 4,197 GB/s. Of many short rows each program has the results of two or three to store and to reduce. Without
tails the numbers are about a tenth smaller. In FP8, with Triton 3.6, 16 heads take 258 (621) for the first, 114 (215)
for the second, 41 (85) for the fourth and 80 (130) for the fifth; 20 heads 407 (874) and 177 (296) for the first two.

To 2,048 chosen keys, against `attend_chosen.py`, 128 heads take 9.6 ms for 8,192 tokens of a prompt (486 TFLOP/s;
against 18.9), 4.6 for 4,096 (9.1), and 85 µs for 64 rows (170); 16 heads 1.46 ms for 4,096 tokens (1.93) and 48 µs for
64 rows (62). 64 heads without tails and a window of 128, as in DeepSeek-V4, take 1.64 ms with 512 chosen keys for the
first 8,192 tokens of a prompt (3.27) and 35 µs for 64 rows (51), and with a key for every 128 tokens 1.01 ms (1.22) and
29 µs for 64 rows of 32,000 tokens (36).

Gluon has no interpreter: tests simulate it. Shapes: T tokens, H heads, D numbers of a value, ROWS queries of a tile.
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nvcli.kernels.triton.attention.attention_fold import ITEM_FIELDS
from nvcli.kernels.triton.attention.hopper_latent_loads import KEYS, STAGES, WARPS, load_keys
from nvcli.kernels.triton.attention.hopper_latent_results import LEAST, store_result
from nvcli.kernels.triton.attention.hopper_prefill_kernel import stage_of
from nvcli.kernels.triton.launch.triton_version import reinterpret

_PAIR_ROWS = gl.constexpr(64)
"""Queries of a tile that two groups multiply."""


@gluon.jit
def _read_item(work, index, starts):
    """Return an item's row, first key, end of its keys and of the row's, and the row's first token and their number."""
    item = work[0] + index * ITEM_FIELDS
    row = gl.load(item)
    first_token = row
    num_tokens = 1
    if starts is not None:
        first_token = gl.load(starts + row)
        num_tokens = gl.load(starts + row + 1) - first_token
    return row, gl.load(item + 1), gl.load(item + 2), gl.load(item + 7), first_token, num_tokens


@gluon.jit
def _store_queries(
    inputs, q_parts, first_query, first_token, num_tokens,
    KIND: gl.constexpr, START: gl.constexpr, ROWS: gl.constexpr, IS_FP8: gl.constexpr,
):  # fmt: skip
    """Load ROWS queries of a tile, from its query START on, to shared memory: → [ROWS] float32, powers of 2 by which
    they were divided. Those for an FP8 cache become small numbers, which float16 has room for; others are divided by 1.
    Query i of a row is head i % G of its token i // G."""
    q, _, _, q_stride, _ = inputs
    dtype: gl.constexpr = q_parts[0].dtype
    body: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    dims = gl.arange(0, KIND.head_dim, gl.SliceLayout(0, body))
    lane = first_query + START + gl.arange(0, ROWS, gl.SliceLayout(1, body))
    q_row = (first_token + lane // KIND.group).to(gl.int64)
    is_query = lane < num_tokens * KIND.group
    offset = q_row * q_stride + lane % KIND.group * (KIND.head_dim + KIND.tail_dim)
    query = gl.load(q + offset[:, None] + dims[None, :], mask=is_query[:, None], other=0.0)
    power = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, body))
    if IS_FP8:
        query = query.to(gl.float32)
        power = gl.exp2(gl.floor(gl.log2(gl.maximum(gl.max(gl.abs(query), 1), 1e-30))))
        query = query * (1.0 / power)[:, None]
    q_parts[0].index(0).slice(START, ROWS).store(query.to(dtype))
    if KIND.tail_dim > 0:
        of_tail: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
        tail_dims = KIND.head_dim + gl.arange(0, KIND.tail_dim, gl.SliceLayout(0, of_tail))
        tail_offset = gl.convert_layout(offset, gl.SliceLayout(1, of_tail))
        in_tail = gl.convert_layout(is_query, gl.SliceLayout(1, of_tail))
        tail = gl.load(q + tail_offset[:, None] + tail_dims[None, :], mask=in_tail[:, None], other=0.0)
        if IS_FP8:
            tail = tail.to(gl.float32) * gl.convert_layout(1.0 / power, gl.SliceLayout(1, of_tail))[:, None]
        q_parts[1].index(0).slice(START, ROWS).store(tail.to(dtype))
    fence_async_shared()
    return power


@gluon.jit
def _weigh(scores, scale_smem, stage, start, ends, reference, by_key: gl.constexpr, AXIS: gl.constexpr):
    """Return the weights of a tile's scores, in which keys are AXIS; those times the scales of an FP8 cache, with which
    values are multiplied; and the new reference of each query. `ends`: the first key that a query does not see."""
    keys = start + gl.arange(0, KEYS, by_key)
    if scale_smem is not None:
        scale = gl.expand_dims(gl.maximum(scale_smem.index(stage).load(by_key), 2.0**-80), 1 - AXIS)
        scores = scores * scale
    scores = gl.where(gl.expand_dims(keys, 1 - AXIS) < gl.expand_dims(ends, AXIS), scores, -float("inf"))
    if scale_smem is not None:
        new_reference = gl.maximum(reference, gl.max(scores + gl.log2(scale), AXIS))
    else:
        new_reference = gl.maximum(reference, gl.max(scores, AXIS))
    weights = gl.exp2(scores - gl.expand_dims(new_reference, AXIS))
    factors = weights
    if scale_smem is not None:
        factors = weights * scale
    return weights, factors, new_reference


@gluon.jit
def _load_sinks(sinks, queries, begin, KIND: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr):
    """Load the sinks of queries, times log2(e), which count in a row's first chunk alone: → [ROWS] float32."""
    sink = gl.full([ROWS], LEAST, gl.float32, layout)
    if KIND.has_sinks:
        sink = gl.load(sinks + queries % KIND.group) * 1.4426950408889634
        sink = gl.where(begin == 0, sink, LEAST)
    return sink


@gluon.jit
def _wait_for_keys(stages, stage, phase):
    """Wait until a tile of keys is there. Those copied by address are not visible to tensor cores before a fence."""
    _, scale_smem, full, _ = stages
    mbarrier.wait(full.index(stage), phase)
    if scale_smem is None:
        fence_async_shared()


@gluon.jit
def _attend(
    inputs, results, work, q_parts, weight_smem, stages,
    KIND: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Run the group of warps that multiplies, if it is alone."""
    _, starts, scale_log2, _, sinks = inputs
    query_tile = results[4]
    _, first_item, end_item = work
    k_parts, scale_smem, _full, free = stages
    k_smem = k_parts[0]
    HEAD_DIM: gl.constexpr = KIND.head_dim
    GROUP: gl.constexpr = KIND.group
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    by_query: gl.constexpr = gl.SliceLayout(0, layout)
    first_query = query_tile * ROWS
    no_scores = gl.zeros([KEYS, ROWS], gl.float32, layout)
    queries = first_query + gl.arange(0, ROWS, by_query)
    i = 0
    for index in range(first_item, end_item):
        row, begin, end, num_keys, first_token, num_tokens = _read_item(work, index, starts)
        power = _store_queries(
            inputs, q_parts, first_query, first_token, num_tokens, KIND, 0, ROWS, scale_smem is not None
        )
        unit = gl.convert_layout(power, by_query) * scale_log2
        ends = gl.minimum(num_keys - num_tokens + 1 + queries // GROUP, end)

        acc = gl.zeros([HEAD_DIM, ROWS], gl.float32, layout)
        weight_sums = gl.zeros([KEYS, ROWS], gl.float32, layout)
        sink = _load_sinks(sinks, queries, begin, KIND, ROWS, by_query)
        reference = sink
        for start in range(begin, end, KEYS):
            stage, phase = stage_of(i, STAGES)
            i += 1
            _wait_for_keys(stages, stage, phase)
            query = q_parts[0].index(0).permute((1, 0))
            product = warpgroup_mma(k_smem.index(stage), query, no_scores, use_acc=False, is_async=True)
            if KIND.tail_dim > 0:
                query_tail = q_parts[1].index(0).permute((1, 0))
                product = warpgroup_mma(k_parts[1].index(stage), query_tail, product, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[product]) * unit[None, :]
            weights, factors, new_reference = _weigh(scores, scale_smem, stage, start, ends, reference, by_row, 0)
            decay = gl.exp2(reference - new_reference)
            reference = new_reference
            weight_sums = weight_sums * decay[None, :] + weights
            weight_smem.store(factors.to(weight_smem.dtype).permute([1, 0]))
            fence_async_shared()
            acc = acc * decay[None, :]
            result = warpgroup_mma(k_smem.index(stage).permute((1, 0)), weight_smem.permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[result])
            mbarrier.arrive(free.index(stage), count=1)

        weight_sum = gl.sum(weight_sums, 0)
        if KIND.has_sinks:
            weight_sum += gl.where(sink > LEAST, gl.exp2(sink - reference), 0.0)
        divisor = gl.where(weight_sum > 0, weight_sum, 1.0)
        acc = acc * (1.0 / divisor)[None, :]
        place = gl.arange(0, ROWS, by_query)
        dims = gl.arange(0, HEAD_DIM, by_row)
        lse = reference + gl.log2(weight_sum)
        places = dims[:, None] + place[None, :] * HEAD_DIM
        num_queries = num_tokens * GROUP - first_query
        first_place = first_token.to(gl.int64) * GROUP + first_query
        store_result(
            results, work, index, row, acc, places, (place < num_queries)[None, :], lse,
            place, first_place, num_queries, 0, HEAD_DIM, ROWS, HEAD_DIM,
        )  # fmt: skip


@gluon.jit
def _opaque_zero(number):
    """Return 0, of which LLVM does not know that it is: it would compute all descriptors of operands ahead of the loop,
    and they would be spilled. ptxas knows it and makes them immediates."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _meet(meeting, phase):
    """Wait until both groups have called this."""
    mbarrier.arrive(meeting, count=1)
    mbarrier.wait(meeting, phase)


@gluon.jit
def _attend_half(
    inputs, results, work, q_parts, exchange, stages,
    KIND: gl.constexpr, SELF: gl.constexpr,
):  # fmt: skip
    """Run one of two groups of warps that multiply, here with queries as the left operand. It computes the weights of
    every second tile of keys, hands them to the other group, and multiplies all tiles' weights with half of the values'
    numbers.

    SELF: 0 or 1, also the stage of the tiles whose weights it computes.
    """
    _, starts, scale_log2, _, sinks = inputs
    query_tile = results[4]
    _, first_item, end_item = work
    k_parts, scale_smem, _full, free = stages
    k_smem = k_parts[0]
    weight_smem, numbers, ready, meeting = exchange
    ROWS: gl.constexpr = _PAIR_ROWS
    HALF: gl.constexpr = KIND.head_dim // 2
    GROUP: gl.constexpr = KIND.group
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KEYS, 16])
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HALF, 16])
    by_query: gl.constexpr = gl.SliceLayout(1, of_scores)
    by_key: gl.constexpr = gl.SliceLayout(0, of_scores)
    sums_query: gl.constexpr = gl.SliceLayout(1, of_sums)
    values = reinterpret(k_smem, k_smem.dtype, [STAGES * 2, KEYS, HALF], gl.NVMMASharedLayout(128, 16, 2))
    first_query = query_tile * ROWS
    own_query: gl.constexpr = SELF * (ROWS // 2)
    no_scores = gl.zeros([ROWS, KEYS], gl.float32, of_scores)
    queries = first_query + gl.arange(0, ROWS, by_query)
    i = 0
    for index in range(first_item, end_item):
        row, begin, end, num_keys, first_token, num_tokens = _read_item(work, index, starts)
        power = _store_queries(
            inputs, q_parts, first_query, first_token, num_tokens, KIND, own_query, ROWS // 2, scale_smem is not None
        )
        numbers.index(4).slice(own_query, ROWS // 2).store(power)
        _meet(meeting.index(0), 0)
        unit = numbers.index(4).load(by_query) * scale_log2
        ends = gl.minimum(num_keys - num_tokens + 1 + queries // GROUP, end)

        acc = gl.zeros([ROWS, HALF], gl.float32, of_sums)
        sink = _load_sinks(sinks, queries, begin, KIND, ROWS, by_query)
        reference = sink
        weight_sum = gl.zeros([ROWS], gl.float32, by_query)
        if KIND.has_sinks and SELF == 0:
            weight_sum = gl.where(sink > LEAST, 1.0, 0.0)
        for start in range(begin, end, KEYS):
            stage, phase = stage_of(i, STAGES)
            i += 1
            _wait_for_keys(stages, stage, phase)
            zero = _opaque_zero(stage)
            if stage == SELF:
                query = q_parts[0].index(zero)
                key = k_smem.index(SELF + zero).permute((1, 0))
                product = warpgroup_mma(query, key, no_scores, use_acc=False, is_async=True)
                if KIND.tail_dim > 0:
                    tail = k_parts[1].index(SELF + zero).permute((1, 0))
                    product = warpgroup_mma(q_parts[1].index(zero), tail, product, is_async=True)
                scores = warpgroup_mma_wait(0, deps=[product]) * unit[:, None]
                weights, factors, new_reference = _weigh(scores, scale_smem, SELF, start, ends, reference, by_key, 1)
                decay = gl.exp2(reference - new_reference)
                weight_sum = weight_sum * decay + gl.sum(weights, 1)
                factors = factors.to(weight_smem.dtype)
                # The other group has multiplied what lies there: it read it before it handed over the last weights.
                weight_smem.index(0).store(factors)
                numbers.index(SELF).store(new_reference)
                fence_async_shared()
                mbarrier.arrive(ready.index(SELF), count=1)
                acc = acc * gl.convert_layout(decay, sums_query)[:, None]
                operand = gl.convert_layout(factors, gl.DotOperandLayout(0, of_sums, 2))
                result = warpgroup_mma(operand, values.index(2 * SELF + SELF + zero), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[result])
            else:
                mbarrier.wait(ready.index(1 - SELF), phase)
                new_reference = numbers.index(1 - SELF).load(by_query)
                decay = gl.exp2(reference - new_reference)
                weight_sum = weight_sum * decay
                acc = acc * gl.convert_layout(decay, sums_query)[:, None]
                result = warpgroup_mma(
                    weight_smem.index(zero), values.index(2 * (1 - SELF) + SELF + zero), acc, is_async=True
                )
                acc = warpgroup_mma_wait(0, deps=[result])
            reference = new_reference
            mbarrier.arrive(free.index(stage), count=1)

        numbers.index(2 + SELF).store(weight_sum)
        _meet(meeting.index(0), 1)
        weight_sum = numbers.index(2).load(by_query) + numbers.index(3).load(by_query)
        divisor = gl.where(weight_sum > 0, weight_sum, 1.0)
        acc = acc * gl.convert_layout(1.0 / divisor, sums_query)[:, None]
        place = gl.arange(0, ROWS, sums_query)
        dims = SELF * HALF + gl.arange(0, HALF, gl.SliceLayout(0, of_sums))
        lse = reference + gl.log2(weight_sum)
        places = dims[None, :] + place[:, None] * KIND.head_dim
        num_queries = num_tokens * GROUP - first_query
        first_place = first_token.to(gl.int64) * GROUP + first_query
        store_result(
            results, work, index, row, acc, places, (place < num_queries)[:, None], lse,
            gl.arange(0, ROWS, by_query), first_place, num_queries, SELF, KIND.head_dim, ROWS, HALF,
        )  # fmt: skip


@gluon.jit(
    do_not_specialize=["window", "block_table_stride"],
    do_not_specialize_on_alignment=["block_tables", "near_tables", "near_seen"],
)
def hopper_latent_kernel(
    q,  # [T, H, D and the tail], tokens q_stride apart
    k_cache,  # its first number
    v_cache,  # the same
    block_tables,  # [slots, ...] int32, rows block_table_stride apart
    sinks,  # [H] float32, or anything if the heads have none
    words,  # the first word of an FP8 cache, int32, four numbers each; None: it is in 16 bits, and so of `scales`
    scales,  # the beginning of an FP8 cache as bfloat16
    out,  # [T, H, D], contiguous
    items,  # [capacity, ITEM_FIELDS] int32; these and `shares` as `latent_shares.py` lists them
    shares,  # [shares, 2] int32
    starts,  # [B + 1] int32, the first token of each row; None: they have one each
    partial_out,  # [2 × shares, tiles, ROWS, D] float32
    partial_lse,  # the same without D, base 2
    arrivals,  # [B, tiles] int32, 0 between launches
    chosen,  # [B, CHOSEN_ROW] int32, the positions of each row's keys; None: they are 0, 1, …
    near_cache,  # the first number of a window's keys, which come before the others; None, like the next two: no window
    near_tables,  # [slots, ...] int32, rows block_table_stride apart
    near_seen,  # [B] int32, the tokens that each row sees
    window,  # there is none
    scale_log2,
    q_stride,
    block_table_stride,
    KIND: gl.constexpr,
    ROWS: gl.constexpr,
    TILES: gl.constexpr,  # tiles of a row's queries
    CHOSEN_ROW: gl.constexpr,
    NEAR: gl.constexpr,  # `NearKeys`, or None
):
    """Program (share, tile of queries). It is launched as a dependent (`dependent_launch.py`)."""
    gdc_wait()
    gdc_launch_dependents()
    share = gl.program_id(0) // TILES
    query_tile = gl.program_id(0) % TILES
    first_item = gl.load(shares + 2 * share)
    end_item = gl.load(shares + 2 * share + 1)
    if first_item >= end_item:
        return
    IS_PAIR: gl.constexpr = ROWS == _PAIR_ROWS
    dtype: gl.constexpr = q.dtype.element_ty if scales is None else gl.float16
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    k_parts = (gl.allocate_shared_memory(dtype, [STAGES, KEYS, KIND.head_dim], layout),)
    q_parts = (gl.allocate_shared_memory(dtype, [1, ROWS, KIND.head_dim], layout),)
    if KIND.tail_dim > 0:
        k_parts += (gl.allocate_shared_memory(dtype, [STAGES, KEYS, KIND.tail_dim], layout),)  # type: ignore[assignment]
        q_parts += (gl.allocate_shared_memory(dtype, [1, ROWS, KIND.tail_dim], layout),)  # type: ignore[assignment]
    weight_smem = gl.allocate_shared_memory(dtype, [1, ROWS, KEYS], layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=WARPS * 32 if scales is None else 1)
        mbarrier.init(free.index(stage), count=2 if IS_PAIR else 1)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if scales is None:
        stages = k_parts, None, full, free
    else:
        scale_smem = gl.allocate_shared_memory(gl.float32, [STAGES, KEYS], plain)
        stages = k_parts, scale_smem, full, free
    work = items, first_item, end_item
    inputs = q, starts, scale_log2, q_stride, sinks
    results = out, partial_out, partial_lse, arrivals, query_tile, TILES
    near = near_cache, near_tables, near_seen
    source = k_cache, words, scales, block_tables, block_table_stride, chosen, near
    if IS_PAIR:
        numbers = gl.allocate_shared_memory(gl.float32, [5, ROWS], plain)
        ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        meeting = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        for group in gl.static_range(2):
            mbarrier.init(ready.index(group), count=1)
        mbarrier.init(meeting.index(0), count=2)
        fence_async_shared()
        exchange = weight_smem, numbers, ready, meeting
        gl.warp_specialize(
            [
                (_attend_half, (inputs, results, work, q_parts, exchange, stages, KIND, 0)),
                (_attend_half, (inputs, results, work, q_parts, exchange, stages, KIND, 1)),
                (load_keys, (source, work, stages, KIND, False, CHOSEN_ROW, NEAR)),
            ],
            [WARPS, WARPS],
            [200, 104],
        )
    else:
        fence_async_shared()
        gl.warp_specialize(
            [
                (_attend, (inputs, results, work, q_parts, weight_smem.index(0), stages, KIND, ROWS)),
                (load_keys, (source, work, stages, KIND, True, CHOSEN_ROW, NEAR)),
            ],
            [WARPS],
            [240],
        )
