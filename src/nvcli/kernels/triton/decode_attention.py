"""Paged decode attention in Triton: one query token for each request, over its keys and values in blocks.

A planning kernel runs once a step, on the GPU: it cuts the sequences into chunks of about equal length, so that the
chunks × KV heads come to a few programs for each multiprocessor, and lists the chunks, longest first. The attention
kernel takes one chunk and one KV head for each program. The last chunk of a sequence to finish reduces all of them,
so that there is no second kernel (the split is FlashDecoding's, Dao et al. 2023; the list with longest first follows
FlashInfer's scheduler, Ye et al. 2025, moved to the GPU).

Nothing depends on host values but the number of rows: a CUDA graph captured for some number of rows serves any
lengths. The grid holds the most chunks that the rows can be cut into; programs behind the list's end leave at once.

Held to `attention/torch_backend.py` by tests/attention.
Shapes: B rows, H query heads, KV heads, G = H / KV, D head_dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ITEM_FIELDS = 8
"""int32 of a list entry: row, first key, end, chunks of the row, its first partial result, which chunk; 2 unused."""
_MIN_CHUNK = 128
"""Keys; shorter chunks cost more in reduction than they gain."""
_PLAN_ROWS, _PLAN_COLUMNS = 16, 256
_TILE_BYTES = 16 << 10
"""Of keys, and as many of values, in each pipeline stage: more loses occupancy (measured on an H200)."""
_FEW_ROWS = 8
"""Up to here fewer programs with deeper pipelines are faster; above, programs enough for all (same H200)."""


@triton.jit
def _cut(lens, chunk, TILE: tl.constexpr):
    """(keys in a chunk, number of chunks) of sequences; an empty one (padding) makes one empty chunk."""
    num_chunks = tl.maximum(tl.cdiv(lens, chunk), 1)
    size = tl.maximum(tl.cdiv(tl.cdiv(lens, num_chunks), TILE) * TILE, TILE)
    return size, tl.maximum(tl.cdiv(lens, size), 1)


@triton.jit(do_not_specialize=["num_rows", "target_programs"])
def plan_decode_kernel(
    seq_lens,  # [num_rows] int32
    items,  # [capacity, _ITEM_FIELDS] int32, written
    num_items,  # [1] int32, written
    num_rows,
    target_programs,
    NUM_KV_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ITEM_FIELDS: tl.constexpr,
):
    """Program i places the chunks of ROWS rows: behind those of all rows with longer chunks, ties by row."""
    columns = tl.arange(0, COLUMNS)
    tokens = tl.zeros([COLUMNS], tl.int64)
    for start in range(0, num_rows, COLUMNS):
        tokens += tl.load(seq_lens + start + columns, mask=start + columns < num_rows, other=0)
    per_program = tl.cdiv(tl.sum(tokens, 0) * NUM_KV_HEADS, target_programs).to(tl.int32)
    chunk = tl.maximum(tl.cdiv(per_program, TILE) * TILE, MIN_CHUNK)

    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lens = tl.load(seq_lens + rows, mask=rows < num_rows, other=0)
    size, num_chunks = _cut(lens, chunk, TILE)
    first_item = tl.zeros([ROWS], tl.int32)
    first_partial = tl.zeros([ROWS], tl.int32)
    total = tl.zeros([COLUMNS], tl.int32)
    for start in range(0, num_rows, COLUMNS):
        others = start + columns
        other_lens = tl.load(seq_lens + others, mask=others < num_rows, other=0)
        other_size, other_chunks = _cut(other_lens, chunk, TILE)
        other_chunks = tl.where(others < num_rows, other_chunks, 0)
        total += other_chunks
        is_before = (other_size[None, :] > size[:, None]) | (
            (other_size[None, :] == size[:, None]) & (others[None, :] < rows[:, None])
        )
        first_item += tl.sum(tl.where(is_before, other_chunks[None, :], 0), 1)
        # Only rows of more than one chunk leave partial results.
        first_partial += tl.sum(tl.where(is_before & (other_chunks[None, :] > 1), other_chunks[None, :], 0), 1)

    for index in range(tl.max(num_chunks, 0)):
        item = items + (first_item + index) * ITEM_FIELDS
        is_mine = (index < num_chunks) & (rows < num_rows)
        tl.store(item, rows, mask=is_mine)
        tl.store(item + 1, index * size, mask=is_mine)
        tl.store(item + 2, tl.minimum((index + 1) * size, lens), mask=is_mine)
        tl.store(item + 3, num_chunks, mask=is_mine)
        tl.store(item + 4, first_partial, mask=is_mine)
        tl.store(item + 5, tl.zeros([ROWS], tl.int32) + index, mask=is_mine)
    if tl.program_id(0) == 0:
        tl.store(num_items, tl.sum(total, 0))


@triton.jit(do_not_specialize=["block_table_stride"])
def decode_attention_kernel(
    q,  # [B, H, D], rows q_stride apart
    k_cache,  # [num_blocks, BLOCK_SIZE, KV, D]
    v_cache,
    out,  # [B, H, D], contiguous
    block_tables,  # [B, ...] int32, rows block_table_stride apart
    items,
    num_items,
    partial_out,  # [chunks of cut rows, KV, G, D] float32
    partial_lse,  # [chunks of cut rows, KV, G] float32, base 2
    arrivals,  # [B, KV] int32, 0 between launches
    scale_log2,  # scores × scale × log2(e)
    q_stride,
    block_table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    ITEM_FIELDS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    kv_head = tl.program_id(0)
    index = tl.program_id(1)
    if index >= tl.load(num_items):
        return
    item = items + index * ITEM_FIELDS
    row = tl.load(item)
    begin = tl.load(item + 1)
    end = tl.load(item + 2)
    num_chunks = tl.load(item + 3)
    last_key = tl.maximum(end - 1, 0)

    ONE_BLOCK: tl.constexpr = BLOCK_SIZE % TILE == 0  # a tile of keys never straddles blocks
    lanes = tl.arange(0, TILE)
    table = block_tables + row.to(tl.int64) * block_table_stride
    # The next tile's block id is loaded ahead of its use: a dependent load inside the loop would take the pipeline's
    # stages, and keys and values would be left with one buffer.
    if ONE_BLOCK:
        next_block = tl.load(table + begin // BLOCK_SIZE)
    else:
        next_block = tl.load(table + tl.minimum(begin + lanes, last_key) // BLOCK_SIZE)

    group = tl.arange(0, PADDED_GROUP)
    dims = tl.arange(0, HEAD_DIM)
    in_group = group < GROUP
    head_offset = (kv_head * GROUP + group)[:, None] * HEAD_DIM + dims[None, :]
    query = tl.load(q + row.to(tl.int64) * q_stride + head_offset, mask=in_group[:, None], other=0.0)
    query = query.to(k_cache.dtype.element_ty)

    highest = tl.full([PADDED_GROUP], -float("inf"), tl.float32)
    weight_sum = tl.zeros([PADDED_GROUP], tl.float32)
    acc = tl.zeros([PADDED_GROUP, HEAD_DIM], tl.float32)
    for start in tl.range(begin, end, TILE, num_stages=NUM_STAGES):
        keys = start + lanes
        is_key = keys < end
        block = next_block.to(tl.int64)
        if ONE_BLOCK:
            next_block = tl.load(table + tl.minimum(start + TILE, last_key) // BLOCK_SIZE)
            offset = start % BLOCK_SIZE + lanes
        else:
            next_block = tl.load(table + tl.minimum(keys + TILE, last_key) // BLOCK_SIZE)
            offset = keys % BLOCK_SIZE
        cache_offset = ((block * BLOCK_SIZE + offset) * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + dims[None, :]
        key = tl.load(k_cache + cache_offset, mask=is_key[:, None], other=0.0)
        scores = tl.dot(query, key.T, input_precision="ieee") * scale_log2
        scores = tl.where(is_key[None, :], scores, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        decay = tl.exp2(highest - new_highest)
        weights = tl.exp2(scores - new_highest[:, None])
        weight_sum = weight_sum * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        value = tl.load(v_cache + cache_offset, mask=is_key[:, None], other=0.0)
        acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
        highest = new_highest
    # A padding row has no key: it gets zeros.
    acc = acc / tl.where(weight_sum > 0, weight_sum, 1.0)[:, None]

    out_row = out + row.to(tl.int64) * (NUM_KV_HEADS * GROUP * HEAD_DIM)
    if num_chunks == 1:
        tl.store(out_row + head_offset, acc.to(out.dtype.element_ty), mask=in_group[:, None])
    else:
        first_partial = tl.load(item + 4)
        partial = ((first_partial + tl.load(item + 5)) * NUM_KV_HEADS + kv_head) * GROUP
        partial_offset = (partial + group)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(partial_out + partial_offset, acc, mask=in_group[:, None])
        tl.store(partial_lse + partial + group, highest + tl.log2(weight_sum), mask=in_group)
        # All threads have stored before one of them says so; acquire and release order it across programs.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + row * NUM_KV_HEADS + kv_head, 1, sem="acq_rel")
        if arrived == num_chunks - 1:
            tl.store(arrivals + row * NUM_KV_HEADS + kv_head, 0)  # for the next layer
            _reduce_chunks(
                out_row, partial_out, partial_lse, first_partial, num_chunks, kv_head,
                NUM_KV_HEADS, GROUP, HEAD_DIM,
            )  # fmt: skip


@triton.jit
def _reduce_chunks(
    out_row,
    partial_out,
    partial_lse,
    first_partial,
    num_chunks,
    kv_head,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Weigh a row's partial results for one KV head into its output, 16 chunks at a time."""
    dims = tl.arange(0, HEAD_DIM)
    lanes = tl.arange(0, 16)
    for member in tl.range(0, GROUP, num_stages=1):
        highest = tl.full([1], -float("inf"), tl.float32)
        weight_sum = tl.zeros([1], tl.float32)
        acc = tl.zeros([HEAD_DIM], tl.float32)
        for start in tl.range(0, num_chunks, 16, num_stages=1):
            is_chunk = start + lanes < num_chunks
            partial = ((first_partial + start + lanes) * NUM_KV_HEADS + kv_head) * GROUP + member
            # .cg: past the L1 cache, which may hold what was there before the other programs stored.
            lse = tl.load(partial_lse + partial, mask=is_chunk, other=-float("inf"), cache_modifier=".cg")
            value = tl.load(
                partial_out + partial[:, None] * HEAD_DIM + dims[None, :],
                mask=is_chunk[:, None], other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            new_highest = tl.maximum(highest, tl.max(lse, 0))
            decay = tl.exp2(highest - new_highest)
            weights = tl.exp2(lse - new_highest)
            weight_sum = weight_sum * decay + tl.sum(weights, 0)
            acc = acc * decay + tl.sum(value * weights[:, None], 0)
            highest = new_highest
        head = kv_head * GROUP + member
        tl.store(out_row + head * HEAD_DIM + dims, (acc / weight_sum).to(out_row.dtype.element_ty))


class DecodeAttention:
    """The work list and the scratch memory of one run, allocated once; call `plan` each step, then `run` each layer.

    Launches nothing that waits for the device and allocates nothing, so both may be captured in a CUDA graph.
    Everything must be launched on one stream at a time: the scratch memory is shared.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
    ) -> None:
        self._num_kv_heads, self._group = num_kv_heads, num_heads // num_kv_heads
        self._head_dim, self._block_size = head_dim, block_size
        self._max_rows = max_rows
        self._num_processors = (
            torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
        )
        self._tile = min(64, max(16, _TILE_BYTES // (head_dim * dtype.itemsize)))
        # At most target / KV + rows chunks in all, and twice target / KV of rows that are cut: a row of more than one
        # chunk is longer than the chunk size, which is at least tokens × KV / target.
        most_cut = self._target(max_rows) // num_kv_heads + 1
        self._items = torch.zeros(most_cut + max_rows, _ITEM_FIELDS, dtype=torch.int32, device=device)
        self._num_items = torch.zeros(1, dtype=torch.int32, device=device)
        partial_shape = (2 * most_cut, num_kv_heads, self._group)
        self._partial_out = torch.empty(*partial_shape, head_dim, dtype=torch.float32, device=device)
        self._partial_lse = torch.empty(*partial_shape, dtype=torch.float32, device=device)
        self._arrivals = torch.zeros(max_rows, num_kv_heads, dtype=torch.int32, device=device)

    def _target(self, num_rows: int) -> int:
        """Programs to aim for."""
        return self._num_processors * 5 // 2 if num_rows <= _FEW_ROWS else self._num_processors * 4

    def plan(self, seq_lens: Tensor) -> None:
        """List the step's chunks. seq_lens: [B] int32, keys of each row, 0 for padding."""
        num_rows = seq_lens.shape[0]
        assert num_rows <= self._max_rows, f"{num_rows} decode rows, and the backend was made for {self._max_rows}"
        plan_decode_kernel[(triton.cdiv(num_rows, _PLAN_ROWS),)](
            seq_lens,
            self._items,
            self._num_items,
            num_rows,
            self._target(num_rows),
            NUM_KV_HEADS=self._num_kv_heads,
            TILE=self._tile,
            MIN_CHUNK=_MIN_CHUNK,
            ROWS=_PLAN_ROWS,
            COLUMNS=_PLAN_COLUMNS,
            ITEM_FIELDS=_ITEM_FIELDS,
            num_warps=4,
        )

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, scale: float, out: Tensor) -> None:
        """Attend as planned. q, out: [B, H, D]; q's rows may be strided, out is contiguous; block_tables: [B, ...]."""
        num_rows = q.shape[0]
        assert q.stride()[1:] == (self._head_dim, 1)
        assert out.is_contiguous()
        is_full_tile = self._tile * self._head_dim * k_cache.element_size() == _TILE_BYTES
        num_stages = 2 if is_full_tile and num_rows > _FEW_ROWS else 3
        capacity = self._target(num_rows) // self._num_kv_heads + num_rows
        decode_attention_kernel[(self._num_kv_heads, capacity)](
            q,
            k_cache,
            v_cache,
            out,
            block_tables,
            self._items,
            self._num_items,
            self._partial_out,
            self._partial_lse,
            self._arrivals,
            scale * 1.4426950408889634,
            q.stride(0),
            block_tables.stride(0),
            NUM_KV_HEADS=self._num_kv_heads,
            GROUP=self._group,
            HEAD_DIM=self._head_dim,
            BLOCK_SIZE=self._block_size,
            TILE=self._tile,
            PADDED_GROUP=max(16, triton.next_power_of_2(self._group)),
            ITEM_FIELDS=_ITEM_FIELDS,
            NUM_STAGES=num_stages,
            num_warps=2,
            num_stages=num_stages,
        )
