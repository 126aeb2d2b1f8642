"""Paged decode attention over the segments of keys that requests share: each key is read once for a tile of rows.

A program takes one chunk of a segment, one KV head, and a tile of the rows that share the segment (the work list of
`segment_work_list.py`): the query heads of all these rows that share the KV head are the rows of its matrix products
(Hydragen, Juravsky et al. 2024; FlashInfer's cascade, Ye et al. 2025). Their results are partial ones, weighed by the
log of their sums of weights (log-sum-exp) into those of the rows' own keys by `segment_merge.py`.

Held to `attention/torch_backend.py` by tests/attention.
Shapes: R rows, H query heads, KV heads, G = H / KV, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.triton.decode_attention import LOG2_E, float16_query, soft_capped
from nvcli.kernels.triton.fp8_kv import load_scales, log2_of_scales
from nvcli.kernels.triton.segment_merge import SegmentResults
from nvcli.kernels.triton.segment_work_list import TILE_FIELDS, SegmentWorkList
from nvcli.kernels.whole_numbers import next_power_of_2

_NOTHING_SEEN = -1e30
"""The log-sum-exp of a row that sees no key of a chunk: finite, so that it can be subtracted from itself."""


@triton.jit(
    do_not_specialize=["window", "block_table_stride"],
    do_not_specialize_on_alignment=["block_tables", "slots", "seq_lens"],
)
def segment_attention_kernel(
    q,  # [R, H, D], rows q_stride apart
    k_cache,  # [num_blocks, BLOCK_SIZE, KV, D]; in FP8 each block's scales stand behind it
    v_cache,  # likewise
    block_tables,  # [slots, ...] int32, rows block_table_stride apart
    slots,  # [R] int64
    seq_lens,  # [R] int32
    items,  # [capacity, TILE_FIELDS] int32
    num_items,  # [1] int32
    members,  # [LEVELS, max_rows] int32
    first_partials,  # [LEVELS, max_rows] int32
    partial_out,  # [partial results, KV, G, D] float32, written
    partial_lse,  # [partial results, KV, G] float32, base 2, written
    scale_log2,  # scores × scale × log2(e); positive
    window,  # keys that a row sees at most, where HAS_WINDOW
    q_stride,
    block_table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,  # elements from one block to the next
    HAS_WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,  # soft cap × log2(e); 0: none
    ROWS: tl.constexpr,  # of the matrix products, at least tile rows × GROUP
    KEYS: tl.constexpr,
    TILE_FIELDS: tl.constexpr,
    NOTHING_SEEN: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    ON_GPU: tl.constexpr,  # false in the interpreter
):
    """The programs take the list's entries, with each KV head, in turn."""
    ONE_BLOCK: tl.constexpr = BLOCK_SIZE % KEYS == 0  # a tile of keys never straddles blocks, and all of it is shared
    IS_FP8: tl.constexpr = k_cache.dtype.element_ty == tl.float8e4nv
    lanes = tl.arange(0, ROWS)
    key_lanes = tl.arange(0, KEYS)
    dims = tl.arange(0, HEAD_DIM)
    for work in tl.range(tl.program_id(0), tl.load(num_items) * NUM_KV_HEADS, tl.num_programs(0), num_stages=1):
        kv_head = work % NUM_KV_HEADS
        item = items + work // NUM_KV_HEADS * TILE_FIELDS
        level_place = tl.load(item)
        first_member = tl.load(item + 1)
        num_rows = tl.load(item + 2)
        begin = tl.load(item + 3)
        end = tl.load(item + 4)
        chunk = tl.load(item + 5)

        in_tile = lanes < num_rows * GROUP
        member = level_place + first_member
        row = tl.load(members + member + lanes // GROUP, mask=in_tile, other=0)
        head = kv_head * GROUP + lanes % GROUP
        query = tl.load(
            q + (row.to(tl.int64) * q_stride + head * HEAD_DIM)[:, None] + dims[None, :],
            mask=in_tile[:, None], other=0.0,
        )  # fmt: skip
        # FP8 is multiplied in float16, and the sum of values has a maximum of its own: see decode_attention.
        if IS_FP8:
            query, query_scale = float16_query(query)
            highest_scaled = tl.full([ROWS], -float("inf"), tl.float32)
        else:
            query = query.to(k_cache.dtype.element_ty)
        # The blocks of a segment stand in the table of each of its rows; with a window, those that the tile sees do in
        # that of the shortest row.
        slot = tl.load(item + 6)
        if HAS_WINDOW:
            first_seen = tl.load(seq_lens + row, mask=in_tile, other=2147483647) - window
            least_seen = tl.min(first_seen, 0)
            source = tl.max(tl.where(first_seen == least_seen, row, 0), 0)
            least_seen = tl.maximum(least_seen, begin)
            if ONE_BLOCK:
                least_seen = least_seen // KEYS * KEYS
            begin = tl.minimum(least_seen, end)
            slot = tl.load(slots + source).to(tl.int32)
        table = block_tables + slot.to(tl.int64) * block_table_stride

        last_key = end - 1
        # The next tile's block id is loaded ahead: see decode_attention.
        if ONE_BLOCK:
            next_block = tl.load(table + tl.minimum(begin, last_key) // BLOCK_SIZE)
        else:
            next_block = tl.load(table + tl.minimum(begin + key_lanes, last_key) // BLOCK_SIZE)
        if IS_FP8:
            next_key_scale, next_value_scale = load_scales(
                k_cache, v_cache, table, begin, end, kv_head, KEYS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE
            )
        highest = tl.full([ROWS], -float("inf"), tl.float32)
        weight_sum = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
        for start in tl.range(begin, end, KEYS, num_stages=NUM_STAGES):
            keys = start + key_lanes
            block = next_block.to(tl.int64)
            if ONE_BLOCK:
                next_block = tl.load(table + tl.minimum(start + KEYS, last_key) // BLOCK_SIZE)
                offset = start % BLOCK_SIZE + key_lanes
            else:
                next_block = tl.load(table + tl.minimum(keys + KEYS, last_key) // BLOCK_SIZE)
                offset = keys % BLOCK_SIZE
            if IS_FP8:
                key_scale, value_scale = next_key_scale, next_value_scale
                next_key_scale, next_value_scale = load_scales(
                    k_cache, v_cache, table, start + KEYS, end, kv_head,
                    KEYS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE,
                )  # fmt: skip
            row_offset = block * BLOCK_STRIDE + (offset * NUM_KV_HEADS + kv_head) * HEAD_DIM
            cache_offset = row_offset[:, None] + dims[None, :]
            if ONE_BLOCK:
                key = tl.load(k_cache + cache_offset)
            else:
                key = tl.load(k_cache + cache_offset, mask=(keys < end)[:, None], other=0.0)
            if IS_FP8:
                key = key.to(query.dtype)
            scores = tl.dot(query, key.T, input_precision="ieee")
            if IS_FP8:
                scores = scores * query_scale[:, None] * key_scale.to(tl.float32)[None, :]
            unit = scale_log2
            if SOFT_CAP > 0:
                scores = soft_capped(scores * scale_log2, SOFT_CAP)
                unit = 1.0
            if HAS_WINDOW:
                scores = tl.where((keys[None, :] >= first_seen[:, None]) & (keys < end)[None, :], scores, -float("inf"))
            elif not ONE_BLOCK:
                scores = tl.where((keys < end)[None, :], scores, -float("inf"))
            new_highest = tl.maximum(highest, tl.max(scores, 1) * unit)
            reference = new_highest
            if HAS_WINDOW:  # a row may have seen nothing yet: -inf minus -inf would be NaN
                reference = tl.where(new_highest == -float("inf"), 0.0, new_highest)
            decay = tl.exp2(highest - reference)
            weights = tl.exp2(scores * unit - reference[:, None])
            weight_sum = weight_sum * decay + tl.sum(weights, 1)
            if ONE_BLOCK:
                value = tl.load(v_cache + cache_offset)
            else:
                value = tl.load(v_cache + cache_offset, mask=(keys < end)[:, None], other=0.0)
            if IS_FP8:
                scores = scores * unit + log2_of_scales(value_scale, ON_GPU)[None, :]
                new_highest_scaled = tl.maximum(highest_scaled, tl.max(scores, 1))
                reference = new_highest_scaled
                if HAS_WINDOW:
                    reference = tl.where(new_highest_scaled == -float("inf"), 0.0, new_highest_scaled)
                decay = tl.exp2(highest_scaled - reference)
                weights = tl.exp2(scores - reference[:, None])
                highest_scaled = new_highest_scaled
                value = value.to(query.dtype)
            acc = acc * decay[:, None]
            acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
            highest = new_highest

        if IS_FP8:
            acc = acc * tl.where(highest_scaled > -float("inf"), tl.exp2(highest_scaled - highest), 0.0)[:, None]
        divisor = tl.where(weight_sum > 0, weight_sum, 1.0)
        acc = acc / divisor[:, None]
        lse = tl.where(weight_sum > 0, highest + tl.log2(divisor), NOTHING_SEEN)
        partial = tl.load(first_partials + level_place + row, mask=in_tile, other=0) + chunk
        place = (partial.to(tl.int64) * NUM_KV_HEADS + kv_head) * GROUP + lanes % GROUP
        tl.store(partial_out + place[:, None] * HEAD_DIM + dims[None, :], acc, mask=in_tile[:, None])
        tl.store(partial_lse + place, lse, mask=in_tile)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """Sizes of a tile and how a program works; the kernel's arguments of these names say more."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def _choose_launch(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device) -> _Launch:
    """Choose by head size and type, so that tiles fit in shared memory (99 KiB on GPUs that are made for graphics).

    Tiles of 64 rows against 128 with 8 warps, both with the rows' own keys, in microseconds a layer on an H200 (bf16,
    heads of 128, 32 query heads and 8 KV heads): 243 against 239 for 1,024 rows behind one segment of 2,048 keys, 247
    against 241 behind 16, 418 against 499 for 256 groups of 4 rows behind 512 keys each. In FP8 the conversion of keys
    counts for more: 388 against 362 for the first.
    """
    if dtype.itemsize > 2:  # float32 runs without tensor cores: for tests
        return _Launch(rows=32, keys=32 if head_dim <= 128 else 16, num_warps=4, num_stages=2)
    capability = torch.cuda.get_device_capability(device)
    shared_memory = 227 if capability[0] in (9, 10) else 163 if capability == (8, 0) else 99
    is_fp8 = kv_dtype == torch.float8_e4m3fn
    if is_fp8 and head_dim > 128:  # larger tiles do not fit in registers
        return _Launch(rows=32, keys=32, num_warps=8 if head_dim > 256 else 4, num_stages=2)
    if head_dim > 256:
        rows, keys = (64, 32) if shared_memory >= 227 else (32, 16)
        return _Launch(rows=rows, keys=keys, num_warps=8, num_stages=2)
    if head_dim > 128:
        return _Launch(rows=64, keys=32, num_warps=4, num_stages=2)
    stages = 3 if head_dim <= 64 or shared_memory >= 163 else 2
    if is_fp8:
        return _Launch(rows=128, keys=64, num_warps=8, num_stages=stages)
    return _Launch(rows=64, keys=64, num_warps=4, num_stages=stages)


class SegmentAttention:
    """Decode attention over shared segments of one geometry, with the memory for its results, allocated once for a run.

    Plan `work_list` each step, then call `run` in each layer. Neither waits for the device or allocates anything, so
    both may be captured in a CUDA graph. The results are those of the last `run`.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
    ) -> None:
        self._num_kv_heads, self._group = num_kv_heads, num_heads // num_kv_heads
        self._head_dim, self._block_size = head_dim, block_size
        self._launch = _choose_launch(head_dim, dtype, kv_dtype, device)
        self._max_rows, self._device = max_rows, device
        size = self.work_list(None).max_partials
        shape = (size, num_kv_heads, self._group)
        self._partial_out = torch.empty(*shape, head_dim, dtype=torch.float32, device=device)
        self._partial_lse = torch.empty(*shape, dtype=torch.float32, device=device)

    def work_list(self, window: int | None) -> SegmentWorkList:
        """Make a work list for this geometry."""
        return SegmentWorkList(
            window=window,
            num_kv_heads=self._num_kv_heads,
            keys=self._launch.keys,
            tile_rows=max(1, self._launch.rows // self._group),
            max_rows=self._max_rows,
            device=self._device,
        )

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        work_list: SegmentWorkList,
        slots: Tensor,
        seq_lens: Tensor,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None = None,
    ) -> SegmentResults:
        """Attend the rows to their segments, as planned. q: [R, H, D], rows may be strided; block_tables: [slots, ...]
        int32, of the layer's KV group; slots: [R] int64; seq_lens: [R] int32."""
        launch = self._launch
        assert q.stride()[1:] == (self._head_dim, 1)
        assert k_cache.stride() == v_cache.stride()
        assert k_cache.stride()[1:] == (self._num_kv_heads * self._head_dim, self._head_dim, 1)
        segment_attention_kernel[(work_list.num_programs,)](
            q,
            k_cache,
            v_cache,
            block_tables,
            slots,
            seq_lens,
            work_list.items,
            work_list.num_items,
            work_list.members,
            work_list.first_partials,
            self._partial_out,
            self._partial_lse,
            scale * LOG2_E,
            window or 0,
            q.stride(0),
            block_tables.stride(0),
            NUM_KV_HEADS=self._num_kv_heads,
            GROUP=self._group,
            HEAD_DIM=self._head_dim,
            BLOCK_SIZE=self._block_size,
            BLOCK_STRIDE=k_cache.stride(0),
            HAS_WINDOW=window is not None,
            SOFT_CAP=0.0 if soft_cap is None else soft_cap * LOG2_E,
            ROWS=max(launch.rows, next_power_of_2(self._group)),
            KEYS=launch.keys,
            TILE_FIELDS=TILE_FIELDS,
            NOTHING_SEEN=_NOTHING_SEEN,
            NUM_STAGES=launch.num_stages,
            ON_GPU=q.is_cuda,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )
        return SegmentResults(
            out=self._partial_out,
            lse=self._partial_lse,
            firsts=work_list.first_partials[0],
            counts=work_list.num_partials,
        )
