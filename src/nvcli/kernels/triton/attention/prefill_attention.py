"""Paged prefill attention in Triton: causal attention of prefill chunks, each behind whatever of it is cached already,
or attention both ways within whole prompts.

FlashAttention-2's algorithm (Dao, 2023) over keys and values read through block tables. A program takes a tile of
one chunk's queries (`prefill_tiles.py`) and one KV head. The query heads that share the KV head stand beside each other
in the tile: short chunks fill tiles better, and keys are read once for all. Key tiles that every row sees are attended
without masks, the others with them: those at the diagonal and, with a window, those that hold a row's first key. Tiles
with masks may be smaller, so that less of them is computed in vain.

Where chunks share a prefix, a launch over its keys is followed by one over the rests. The first leaves its results in
the place of the output, with the log-sum-exp of their scores beside them, and the second goes on from there.

Launch parameters are the same for all lengths, so nothing is compiled twice, and the grid depends on the batch's shape
alone: programs behind the list's end leave at once.

Held to `attention/torch_backend.py` by tests/attention. Shapes: T tokens of all chunks, H query heads, KV heads,
G = H / KV, D head_dim.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.triton.attention.attention_fold import (
    ITEM_FIELDS,
    Tile,
    bias_rows,
    fold_keys,
    load_query,
    load_query_tail,
    load_sinks,
    weighted_mean,
)
from nvcli.kernels.triton.attention.attention_launch import AttentionLauncher, AttentionShape, LayerInputs
from nvcli.kernels.triton.attention.invariant_attention import invariant_attention_kernel, invariant_prefill_tile
from nvcli.kernels.triton.attention.prefill_tiles import TileKey, TileList, TilePart, read_tile
from nvcli.kernels.triton.launch.multiprocessors import num_multiprocessors, shared_memory_bytes


class PrefillKind(Enum):
    """The kernel that attends, and its tiles."""

    USUAL = 0
    """The kernel of this file."""
    REST = 1
    """The same kernel, with tiles for the short chunks and few keys that follow shared prefixes."""
    INVARIANT = 2
    """Tokens get the same bits in every batch (`invariant_attention.py`)."""
    HOPPER = 3
    """The one for Hopper GPUs, without windows (`hopper_prefill_kernel.py`)."""


_PROGRAMS_FOR_THE_REST = 264
"""Programs that share the tiles left over by another kernel: two for each multiprocessor of an H200."""


@triton.jit
def _attend_tile(
    tile,  # of `read_tile`
    first_key,  # the first key to attend to, with IS_REST
    kv_head,
    q,  # [T, H, D], tokens q_stride apart
    k_cache,
    v_cache,
    out,  # [T, H, D], contiguous
    block_tables,  # [slots, ...] int32, rows block_table_stride apart
    sinks,  # [H] float32, if heads have them
    log_sums,  # [T, H] float32, log-sum-exp over prefixes, base 2; written with IS_PREFIX, read with IS_REST
    bias,  # [T, H, distances], `DistanceBias.values`; None: there is none
    window,
    scale_log2,
    q_stride,
    block_table_stride,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    IS_PREFIX: tl.constexpr,  # every row sees all keys
    IS_REST: tl.constexpr,  # `out` holds the result over the keys before those of the tile, with the sinks
):
    """Attend the rows of one tile in the query heads of one KV head."""
    slot, first_row, first_token, num_tokens, num_keys = tile
    prefix = num_keys - num_tokens  # below 0 for tokens that attend to nothing
    IS_FP8: tl.constexpr = k_cache.dtype.element_ty == tl.float8e4nv
    HEAD_DIM: tl.constexpr = KIND.head_dim
    ROWS: tl.constexpr = TILE.rows
    KEYS: tl.constexpr = TILE.keys
    MASKED_KEYS: tl.constexpr = TILE.masked_keys if TILE.masked_keys > 0 else TILE.keys

    rows = first_row + tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM)
    token = rows // KIND.group
    head = kv_head * KIND.group + rows % KIND.group
    in_chunk = token < num_tokens
    flat_token = (first_token + token).to(tl.int64)
    query, unit = load_query(q, k_cache, flat_token, head, in_chunk, q_stride, scale_log2, KIND)
    tail = None
    if KIND.tail_dim:
        tail = load_query_tail(q, k_cache, flat_token, head, in_chunk, q_stride, unit, scale_log2, KIND)

    last_token = tl.minimum((first_row + ROWS - 1) // KIND.group, num_tokens - 1)
    # `position` becomes the last key that a row sees; keys up to here are seen by every row, and up to there by any.
    if IS_PREFIX:
        position = tl.full([ROWS], 0, tl.int32) + (num_keys - 1)
        seen_by_all = num_keys
        seen_by_any = num_keys
    else:
        position = prefix + token
        seen_by_all = tl.maximum(prefix + first_row // KIND.group + 1, 0)
        seen_by_any = prefix + last_token + 1
    first_seen = None
    if KIND.has_window:
        first_seen = position - window + 1
    if KIND.is_both_ways:
        reach = num_keys
        if KIND.has_window:
            reach = window - 1
        position = tl.minimum(position + reach, num_keys - 1)
        seen_by_all = tl.minimum(seen_by_all + reach, num_keys)
        seen_by_any = tl.minimum(seen_by_any + reach, num_keys)
    # Scales find their blocks by the end of the keys. Where keys do as well, both wait for the same ids: that is faster
    # with heads of 256, which leave no registers for more, and slower with smaller ones (953 against 1,149 us, and 670
    # against 660, for two prompts of 4,096 tokens with windows of 1,024 on an H200).
    last_key = None
    if not (IS_FP8 and HEAD_DIM > 128):
        last_key = tl.maximum(num_keys - 1, 0)
    table = block_tables + slot.to(tl.int64) * block_table_stride
    near = bias_rows(bias, flat_token, head, KIND)
    near_positions = None
    if bias is not None:
        near_positions = tl.where(in_chunk, position, -1)  # rows of nobody read nothing
    highest = tl.full([ROWS], -float("inf"), tl.float32)
    weight_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    acc_unit = tl.zeros([ROWS], tl.float32)
    if KIND.has_sinks and not IS_REST:
        highest = load_sinks(sinks, head, in_chunk)
        weight_sum += 1.0
    if IS_REST:
        place = flat_token * (KIND.num_kv_heads * KIND.group) + head
        highest = tl.load(log_sums + place, mask=in_chunk, other=0.0)
        weight_sum += 1.0
        before = tl.load(out + place[:, None] * HEAD_DIM + dims[None, :], mask=in_chunk[:, None], other=0.0)
        acc = before.to(tl.float32)
        if IS_FP8:
            acc_unit = tl.max(tl.abs(acc), 1) / 448.0  # as if the largest code had stood there with all of the weight
            acc = acc / tl.maximum(acc_unit, 1e-30)[:, None]
    if KIND.has_window:
        # Where blocks hold whole tiles the first tile is rounded down within its block; else it begins where the first
        # row's window does, for what is before may lie in a block that was given back.
        MASKED_ALIGN: tl.constexpr = MASKED_KEYS if KIND.block_size % MASKED_KEYS == 0 else 1
        ALIGN: tl.constexpr = KEYS if KIND.block_size % KEYS == 0 else MASKED_ALIGN
        begin = tl.maximum(prefix + first_row // KIND.group - window + 1, 0) // ALIGN * ALIGN
        last_begin = tl.maximum(prefix + last_token - window + 1, 0)
        middle = begin + tl.cdiv(last_begin - begin, KEYS) * KEYS  # every row's window has begun
        diagonal = tl.maximum(begin + tl.maximum(seen_by_all - begin, 0) // KEYS * KEYS, middle)
        highest, weight_sum, acc, acc_unit = fold_keys(
            query, tail, unit, highest, weight_sum, acc, acc_unit, k_cache, v_cache, table, kv_head, begin,
            tl.minimum(middle, seen_by_any), last_key, None, first_seen, position, KIND, MASKED_KEYS, TILE.num_stages,
            True, False, near, near_positions,
        )  # fmt: skip
    elif IS_REST:
        middle = first_key
        diagonal = middle + (seen_by_all - middle) // KEYS * KEYS
    else:
        middle = 0
        diagonal = seen_by_all // KEYS * KEYS
        if bias is not None:
            # To keys that are far from every row nothing is added.
            middle = tl.maximum(seen_by_all - KIND.bias_extent, 0) // KEYS * KEYS
            highest, weight_sum, acc, acc_unit = fold_keys(
                query, tail, unit, highest, weight_sum, acc, acc_unit, k_cache, v_cache, table, kv_head, 0, middle,
                last_key, None, None, None, KIND, KEYS, TILE.num_stages, False, False,
            )  # fmt: skip
    highest, weight_sum, acc, acc_unit = fold_keys(
        query, tail, unit, highest, weight_sum, acc, acc_unit, k_cache, v_cache, table, kv_head, middle, diagonal,
        last_key, None, None, None, KIND, KEYS, TILE.num_stages, False, False, near, near_positions,
    )  # fmt: skip
    highest, weight_sum, acc, acc_unit = fold_keys(
        query, tail, unit, highest, weight_sum, acc, acc_unit, k_cache, v_cache, table, kv_head, diagonal, seen_by_any,
        last_key, None, first_seen, position, KIND, MASKED_KEYS, TILE.num_stages, True, False, near, near_positions,
    )  # fmt: skip
    acc = weighted_mean(acc, weight_sum, acc_unit, IS_FP8)
    place = flat_token * (KIND.num_kv_heads * KIND.group) + head
    tl.store(out + place[:, None] * HEAD_DIM + dims[None, :], acc.to(out.dtype.element_ty), mask=in_chunk[:, None])
    if IS_PREFIX:
        tl.store(log_sums + place, highest + tl.log2(weight_sum), mask=in_chunk)


@triton.jit(do_not_specialize=["block_table_stride", "window"], do_not_specialize_on_alignment=["block_tables"])
def prefill_attention_kernel(
    q,  # the arguments that are not explained here are those of `_attend_tile`
    k_cache,
    v_cache,
    block_tables,
    sinks,
    out,
    tiles,  # [capacity, ITEM_FIELDS] int32
    num_tiles,  # [1] int32
    log_sums,
    num_before,  # [1] int32, tiles at the head of the list that another kernel attends; None: there are none
    bias,
    window,
    scale_log2,
    q_stride,
    block_table_stride,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    IS_PREFIX: tl.constexpr,
    IS_REST: tl.constexpr,
):
    """A program has one tile and KV head. Where another kernel attends most of the list, a few programs share the rest:
    with a program for each tile it would take longer to find that nothing is left."""
    if num_before is None:
        index = tl.program_id(0) // KIND.num_kv_heads
        tile = read_tile(tiles, index)
        if index >= tl.load(num_tiles):
            return
        first_key = 0
        if IS_REST:
            first_key = tl.load(tiles + index * ITEM_FIELDS + 5)
        _attend_tile(
            tile, first_key, tl.program_id(0) % KIND.num_kv_heads, q, k_cache, v_cache, out, block_tables, sinks,
            log_sums, bias, window, scale_log2, q_stride, block_table_stride, KIND, TILE, IS_PREFIX, IS_REST,
        )  # fmt: skip
    else:
        first = tl.load(num_before) * KIND.num_kv_heads + tl.program_id(0)
        for item in range(first, tl.load(num_tiles) * KIND.num_kv_heads, tl.num_programs(0)):
            _attend_tile(
                read_tile(tiles, item // KIND.num_kv_heads), 0, item % KIND.num_kv_heads, q, k_cache, v_cache, out,
                block_tables, sinks, log_sums, bias, window, scale_log2, q_stride, block_table_stride, KIND, TILE,
                False, False,
            )  # fmt: skip


def _choose_tile(shape: AttentionShape) -> Tile:
    """Choose by head size and type, as measured on an H200. GPUs with less shared memory get smaller tiles or fewer
    stages, which fit in 99 KiB.

    Masked tiles of 32 keys against 64 at head size 128, 32 query heads and 8 KV heads, in microseconds a layer: 137
    against 143 for 20 prompts of 400 tokens, 107 against 114 for 40 of 200, 177 against 183 for 16 of 562, 631 against
    629 for two of 4,096, and 3,797 against 3,927 for 8,192 tokens that end at 16,384. Tiles of 32 keys throughout, with
    fewer registers, took 114, 85, 159, 676 and 4,204: they lose where prompts are long.

    Every program converts the FP8 keys that it reads to float16 and holds them in registers meanwhile, so a tile serves
    128 rows where it can, and is smaller where the compiler would spill more. With conversion to bfloat16, which takes
    four instructions a number, 8,192 tokens that end at 16,384 took 7,790 with tiles of 64 rows and 6,808 with 128 and
    8 warps (bfloat16 keys: 4,211). In float16, 8,192 tokens of prompts of 1,000 to 3,000 take 836. FP8 launches for
    other head sizes have not been timed.

    Latent attention of 16 heads takes 3,663 for 8,192 tokens with tiles of 64 keys, and 5,596 with 32.
    """
    head_dim, is_fp8 = shape.tile_dim, shape.is_fp8
    if shape.dtype.itemsize > 2:  # float32 runs without tensor cores: for tests
        keys = 32 if head_dim <= 128 else 16
        return Tile(rows=32, keys=keys, masked_keys=16, num_warps=4, num_stages=2)
    shared_memory = shared_memory_bytes(shape.device) >> 10
    if is_fp8 and head_dim > 256:
        return Tile(rows=32, keys=32, num_warps=8, num_stages=2)
    if is_fp8 and head_dim > 128:
        keys = 64 if shared_memory >= 112 else 32
        return Tile(rows=64, keys=keys, masked_keys=32, num_warps=8, num_stages=2)
    if not shape.has_values and head_dim > 256:
        rows, keys = (64, 64) if shared_memory >= 227 else (64, 32) if shared_memory >= 160 else (32, 16)
        return Tile(rows=rows, keys=keys, num_warps=8, num_stages=2)
    if head_dim > 256:
        rows, keys = (64, 32) if shared_memory >= 192 else (32, 16)
        return Tile(rows=rows, keys=keys, num_warps=8, num_stages=2)
    if head_dim > 128:
        if shared_memory >= 192:
            return Tile(rows=128, keys=64, num_warps=8, num_stages=2)
        return Tile(rows=64, keys=32, num_warps=4, num_stages=2)
    stages = 3 if head_dim <= 64 or shared_memory >= 112 else 2
    if shape.has_bias:  # whose addresses take registers, too
        return Tile(rows=64, keys=32, num_warps=4, num_stages=stages)
    if is_fp8:
        return Tile(rows=128, keys=64, masked_keys=32, num_warps=8, num_stages=stages)
    if head_dim <= 64:
        return Tile(rows=128, keys=64, num_warps=4, num_stages=stages)
    return Tile(rows=64, keys=64, masked_keys=32, num_warps=4, num_stages=stages)


def _choose_rest_tile(shape: AttentionShape) -> Tile:
    """Choose for chunks behind prefixes, where a tile's start and end take longer than its products.

    On an H200 a layer of 32 query heads and 8 KV heads of 128 in bfloat16 takes, for the rests of 1,024 chunks of 8
    tokens, 120 us with tiles of 64 rows and 32 keys, 110 with 32 rows and 2 warps, 163 with the usual launch, and 358
    with the kernel for Hopper; for those of 512 chunks of 32 tokens 166, 218, 214 and 225.
    """
    if shape.dtype.itemsize > 2 or shape.kv_dtype != shape.dtype or shape.tile_dim > 128:
        return _choose_tile(shape)
    return Tile(rows=64, keys=32, num_warps=4, num_stages=3)


class PrefillAttention:
    """Prefill attention of one geometry, for any window. Plan `tiles` each step, then call `run` in each layer.

    Neither waits for the device or allocates anything, so both may be captured in a CUDA graph. Geometries of equal
    `tile_key` may share their tiles.
    """

    def __init__(self, shape: AttentionShape, kind: PrefillKind = PrefillKind.USUAL) -> None:
        assert kind is not PrefillKind.INVARIANT or shape.kv_dtype == shape.dtype
        self.shape, self.kind = shape, kind
        self._kernel: Any = prefill_attention_kernel
        self._tile, part = None, None
        if kind is PrefillKind.HOPPER:
            from nvcli.kernels.triton.attention import hopper_prefill_kernel

            self._kernel, part = hopper_prefill_kernel.hopper_prefill_kernel, hopper_prefill_kernel.PART.value
            rows: int = hopper_prefill_kernel.ROWS.value
        else:
            choices = {PrefillKind.REST: _choose_rest_tile, PrefillKind.INVARIANT: invariant_prefill_tile}
            self._tile = choices.get(kind, _choose_tile)(shape)
            rows = self._tile.rows
        self.tile_key = TileKey(shape.group, rows, is_sorted=kind is PrefillKind.HOPPER)
        """The key of its tile lists."""
        self._launch = AttentionLauncher(shape, by_tma=part, is_invariant=kind is PrefillKind.INVARIANT).launch

    def run(self, layer: LayerInputs, tiles: TileList, out: Tensor, log_sums: Tensor | None = None) -> None:
        """Attend the tiles. q, out: [T, H, D], the chunks' tokens; out is contiguous. log_sums: [at least T, H]
        float32, written by tiles of prefixes, beside their results in `out`, and read by those of rests; neither has
        windows. Other tiles leave it alone."""
        is_prefix, is_rest = tiles.part is TilePart.PREFIX, tiles.part is TilePart.REST
        assert out.is_contiguous()
        memory = out, tiles.items, tiles.num_items, log_sums if is_prefix or is_rest else None
        programs = self.shape.num_kv_heads * tiles.capacity
        if self.kind is PrefillKind.HOPPER:
            programs = min(programs, num_multiprocessors(self.shape.device))
            self._launch(self._kernel, (programs,), layer, memory, None, is_prefix)
        elif self.kind is PrefillKind.INVARIANT:
            self._launch(invariant_attention_kernel, (programs,), layer, (*memory, *[None] * 5), self._tile, False)
        else:
            if tiles.num_before is not None:
                programs = min(programs, _PROGRAMS_FOR_THE_REST)
            constants = self._tile, is_prefix, is_rest
            bias = None if layer.bias is None else layer.bias.values
            self._launch(self._kernel, (programs,), layer, (*memory, tiles.num_before, bias), *constants)
