"""The group of warps that loads keys in `hopper_latent_kernel.py`: a tile at a time, to the stages that other groups
multiply from.

Keys in 16 bits come by TMA, and those in FP8 through registers, where they become float16, which represents them
exactly. Chosen keys, each in a place of its own, are copied by address.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from nvcli.kernels.triton.attention.attention_fold import ITEM_FIELDS
from nvcli.kernels.triton.attention.gluon_fp8 import numbers_of_bytes
from nvcli.kernels.triton.attention.hopper_prefill_kernel import stage_of
from nvcli.kernels.triton.launch.triton_version import reinterpret, tma_load

KEYS = gl.constexpr(64)
"""Keys of a tile, and columns of what one TMA load brings."""
STAGES = gl.constexpr(2)
WARPS = gl.constexpr(4)
"""Warps of a group."""


@gluon.jit
def _load_numbers(cache, block, start, end, KIND: gl.constexpr, PER_WORD: gl.constexpr):
    """Load a tile of keys in a block to registers, with zeros behind the last one: → [KEYS, D], [KEYS, tail], of FP8 as
    words of four."""
    layout: gl.constexpr = gl.BlockedLayout([1, 16 // PER_WORD], [8, 4], [WARPS, 1], [1, 0])
    ROW: gl.constexpr = KIND.row_size // PER_WORD
    BODY: gl.constexpr = KIND.head_dim // PER_WORD
    TAIL: gl.constexpr = KIND.tail_dim // PER_WORD
    rows = gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    body = gl.arange(0, BODY, gl.SliceLayout(0, layout))
    tail = BODY + gl.arange(0, TAIL, gl.SliceLayout(0, layout))
    cache += block.to(gl.int64) * (KIND.block_stride // PER_WORD) + start % KIND.block_size * ROW
    places = (rows * ROW)[:, None]
    inside = (start + rows < end)[:, None]
    numbers = gl.load(cache + (places + body[None, :]), mask=inside, other=0)
    return numbers, gl.load(cache + (places + tail[None, :]), mask=inside, other=0)


@gluon.jit
def _numbers_of_words(words, WIDTH: gl.constexpr):
    """Return the numbers of words of four: [KEYS, WIDTH] float16."""
    byte0, byte1, byte2, byte3 = numbers_of_bytes(words, 1)
    return gl.join(gl.join(byte0, byte2), gl.join(byte1, byte3)).reshape([KEYS, WIDTH])


@gluon.jit
def _load_scales(scales, block, start, end, KIND: gl.constexpr):
    """Load the scales of a tile of keys: → [KEYS] float32."""
    keys = gl.arange(0, KEYS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    scales += block.to(gl.int64) * (KIND.block_stride // 2) + KIND.block_size * KIND.row_size // 2
    return gl.load(scales + (start % KIND.block_size + keys), mask=start + keys < end, other=1.0).to(gl.float32)


@gluon.jit
def _store_numbers(numbers, tail, stages, stage):
    """Store what was loaded to a stage."""
    stages[0].index(stage).store(numbers)
    stages[1].index(stage).store(tail)
    fence_async_shared()
    mbarrier.arrive(stages[3].index(stage), count=1)


@gluon.jit
def _load_by_tma(cache, work, stages, KIND: gl.constexpr):
    """Run the group of warps that loads keys in 16 bits."""
    k_desc, numbers_of_cache, _, block_tables, block_table_stride, _ = cache
    items, first_item, end_item = work
    k_smem, tail_smem, _, full, free = stages
    PANELS: gl.constexpr = KIND.head_dim // KEYS
    BYTES: gl.constexpr = KEYS * (KIND.head_dim + KIND.tail_dim) * 2
    parts = reinterpret(k_smem, k_smem.dtype, [STAGES * PANELS, KEYS, KEYS], k_desc.layout)
    i = 0
    for index in range(first_item, end_item):
        item = items + index * ITEM_FIELDS
        begin = gl.load(item + 1)
        end = gl.load(item + 2)
        table = block_tables + gl.load(item + 6).to(gl.int64) * block_table_stride
        # The next block's id is loaded ahead of its use.
        last_key = gl.maximum(end - 1, 0)
        block = gl.load(table + gl.minimum(begin, last_key) // KIND.block_size)
        for start in range(begin, end, KEYS):
            stage, phase = stage_of(i, STAGES)
            i += 1
            this_block = block
            row = block * (KIND.block_stride // KIND.row_size) + start % KIND.block_size
            block = gl.load(table + gl.minimum(start + KEYS, last_key) // KIND.block_size)
            if start + KEYS <= end:
                mbarrier.wait(free.index(stage), phase ^ 1)
                bar = full.index(stage)
                mbarrier.expect(bar, BYTES)
                for panel in gl.static_range(PANELS):
                    tma_load(k_desc, [row, panel * KEYS], bar, parts.index(stage * PANELS + panel))
                tma_load(k_desc, [row, KIND.head_dim], bar, tail_smem.index(stage))
            else:
                # Behind the last key lies what an earlier owner of the block left: 0 × NaN would be NaN.
                numbers, tail = _load_numbers(numbers_of_cache, this_block, start, end, KIND, 1)
                mbarrier.wait(free.index(stage), phase ^ 1)
                _store_numbers(numbers, tail, stages, stage)


@gluon.jit
def _load_fp8(cache, work, stages, KIND: gl.constexpr, AHEAD: gl.constexpr):
    """Run the group of warps that loads keys in FP8. With AHEAD they hold two tiles in registers."""
    _, words, scales, block_tables, block_table_stride, _ = cache
    items, first_item, end_item = work
    scale_smem = stages[2]
    free = stages[4]
    i = 0
    for index in range(first_item, end_item):
        item = items + index * ITEM_FIELDS
        begin = gl.load(item + 1)
        end = gl.load(item + 2)
        table = block_tables + gl.load(item + 6).to(gl.int64) * block_table_stride
        last = gl.maximum(end - 1, 0) // KEYS * KEYS
        block = gl.load(table + gl.minimum(begin, last) // KIND.block_size)
        next_words, next_tail = _load_numbers(words, block, begin, end, KIND, 4)
        next_scale = _load_scales(scales, block, begin, end, KIND)
        # The id of a block is loaded ahead of its use.
        block = gl.load(table + gl.minimum(begin + KEYS, last) // KIND.block_size)
        for start in range(begin, end, KEYS):
            stage, phase = stage_of(i, STAGES)
            i += 1
            numbers = next_words
            tail = next_tail
            scale = next_scale
            following = gl.minimum(start + KEYS, last)
            if AHEAD:
                next_words, next_tail = _load_numbers(words, block, following, end, KIND, 4)
                next_scale = _load_scales(scales, block, following, end, KIND)
                block = gl.load(table + gl.minimum(start + 2 * KEYS, last) // KIND.block_size)
            mbarrier.wait(free.index(stage), phase ^ 1)
            scale_smem.index(stage).store(scale)
            numbers = _numbers_of_words(numbers, KIND.head_dim)
            _store_numbers(numbers, _numbers_of_words(tail, KIND.tail_dim), stages, stage)
            if not AHEAD:
                next_words, next_tail = _load_numbers(words, block, following, end, KIND, 4)
                next_scale = _load_scales(scales, block, following, end, KIND)
                block = gl.load(table + gl.minimum(start + 2 * KEYS, last) // KIND.block_size)


@gluon.jit
def _chosen_rows(numbers, chosen, table, keys, last, KIND: gl.constexpr):
    """Return where chosen keys are in the cache; of those behind the one numbered `last`, where that one is."""
    position = gl.load(chosen + gl.minimum(keys, last))
    block = gl.load(table + position // KIND.block_size)
    return numbers + (block.to(gl.int64) * KIND.block_stride + position % KIND.block_size * KIND.row_size)


@gluon.jit
def _load_chosen(cache, work, stages, KIND: gl.constexpr, CHOSEN_ROW: gl.constexpr):
    """Run the group of warps that loads chosen keys in 16 bits. Behind the last one it is loaded again, as weights of 0
    are multiplied with numbers that must be finite."""
    _, numbers, _, block_tables, block_table_stride, chosen = cache
    items, first_item, end_item = work
    k_smem, tail_smem, _, full, free = stages
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    lanes = gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    body = gl.arange(0, KIND.head_dim, gl.SliceLayout(0, layout))
    tail = KIND.head_dim + gl.arange(0, KIND.tail_dim, gl.SliceLayout(0, layout))
    i = 0
    for index in range(first_item, end_item):
        item = items + index * ITEM_FIELDS
        begin = gl.load(item + 1)
        end = gl.load(item + 2)
        table = block_tables + gl.load(item + 6).to(gl.int64) * block_table_stride
        own = chosen + gl.load(item).to(gl.int64) * CHOSEN_ROW
        last = gl.maximum(end - 1, 0)
        # The next tile's places are loaded ahead of their use.
        next_rows = _chosen_rows(numbers, own, table, begin + lanes, last, KIND)
        for start in range(begin, end, KEYS):
            stage, phase = stage_of(i, STAGES)
            i += 1
            rows = next_rows[:, None]
            next_rows = _chosen_rows(numbers, own, table, start + KEYS + lanes, last, KIND)
            mbarrier.wait(free.index(stage), phase ^ 1)
            async_copy.async_copy_global_to_shared(k_smem.index(stage), rows + body[None, :])
            async_copy.async_copy_global_to_shared(tail_smem.index(stage), rows + tail[None, :])
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
def load_keys(cache, work, stages, KIND: gl.constexpr, AHEAD: gl.constexpr, CHOSEN_ROW: gl.constexpr):
    """Run the group of warps that loads keys."""
    if CHOSEN_ROW > 0:
        _load_chosen(cache, work, stages, KIND, CHOSEN_ROW)
    elif stages[2] is None:
        _load_by_tma(cache, work, stages, KIND)
    else:
        _load_fp8(cache, work, stages, KIND, AHEAD)
