"""Paged decode attention over the segments of keys that requests share: each key is read once for a tile of rows.

A program takes one chunk of a segment, one KV head, and a tile of the rows that share the segment (the work list of
`segment_work_list.py`): the query heads of all these rows that share the KV head are the rows of its matrix products
(Hydragen, Juravsky et al. 2024; FlashInfer's cascade, Ye et al. 2025). Their results are partial; `segment_merge.py`
merges them, weighted by the log of their sums of weights (log-sum-exp), into those over the rows' own keys.

Held to `attention/torch_backend.py` by tests/attention.
Shapes: R rows, H query heads, KV heads, G = H / KV, D head_dim.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.triton.attention.attention_fold import (
    ITEM_FIELDS,
    Tile,
    fold_keys,
    hopper_keys,
    load_query,
    load_query_tail,
    weighted_mean,
)
from nvcli.kernels.triton.attention.attention_launch import AttentionLauncher, AttentionShape, LayerInputs
from nvcli.kernels.triton.attention.segment_merge import SegmentResults
from nvcli.kernels.triton.attention.segment_work_list import SegmentWorkList
from nvcli.kernels.triton.launch.multiprocessors import shared_memory_bytes
from nvcli.kernels.whole_numbers import next_power_of_2

_NOTHING_SEEN = tl.constexpr(-1e30)
"""The log-sum-exp of a row that sees no key of a chunk: finite, so that it can be subtracted from itself."""


@triton.jit(
    do_not_specialize=["window", "block_table_stride"],
    do_not_specialize_on_alignment=["block_tables", "slots", "seq_lens"],
)
def segment_attention_kernel(
    q,  # [R, H, D], rows q_stride apart
    k_cache,
    v_cache,
    block_tables,  # [slots, ...] int32, rows block_table_stride apart
    sinks,  # the rows' own keys have them
    partial_out,  # [partial results, KV, G, D] float32, written
    items,  # [capacity, ITEM_FIELDS] int32
    num_items,  # [1] int32
    partial_lse,  # [partial results, KV, G] float32, base 2, written
    slots,  # [R] int64
    seq_lens,  # [R] int32
    members,  # [LEVELS, max_rows] int32
    first_partials,  # [LEVELS, max_rows] int32
    window,
    scale_log2,
    q_stride,
    block_table_stride,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
):
    """Programs take the list's entries, for each KV head, in turn."""
    IS_FP8: tl.constexpr = k_cache.dtype.element_ty == tl.float8e4nv
    ONE_BLOCK: tl.constexpr = KIND.block_size % TILE.keys == 0  # of a tile of keys all are shared then
    ROWS: tl.constexpr = TILE.rows
    HEAD_DIM: tl.constexpr = KIND.head_dim
    lanes = tl.arange(0, ROWS)
    for work in tl.range(tl.program_id(0), tl.load(num_items) * KIND.num_kv_heads, tl.num_programs(0), num_stages=1):
        kv_head = work % KIND.num_kv_heads
        item = items + work // KIND.num_kv_heads * ITEM_FIELDS
        level_place = tl.load(item)
        first_member = tl.load(item + 1)
        num_rows = tl.load(item + 2)
        begin = tl.load(item + 3)
        end = tl.load(item + 4)
        chunk = tl.load(item + 5)

        in_tile = lanes < num_rows * KIND.group
        row = tl.load(members + level_place + first_member + lanes // KIND.group, mask=in_tile, other=0)
        head = kv_head * KIND.group + lanes % KIND.group
        query, unit = load_query(q, k_cache, row.to(tl.int64), head, in_tile, q_stride, scale_log2, KIND)
        tail = None
        if KIND.tail_dim:
            tail = load_query_tail(q, k_cache, row.to(tl.int64), head, in_tile, q_stride, unit, scale_log2, KIND)
        # The blocks of a segment stand in the table of each of its rows; with a window, those that the tile sees do in
        # that of the shortest row.
        slot = tl.load(item + 6)
        first_seen = None
        if KIND.has_window:
            first_seen = tl.load(seq_lens + row, mask=in_tile, other=2147483647) - window
            least_seen = tl.min(first_seen, 0)
            source = tl.max(tl.where(first_seen == least_seen, row, 0), 0)
            least_seen = tl.maximum(least_seen, begin)
            if ONE_BLOCK:
                least_seen = least_seen // TILE.keys * TILE.keys
            begin = tl.minimum(least_seen, end)
            slot = tl.load(slots + source).to(tl.int32)
        table = block_tables + slot.to(tl.int64) * block_table_stride
        highest = tl.full([ROWS], -float("inf"), tl.float32)
        nothing = tl.zeros([ROWS], tl.float32)
        highest, weight_sum, acc, acc_unit = fold_keys(
            query, tail, unit, highest, nothing, tl.zeros([ROWS, HEAD_DIM], tl.float32), nothing, k_cache, v_cache,
            table, kv_head, begin, end, None, None, first_seen, None, KIND, TILE.keys, TILE.num_stages, not ONE_BLOCK,
            False,
        )  # fmt: skip
        acc = weighted_mean(acc, weight_sum, acc_unit, IS_FP8)
        lse = tl.where(weight_sum > 0, highest + tl.log2(tl.where(weight_sum > 0, weight_sum, 1.0)), _NOTHING_SEEN)
        partial = tl.load(first_partials + level_place + row, mask=in_tile, other=0) + chunk
        place = (partial.to(tl.int64) * KIND.num_kv_heads + kv_head) * KIND.group + lanes % KIND.group
        tl.store(partial_out + place[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :], acc, mask=in_tile[:, None])
        tl.store(partial_lse + place, lse, mask=in_tile)


def _choose_tile(shape: AttentionShape) -> Tile:
    """Choose by head size and type, so that tiles fit in shared memory (99 KiB on GPUs that are made for graphics).

    Tiles of 64 rows against 128 with 8 warps, both with the rows' own keys, in microseconds a layer on an H200 (bf16,
    heads of 128, 32 query heads and 8 KV heads): 243 against 239 for 1,024 rows behind one segment of 2,048 keys, 247
    against 241 behind 16, 418 against 499 for 256 groups of 4 rows behind 512 keys each. In FP8 the conversion of keys
    counts for more: 388 against 362 for the first.
    """
    head_dim, least_rows = shape.tile_dim, next_power_of_2(shape.group)

    def tile(rows: int, keys: int, num_warps: int, num_stages: int = 2) -> Tile:
        return Tile(rows=max(rows, least_rows), keys=keys, num_warps=num_warps, num_stages=num_stages)

    if shape.dtype.itemsize > 2:  # float32 runs without tensor cores: for tests
        return tile(32, 32 if head_dim <= 128 else 16, 4)
    if shape.is_fp8 and head_dim > 128:  # larger tiles do not fit in registers
        return tile(32, 32, 8 if head_dim > 256 else 4)
    shared_memory = shared_memory_bytes(shape.device)
    if head_dim > 256:
        keys = 32 if shape.has_values else 64  # there are no values to be read beside them
        return tile(64, keys, 8) if shared_memory >= 227 << 10 else tile(32, 16, 8)
    if head_dim > 128:
        return tile(64, 32, 4)
    stages = 3 if head_dim <= 64 or shared_memory >= 163 << 10 else 2
    return tile(128, 64, 8, stages) if shape.is_fp8 else tile(64, 64, 4, stages)


class SegmentAttention:
    """Decode attention over shared segments of one geometry, with the memory for its results, allocated once for a run.

    Plan `work_list` each step, then call `run` in each layer. Neither waits for the device or allocates anything, so
    both may be captured in a CUDA graph. The results are those of the last `run`.

    on_hopper: use the kernel for Hopper GPUs (`hopper_segment_kernel.py`), beside which the next launch may run.
    """

    def __init__(self, shape: AttentionShape, *, max_rows: int, on_hopper: bool = False) -> None:
        self._shape, self._max_rows = shape, max_rows
        self._kernel: Any = segment_attention_kernel
        self._tile, part = None, None
        out_dtype = torch.float32
        if on_hopper:
            from nvcli.kernels.triton.attention import hopper_prefill_kernel, hopper_segment_kernel

            self._kernel, out_dtype = hopper_segment_kernel.hopper_segment_kernel, shape.dtype
            part = hopper_prefill_kernel.PART.value
            # Chunks begin with a block and with a tile of keys.
            self._rows = hopper_prefill_kernel.ROWS.value
            self._keys = math.lcm(hopper_keys(shape.head_dim), shape.block_size)
        else:
            self._tile = _choose_tile(shape)
            self._rows, self._keys = self._tile.rows, self._tile.keys
        self._launch = AttentionLauncher(shape, by_tma=part).launch
        partials = (self.work_list(None).max_partials, shape.num_kv_heads, shape.group)
        self._partial_out = torch.empty(*partials, shape.head_dim, dtype=out_dtype, device=shape.device)
        self._partial_lse = torch.empty(partials, dtype=torch.float32, device=shape.device)

    def work_list(self, window: int | None) -> SegmentWorkList:
        """Make a work list for this geometry."""
        return SegmentWorkList(
            window=window,
            num_kv_heads=self._shape.num_kv_heads,
            keys=self._keys,
            tile_rows=max(1, self._rows // self._shape.group),
            max_rows=self._max_rows,
            device=self._shape.device,
        )

    def run(self, layer: LayerInputs, work_list: SegmentWorkList, slots: Tensor, seq_lens: Tensor) -> SegmentResults:
        """Attend the rows to their segments, as planned. q: [R, H, D]; slots: [R] int64; seq_lens: [R] int32."""
        on_hopper = self._tile is None
        programs = work_list.num_processors if on_hopper else work_list.num_programs
        lists = work_list.lists
        memory = (
            self._partial_out,
            lists.items,
            lists.num_items,
            self._partial_lse,
            *([lists.work] if on_hopper else [slots, seq_lens]),
            lists.members,
            lists.first_partials,
        )
        self._launch(self._kernel, (programs,), layer, memory, self._tile)
        return SegmentResults(self._partial_out, self._partial_lse, lists.first_partials[0], lists.num_partials)
