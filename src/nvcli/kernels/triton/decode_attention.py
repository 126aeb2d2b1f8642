"""Paged decode attention in Triton: one query token for each request, over its keys and values in blocks.

The attention kernel takes one chunk of the work list (`decode_work_list.py`) and one KV head for each program. The last
chunk of a sequence to finish reduces all of them, so that there is no second kernel (the split is FlashDecoding's, Dao
et al. 2023). The grid holds the most chunks that the rows can be cut into; programs behind the list's end leave at
once, so that a launch captured in a CUDA graph serves any lengths.

Held to `attention/torch_backend.py` by tests/attention.
Shapes: B rows, H query heads, KV heads, G = H / KV, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from nvcli.kernels.triton.decode_work_list import FEW_ROWS, ITEM_FIELDS, DecodeWorkList
from nvcli.kernels.triton.dependent_launch import await_kernel_before, dependent
from nvcli.kernels.triton.fp8_kv import load_scales, log2_of_scales, numbers_of_words
from nvcli.kernels.triton.triton_version import has_known_gluon
from nvcli.kernels.whole_numbers import next_power_of_2

LOG2_E = 1.4426950408889634
_DIRECT_TILE, _DIRECT_TILE_OF_MANY_ROWS = 32, 16
"""Keys of a tile of `fp8_decode_attention.py`. With 16, a multiprocessor has room for 16 programs instead of 12, but
each of them is slower, and so is the end of a step in which all are resident at once: an H200 takes 121 µs with 32 and
139 with 16 for 256 rows of 100 to 1,620 keys, 425 and 419 for 1,024 such rows, 552 and 532 for 1,024 of about 1,100."""
_MANY_ROWS = 512
"""From this many rows on, tiles of `fp8_decode_attention.py` have the smaller size."""
_FEW_LONG_ROWS = 32
"""Up to this many rows there are too few programs of `fp8_decode_attention.py` to fill a GPU. An H200 took 97 µs here
and 114 with an earlier form of it for 16 rows of 8,192 keys, and 55 and 53 for 64 of 900."""
_TILE_BYTES = 16 << 10
"""Bytes of keys, and as many of values, in each pipeline stage: more loses occupancy (measured on an H200)."""


@triton.jit
def soft_capped(scores, CAP: tl.constexpr):
    """CAP × tanh(scores / CAP); tanh(x) is 2 sigmoid(2 x) - 1."""
    return 2 * CAP * tl.sigmoid(scores * (2 / CAP)) - CAP


@triton.jit
def log2_scores(scores):
    """Scores in the unit of the kernels, whose softmax takes powers of 2."""
    return scores * 1.4426950408889634


@triton.jit
def float16_query(query):
    """Queries of some heads [heads, D] as numbers below 2, and the powers of 2 that they were divided by, [heads]
    float32. Queries in float32 stay in it."""
    OPERAND: tl.constexpr = tl.float32 if query.dtype.is_fp32() else tl.float16
    values = query.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(values), axis=1), 1e-30)
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return (values * (1.0 / power)[:, None]).to(OPERAND), power


@triton.jit(do_not_specialize=["block_table_stride"], do_not_specialize_on_alignment=["block_tables"])
def decode_attention_kernel(
    q,  # [B, H, D], rows q_stride apart
    k_cache,  # [num_blocks, BLOCK_SIZE, KV, D]; in FP8 each block's scales stand behind it
    v_cache,  # likewise
    out,  # [B, H, D], contiguous
    block_tables,  # [slots, ...] int32, rows block_table_stride apart
    items,  # [capacity, ITEM_FIELDS] int32
    num_items,  # [1] int32
    partial_out,  # [chunks of cut rows, KV, G, D] float32
    partial_lse,  # [chunks of cut rows, KV, G] float32, base 2
    arrivals,  # [B, KV] int32, 0 between launches
    sinks,  # [H] float32, scores that belong to no key, with HAS_SINKS
    log_sums,  # [B, H] float32, log-sum-exp of each row's scores, base 2, written; None: nobody asks for them
    scale_log2,  # scores × scale × log2(e)
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
    TILE: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    ITEM_FIELDS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    IS_BESIDE: tl.constexpr,  # the kernel launched before may still run, and ends before this one does
    ON_GPU: tl.constexpr,  # false in the interpreter
    DEPENDENT: tl.constexpr,
):
    """Program (KV head, entry of the work list)."""
    kv_head = tl.program_id(0)
    index = tl.program_id(1)
    await_kernel_before(DEPENDENT)
    if IS_BESIDE:
        is_last = (kv_head == NUM_KV_HEADS - 1) & (index == tl.num_programs(1) - 1)
        if is_last:
            tl.extra.cuda.gdc_wait()
    if index >= tl.load(num_items):
        return
    item = items + index * ITEM_FIELDS
    row = tl.load(item)
    begin = tl.load(item + 1)
    end = tl.load(item + 2)
    num_chunks = tl.load(item + 3)
    if HAS_WINDOW:
        first_seen = tl.load(item + 7)
    last_key = tl.maximum(end - 1, 0)

    ONE_BLOCK: tl.constexpr = BLOCK_SIZE % TILE == 0  # a tile of keys never straddles blocks
    lanes = tl.arange(0, TILE)
    table = block_tables + tl.load(item + 6).to(tl.int64) * block_table_stride
    # The next tile's block id is loaded ahead of its use: a dependent load inside the loop would take the pipeline's
    # stages, and keys and values would be left with one buffer.
    if ONE_BLOCK:
        next_block = tl.load(table + begin // BLOCK_SIZE)
    else:
        next_block = tl.load(table + tl.minimum(begin + lanes, last_key) // BLOCK_SIZE)
    # Keys and values in FP8 are multiplied in float16, which holds them exactly and which they become in one
    # instruction (bfloat16 takes four), or in the query's float32. Keys' scales are multiplied with the sums.
    IS_FP8: tl.constexpr = k_cache.dtype.element_ty == tl.float8e4nv
    if IS_FP8:
        next_key_scale, next_value_scale = load_scales(
            k_cache, v_cache, table, begin, end, kv_head, TILE, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE
        )

    group = tl.arange(0, PADDED_GROUP)
    dims = tl.arange(0, HEAD_DIM)
    in_group = group < GROUP
    head_offset = (kv_head * GROUP + group)[:, None] * HEAD_DIM + dims[None, :]
    query = tl.load(q + row.to(tl.int64) * q_stride + head_offset, mask=in_group[:, None], other=0.0)
    if IS_FP8:
        query, query_scale = float16_query(query)
        query_scale = query_scale * scale_log2
    else:
        query = query.to(k_cache.dtype.element_ty)

    highest = tl.full([PADDED_GROUP], -float("inf"), tl.float32)
    weight_sum = tl.zeros([PADDED_GROUP], tl.float32)
    if HAS_SINKS:
        # A row's first chunk alone counts the sink, so that the sum over chunks has it once.
        is_first = tl.load(item + 5) == 0
        sink = log2_scores(tl.load(sinks + kv_head * GROUP + group, mask=in_group, other=0.0))
        highest = tl.where(is_first, sink, highest)
        weight_sum = tl.where(is_first, 1.0, weight_sum)
    if IS_FP8:
        # The sum of values has a maximum of its own, of the scores with the values' scales: so weights times scales of
        # whatever size are numbers up to 1.
        highest_scaled = tl.full([PADDED_GROUP], -float("inf"), tl.float32)
        # Values are read as words of four dimensions, whose sums stand apart: byte i of a word goes to sum i.
        words = tl.arange(0, HEAD_DIM // 4)
        acc0 = tl.zeros([PADDED_GROUP, HEAD_DIM // 4], tl.float32)
        acc1 = acc0
        acc2 = acc0
        acc3 = acc0
    else:
        acc = tl.zeros([PADDED_GROUP, HEAD_DIM], tl.float32)
    for start in tl.range(begin, end, TILE, num_stages=NUM_STAGES):
        keys = start + lanes
        is_key = keys < end
        if HAS_WINDOW:
            is_key = is_key & (keys >= first_seen)
        block = next_block.to(tl.int64)
        if ONE_BLOCK:
            next_block = tl.load(table + tl.minimum(start + TILE, last_key) // BLOCK_SIZE)
            offset = start % BLOCK_SIZE + lanes
        else:
            next_block = tl.load(table + tl.minimum(keys + TILE, last_key) // BLOCK_SIZE)
            offset = keys % BLOCK_SIZE
        if IS_FP8:
            key_scale, value_scale = next_key_scale, next_value_scale
            next_key_scale, next_value_scale = load_scales(
                k_cache, v_cache, table, start + TILE, end, kv_head,
                TILE, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE,
            )  # fmt: skip
        row_offset = block * BLOCK_STRIDE + (offset * NUM_KV_HEADS + kv_head) * HEAD_DIM
        cache_offset = row_offset[:, None] + dims[None, :]
        key = tl.load(k_cache + cache_offset, mask=is_key[:, None], other=0.0)
        if IS_FP8:
            key = key.to(query.dtype)
        scores = tl.dot(query, key.T, input_precision="ieee")
        unit = query_scale[:, None] * key_scale.to(tl.float32)[None, :] if IS_FP8 else scale_log2
        scores = scores * unit
        if SOFT_CAP > 0:
            scores = soft_capped(scores, SOFT_CAP)
        scores = tl.where(is_key[None, :], scores, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        decay = tl.exp2(highest - new_highest)
        weights = tl.exp2(scores - new_highest[:, None])
        weight_sum = weight_sum * decay + tl.sum(weights, 1)
        if IS_FP8:
            scores = scores + log2_of_scales(value_scale, ON_GPU)[None, :]
            new_highest_scaled = tl.maximum(highest_scaled, tl.max(scores, 1))
            decay = tl.exp2(highest_scaled - new_highest_scaled)[:, None]
            weights = tl.exp2(scores - new_highest_scaled[:, None]).to(query.dtype)
            highest_scaled = new_highest_scaled
            word_offset = (row_offset // 4)[:, None] + words[None, :]
            value = tl.load(v_cache.to(tl.pointer_type(tl.int32)) + word_offset, mask=is_key[:, None], other=0)
            value0, value1, value2, value3 = numbers_of_words(value, query.dtype, ON_GPU)
            acc0 = tl.dot(weights, value0, acc0 * decay, input_precision="ieee")
            acc1 = tl.dot(weights, value1, acc1 * decay, input_precision="ieee")
            acc2 = tl.dot(weights, value2, acc2 * decay, input_precision="ieee")
            acc3 = tl.dot(weights, value3, acc3 * decay, input_precision="ieee")
        else:
            value = tl.load(v_cache + cache_offset, mask=is_key[:, None], other=0.0)
            acc = acc * decay[:, None]
            acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
        highest = new_highest
    if IS_FP8:
        acc = tl.join(tl.join(acc0, acc2), tl.join(acc1, acc3)).reshape(PADDED_GROUP, HEAD_DIM)
        acc = acc * tl.where(highest_scaled > -float("inf"), tl.exp2(highest_scaled - highest), 0.0)[:, None]
    # A padding row has no key: it gets zeros.
    acc = acc / tl.where(weight_sum > 0, weight_sum, 1.0)[:, None]

    out_row = out + row.to(tl.int64) * (NUM_KV_HEADS * GROUP * HEAD_DIM)
    if num_chunks == 1:
        tl.store(out_row + head_offset, acc.to(out.dtype.element_ty), mask=in_group[:, None])
        if log_sums is not None:
            place = (row * NUM_KV_HEADS + kv_head) * GROUP + group
            tl.store(log_sums + place, highest + tl.log2(weight_sum), mask=in_group)
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
                out_row, log_sums, partial_out, partial_lse, row, first_partial, num_chunks, kv_head,
                NUM_KV_HEADS, GROUP, HEAD_DIM,
            )  # fmt: skip


@triton.jit
def _reduce_chunks(
    out_row,  # [H, D], contiguous, written
    log_sums,  # [B, H] float32, written if it is not None
    partial_out,  # [chunks of cut rows, KV, G, D] float32
    partial_lse,  # [chunks of cut rows, KV, G] float32, base 2
    row,
    first_partial,  # the row's chunks are the partial results from here on
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
        if log_sums is not None:
            one = tl.arange(0, 1)
            tl.store(log_sums + row * (NUM_KV_HEADS * GROUP) + head + one, highest + tl.log2(weight_sum))


def _num_warps(head_dim: int, kv_dtype: torch.dtype) -> int:
    """Choose the warps of a program. Tiles in FP8 stand in registers twice, as they are read and as they are
    multiplied, so large heads take more warps.
    """
    num_warps = 2 if head_dim <= 256 else 4
    return 2 * num_warps if kv_dtype == torch.float8_e4m3fn and head_dim > 128 else num_warps


def _load_direct_kernel(
    head_dim: int, group: int, *, align: int, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
) -> JITFunction[...] | None:
    """Load the kernel of `fp8_decode_attention.py` if it serves such heads, `group` query heads for each KV head, in
    chunks that begin at multiples of `align`, which divides the size of a block."""
    serves = (
        kv_dtype == torch.float8_e4m3fn
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= (8, 9)
        and has_known_gluon()
        and head_dim in (64, 128)
        and group <= 8
        and align % _DIRECT_TILE == 0
        and dtype.itemsize == 2
    )
    if not serves:
        return None
    from nvcli.kernels.triton.fp8_decode_attention import fp8_decode_attention_kernel

    return fp8_decode_attention_kernel


class DecodeAttention:
    """Decode attention of one geometry: its work lists and scratch memory, allocated once for a run.

    Call `plan` each step, then `run` in each layer. Neither waits for the device or allocates anything, so both may be
    captured in a CUDA graph. Everything must be launched on one stream at a time: the scratch memory is shared.

    is_beside: the kernel begins as soon as the one launched just before lets it, and ends after it
    (`hopper_segment_kernel.py`). It has a part of the multiprocessors, and tiles of half the size, so that twice as
    many programs run on each.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        windows: Iterable[int | None],
        block_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
        is_beside: bool = False,
    ) -> None:
        self._num_kv_heads, self._group = num_kv_heads, num_heads // num_kv_heads
        self._head_dim, self._block_size = head_dim, block_size
        tile_bytes = _TILE_BYTES // 2 if is_beside else _TILE_BYTES
        self._tile = min(64, max(16, tile_bytes // (head_dim * dtype.itemsize)))
        self._is_full_tile = self._tile * head_dim * kv_dtype.itemsize == tile_bytes
        self._is_beside = is_beside
        self._num_warps = _num_warps(head_dim, kv_dtype)
        self._align = self._tile if block_size % self._tile == 0 else 1
        self._direct_kernel = _load_direct_kernel(
            head_dim, self._group, align=self._align, dtype=dtype, kv_dtype=kv_dtype, device=device
        )
        self._max_rows, self._device = max_rows, device
        self._lists = {window: self.work_list(window) for window in windows}
        max_partials = max(work_list.max_partials for work_list in self._lists.values())
        partial_shape = (max_partials, num_kv_heads, self._group)
        self._partial_out = torch.empty(*partial_shape, head_dim, dtype=torch.float32, device=device)
        self._partial_lse = torch.empty(*partial_shape, dtype=torch.float32, device=device)
        self._arrivals = torch.zeros(max_rows, num_kv_heads, dtype=torch.int32, device=device)

    def work_list(self, window: int | None) -> DecodeWorkList:
        """Make a work list for this geometry."""
        return DecodeWorkList(
            window=window,
            num_kv_heads=self._num_kv_heads,
            tile=self._tile,
            align=self._align,
            max_rows=self._max_rows,
            device=self._device,
            lone_warps_above=None if self._direct_kernel is None else _FEW_LONG_ROWS,
        )

    def plan(self, seq_lens: Tensor, slots: Tensor) -> None:
        """List the step's chunks. seq_lens: [B] int32, keys of each row, 0 for padding; slots: [B] int64, the slot of
        each row, by which its block table is found."""
        for work_list in self._lists.values():
            work_list.plan(seq_lens, slots)

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        out: Tensor,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        own: tuple[DecodeWorkList, Tensor] | None = None,
    ) -> None:
        """Attend as planned. q, out: [B, H, D]; q's rows may be strided, out is contiguous; block_tables: [slots, ...]
        int32, of the layer's KV group; window: one of those that this was made for; sinks: [H] float32.

        `own`: the list of the keys that are to be attended, planned by the caller, and the tensor for the log-sum-exp
        of their scores, at least [B, H] float32, base 2.
        """
        num_rows = q.shape[0]
        assert q.stride()[1:] == (self._head_dim, 1)
        assert out.is_contiguous()
        work_list, log_sums = (self._lists[window], None) if own is None else own
        num_stages = 2 if self._is_full_tile and num_rows > FEW_ROWS else 3
        assert k_cache.stride() == v_cache.stride()
        assert k_cache.stride()[1:] == (self._num_kv_heads * self._head_dim, self._head_dim, 1)
        grid = (self._num_kv_heads, work_list.capacity(num_rows))
        arguments = (
            q,
            k_cache,
            v_cache,
            out,
            block_tables,
            work_list.items,
            work_list.num_items,
            self._partial_out,
            self._partial_lse,
            self._arrivals,
            self._partial_lse if sinks is None else sinks,
            log_sums,
            scale * LOG2_E,
            q.stride(0),
            block_tables.stride(0),
        )
        constants = {
            "NUM_KV_HEADS": self._num_kv_heads,
            "GROUP": self._group,
            "HEAD_DIM": self._head_dim,
            "BLOCK_SIZE": self._block_size,
            "BLOCK_STRIDE": k_cache.stride(0),
            "HAS_WINDOW": window is not None,
            "SOFT_CAP": 0.0 if soft_cap is None else soft_cap * LOG2_E,
            "HAS_SINKS": sinks is not None,
            "ITEM_FIELDS": ITEM_FIELDS,
        }
        if self._direct_kernel is not None and num_rows > _FEW_LONG_ROWS:
            assert not self._is_beside
            tile = _DIRECT_TILE if num_rows < _MANY_ROWS else _DIRECT_TILE_OF_MANY_ROWS
            self._direct_kernel[grid](*arguments, **constants, TILE=tile, num_warps=1)
            return
        decode_attention_kernel[grid](
            *arguments,
            **constants,
            TILE=self._tile,
            PADDED_GROUP=max(16, next_power_of_2(self._group)),
            NUM_STAGES=num_stages,
            IS_BESIDE=self._is_beside,
            ON_GPU=q.is_cuda,
            num_warps=self._num_warps,
            num_stages=num_stages,
            **({"DEPENDENT": False, "launch_pdl": True} if self._is_beside else dependent(q.device)),
        )
