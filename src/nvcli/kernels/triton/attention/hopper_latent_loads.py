"""The group of warps that loads keys in `hopper_latent_kernel.py`: a tile at a time, to the stages that other groups
multiply from.

Keys in 16 bits are copied by address, so that they may be anywhere, and those in FP8 come through registers, where they
become float16, which represents them exactly. With TMA a layer of 64 heads takes an H200 317 µs for 64 rows of 16,000
keys, where copies take 325, but 173 and 135 for 256 rows of 100 to 1,620, as the last keys of a row cannot come by TMA.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from nvcli.kernels.triton.attention.attention_fold import ITEM_FIELDS
from nvcli.kernels.triton.attention.gluon_fp8 import numbers_of_bytes
from nvcli.kernels.triton.attention.hopper_prefill_kernel import stage_of

KEYS = gl.constexpr(64)
"""Keys of a tile."""
STAGES = gl.constexpr(2)
WARPS = gl.constexpr(4)
"""Warps of a group."""


@gluon.jit
def _load_words(cache, block, start, end, KIND: gl.constexpr):
    """Load a tile of FP8 keys in a block to registers, as words of four numbers, with zeros behind the last key:
    → [KEYS, D / 4] and, if keys have tails, [KEYS, tail / 4]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [WARPS, 1], [1, 0])
    ROW: gl.constexpr = KIND.row_size // 4
    BODY: gl.constexpr = KIND.head_dim // 4
    TAIL: gl.constexpr = KIND.tail_dim // 4
    rows = gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    body = gl.arange(0, BODY, gl.SliceLayout(0, layout))
    cache += block.to(gl.int64) * (KIND.block_stride // 4) + start % KIND.block_size * ROW
    places = (rows * ROW)[:, None]
    inside = (start + rows < end)[:, None]
    parts = (gl.load(cache + (places + body[None, :]), mask=inside, other=0),)
    if TAIL > 0:
        tail = BODY + gl.arange(0, TAIL, gl.SliceLayout(0, layout))
        parts += (gl.load(cache + (places + tail[None, :]), mask=inside, other=0),)  # type: ignore[assignment]
    return parts


@gluon.jit
def _numbers_of_words(words, WIDTH: gl.constexpr):
    """Return the numbers of words: [KEYS, WIDTH] float16."""
    byte0, byte1, byte2, byte3 = numbers_of_bytes(words, 1)
    return gl.join(gl.join(byte0, byte2), gl.join(byte1, byte3)).reshape([KEYS, WIDTH])


@gluon.jit
def _load_scales(scales, block, start, end, KIND: gl.constexpr):
    """Load the scales of a tile of keys: → [KEYS] float32."""
    keys = gl.arange(0, KEYS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    scales += block.to(gl.int64) * (KIND.block_stride // 2) + KIND.block_size * KIND.row_size // 2
    return gl.load(scales + (start % KIND.block_size + keys), mask=start + keys < end, other=1.0).to(gl.float32)


@gluon.jit
def _store_words(words, stages, stage, KIND: gl.constexpr):
    """Store what `_load_words` has loaded to a stage."""
    k_parts, _, full, _ = stages
    k_parts[0].index(stage).store(_numbers_of_words(words[0], KIND.head_dim))
    if KIND.tail_dim > 0:
        k_parts[1].index(stage).store(_numbers_of_words(words[1], KIND.tail_dim))
    fence_async_shared()
    mbarrier.arrive(full.index(stage), count=1)


@gluon.jit
def _load_fp8(cache, work, stages, KIND: gl.constexpr, AHEAD: gl.constexpr):
    """Run the group of warps that loads keys in FP8. With AHEAD they hold two tiles in registers."""
    _, words, scales, block_tables, block_table_stride, _, _ = cache
    items, first_item, end_item = work
    _, scale_smem, _, free = stages
    i = 0
    for index in range(first_item, end_item):
        item = items + index * ITEM_FIELDS
        begin = gl.load(item + 1)
        end = gl.load(item + 2)
        table = block_tables + gl.load(item + 6).to(gl.int64) * block_table_stride
        last = gl.maximum(end - 1, 0) // KEYS * KEYS
        block = gl.load(table + gl.minimum(begin, last) // KIND.block_size)
        next_words = _load_words(words, block, begin, end, KIND)
        next_scale = _load_scales(scales, block, begin, end, KIND)
        # The id of a block is loaded ahead of its use.
        block = gl.load(table + gl.minimum(begin + KEYS, last) // KIND.block_size)
        for start in range(begin, end, KEYS):
            stage, phase = stage_of(i, STAGES)
            i += 1
            these = next_words
            scale = next_scale
            following = gl.minimum(start + KEYS, last)
            if AHEAD:
                next_words = _load_words(words, block, following, end, KIND)
                next_scale = _load_scales(scales, block, following, end, KIND)
                block = gl.load(table + gl.minimum(start + 2 * KEYS, last) // KIND.block_size)
            mbarrier.wait(free.index(stage), phase ^ 1)
            scale_smem.index(stage).store(scale)
            _store_words(these, stages, stage, KIND)
            if not AHEAD:
                next_words = _load_words(words, block, following, end, KIND)
                next_scale = _load_scales(scales, block, following, end, KIND)
                block = gl.load(table + gl.minimum(start + 2 * KEYS, last) // KIND.block_size)


@gluon.jit
def _rows_of_keys(
    numbers, chosen, table, near, keys, last, KIND: gl.constexpr, CHOSEN_ROW: gl.constexpr, NEAR: gl.constexpr
):  # fmt: skip
    """Return where keys are in the caches, those of a window first; of those behind the one numbered `last`, where that
    one is. near: as `_near_keys` returns it."""
    position = gl.minimum(keys, last)
    if NEAR is not None:
        distance, near_table, first_near, num_near = near
        is_near = position < num_near
        token = first_near + gl.minimum(position, gl.maximum(num_near - 1, 0))
        near_block = gl.load(near_table + token // NEAR.block_size).to(gl.int64)
        near_place = distance + near_block * NEAR.block_stride + token % NEAR.block_size * NEAR.row_size
        position = gl.maximum(position - num_near, 0)
    if CHOSEN_ROW > 0:
        position = gl.load(chosen + position)
    block = gl.load(table + position // KIND.block_size).to(gl.int64)
    place = block * KIND.block_stride + position % KIND.block_size * KIND.row_size
    if NEAR is not None:
        place = gl.multiple_of(gl.where(is_near, near_place, place), 8)  # which Triton does not find out
    return numbers + place


@gluon.jit
def _distance(numbers, others):
    """Return how many numbers of 16 bits lie from one place in memory to another."""
    return (others.to(gl.int64) - numbers.to(gl.int64)) // 2


@gluon.jit
def _near_keys(numbers, near, row, slot, table_stride, NEAR: gl.constexpr):
    """Return where the cache of a window's keys begins, in numbers from `numbers` on; its block table's row; its first
    token, and how many it has."""
    cache, tables, seen = near
    num_seen = gl.load(seen + row)
    num_near = gl.minimum(num_seen, NEAR.size)
    return _distance(numbers, cache), tables + slot * table_stride, num_seen - num_near, num_near


@gluon.jit
def _copy_keys(cache, work, stages, KIND: gl.constexpr, CHOSEN_ROW: gl.constexpr, NEAR: gl.constexpr):
    """Run the group of warps that copies keys in 16 bits by address, chosen ones if CHOSEN_ROW is above 0, and those of
    a window before them unless NEAR is None. Behind the last one it is loaded again, as weights of 0 are multiplied
    with numbers that must be finite."""
    numbers, _, _, block_tables, block_table_stride, chosen, of_window = cache
    items, first_item, end_item = work
    k_parts, _, full, free = stages
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    lanes = gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    body = gl.arange(0, KIND.head_dim, gl.SliceLayout(0, layout))
    i = 0
    for index in range(first_item, end_item):
        item = items + index * ITEM_FIELDS
        begin = gl.load(item + 1)
        end = gl.load(item + 2)
        slot = gl.load(item + 6).to(gl.int64)
        table = block_tables + slot * block_table_stride
        row = gl.load(item)
        near = of_window
        if NEAR is not None:
            near = _near_keys(numbers, of_window, row, slot, block_table_stride, NEAR)
        own = chosen
        if CHOSEN_ROW > 0:
            own = chosen + row.to(gl.int64) * CHOSEN_ROW
        last = gl.maximum(end - 1, 0)
        # The next tile's places are loaded ahead of their use.
        next_rows = _rows_of_keys(numbers, own, table, near, begin + lanes, last, KIND, CHOSEN_ROW, NEAR)
        for start in range(begin, end, KEYS):
            stage, phase = stage_of(i, STAGES)
            i += 1
            rows = next_rows[:, None]
            next_rows = _rows_of_keys(numbers, own, table, near, start + KEYS + lanes, last, KIND, CHOSEN_ROW, NEAR)
            mbarrier.wait(free.index(stage), phase ^ 1)
            async_copy.async_copy_global_to_shared(k_parts[0].index(stage), rows + body[None, :])
            if KIND.tail_dim > 0:
                tail = KIND.head_dim + gl.arange(0, KIND.tail_dim, gl.SliceLayout(0, layout))
                async_copy.async_copy_global_to_shared(k_parts[1].index(stage), rows + tail[None, :])
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
def load_keys(
    cache, work, stages, KIND: gl.constexpr, AHEAD: gl.constexpr, CHOSEN_ROW: gl.constexpr, NEAR: gl.constexpr
):  # fmt: skip
    """Run the group of warps that loads keys."""
    if stages[1] is None:
        _copy_keys(cache, work, stages, KIND, CHOSEN_ROW, NEAR)
    else:
        _load_fp8(cache, work, stages, KIND, AHEAD)
