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

from nvcli.kernels.triton.attention.attention_fold import (
    ITEM_FIELDS,
    Tile,
    fold_keys,
    load_query,
    load_sinks,
    weighted_mean,
)
from nvcli.kernels.triton.attention.attention_launch import AttentionLauncher, AttentionShape, LayerInputs
from nvcli.kernels.triton.attention.decode_work_list import FEW_ROWS, SPLIT, DecodeWorkList
from nvcli.kernels.triton.attention.invariant_attention import (
    invariant_attention_kernel,
    invariant_decode_tile,
    invariant_registers,
)
from nvcli.kernels.triton.launch.dependent_launch import await_kernel_before, dependent
from nvcli.kernels.triton.launch.triton_version import has_known_gluon
from nvcli.kernels.whole_numbers import next_power_of_2

_DIRECT_TILE, _DIRECT_TILE_OF_MANY_ROWS = 32, 16
"""Keys of a tile of `fp8_decode_attention.py`. With 16, a multiprocessor has room for 16 programs instead of 12, but
each of them is slower, and so is the end of a step in which all are resident at once: an H200 takes 121 µs with 32 and
139 with 16 for 256 rows of 100 to 1,620 keys, 425 and 419 for 1,024 such rows, 552 and 532 for 1,024 of about 1,100."""
_MANY_ROWS = 512
"""From this many rows on, tiles of `fp8_decode_attention.py` have the smaller size."""
_FEWEST_ROWS = 3
"""From this many rows on, `fp8_decode_attention.py` is used. It takes an H200 11.6 µs for 4 rows of 860 keys, where the
kernel of this file takes 12.1; 16 and 23 for 16 of 860, 74 and 103 for 16 of 8,192, and 73 and 130 for 32 of 4,000. A
warm-up runs 64 rows and 2, so that both kernels are compiled before they are needed."""
_TILE_BYTES = 16 << 10
"""Bytes of keys, and as many of values, in each pipeline stage: more loses occupancy (measured on an H200)."""


@triton.jit(do_not_specialize=["window", "block_table_stride"], do_not_specialize_on_alignment=["block_tables"])
def decode_attention_kernel(
    q,  # [B, H, D], rows q_stride apart
    k_cache,
    v_cache,
    block_tables,  # [slots, ...] int32, rows block_table_stride apart
    sinks,  # [H] float32, if heads have them
    out,  # [B, H, D], contiguous
    items,  # [capacity, ITEM_FIELDS] int32
    num_items,  # [1] int32
    log_sums,  # [B, H] float32, log-sum-exp of each row's scores, base 2, written; None: nobody asks for them
    partial_out,  # [chunks of cut rows, KV, G, D] float32
    partial_lse,  # [chunks of cut rows, KV, G] float32, base 2
    arrivals,  # [B, KV] int32, 0 between launches
    window,
    scale_log2,
    q_stride,
    block_table_stride,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    IS_BESIDE: tl.constexpr,  # the kernel launched before may still run, and ends before this one does
    DEPENDENT: tl.constexpr,
):
    """Program (KV head, entry of the work list)."""
    kv_head = tl.program_id(0)
    index = tl.program_id(1)
    await_kernel_before(DEPENDENT)
    if IS_BESIDE:
        is_last = (kv_head == KIND.num_kv_heads - 1) & (index == tl.num_programs(1) - 1)
        if is_last:
            tl.extra.cuda.gdc_wait()
    if index >= tl.load(num_items):
        return
    item = items + index * ITEM_FIELDS
    row = tl.load(item)
    begin = tl.load(item + 1)
    end = tl.load(item + 2)
    num_chunks = tl.load(item + 3)
    table = block_tables + tl.load(item + 6).to(tl.int64) * block_table_stride
    first_seen = None
    if KIND.has_window:
        first_seen = tl.load(item + 7)

    IS_FP8: tl.constexpr = k_cache.dtype.element_ty == tl.float8e4nv
    ROWS: tl.constexpr = TILE.rows
    HEAD_DIM: tl.constexpr = KIND.head_dim
    group = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM)
    in_group = group < KIND.group
    head = kv_head * KIND.group + group
    query, unit = load_query(q, k_cache, row.to(tl.int64), head, in_group, q_stride, scale_log2, HEAD_DIM)
    highest = tl.full([ROWS], -float("inf"), tl.float32)
    weight_sum = tl.zeros([ROWS], tl.float32)
    acc_unit = tl.zeros([ROWS], tl.float32)
    if KIND.has_sinks:
        # A row's first chunk alone counts the sink, so that the sum over chunks has it once.
        is_first = tl.load(item + 5) == 0
        highest = tl.where(is_first, load_sinks(sinks, head, in_group), highest)
        weight_sum = tl.where(is_first, 1.0, weight_sum)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    highest, weight_sum, acc, acc_unit = fold_keys(
        query, unit, highest, weight_sum, acc, acc_unit, k_cache, v_cache, table, kv_head, begin, end, None,
        first_seen, None, None, KIND, TILE.keys, TILE.num_stages, True, IS_FP8,
    )  # fmt: skip
    acc = weighted_mean(acc, weight_sum, acc_unit, IS_FP8)

    out_row = out + row.to(tl.int64) * (KIND.num_kv_heads * KIND.group * HEAD_DIM)
    if num_chunks == 1:
        tl.store(out_row + head[:, None] * HEAD_DIM + dims[None, :], acc.to(out.dtype.element_ty), in_group[:, None])
        if log_sums is not None:
            place = row * (KIND.num_kv_heads * KIND.group) + head
            tl.store(log_sums + place, highest + tl.log2(weight_sum), mask=in_group)
    else:
        first_partial = tl.load(item + 4)
        partial = ((first_partial + tl.load(item + 5)) * KIND.num_kv_heads + kv_head) * KIND.group + group
        tl.store(partial_out + partial[:, None] * HEAD_DIM + dims[None, :], acc, mask=in_group[:, None])
        tl.store(partial_lse + partial, highest + tl.log2(weight_sum), mask=in_group)
        # All threads have stored before one of them says so; acquire and release order it across programs.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + row * KIND.num_kv_heads + kv_head, 1, sem="acq_rel")
        if arrived == num_chunks - 1:
            tl.store(arrivals + row * KIND.num_kv_heads + kv_head, 0)  # for the next layer
            _reduce_chunks(out_row, log_sums, partial_out, partial_lse, row, first_partial, num_chunks, kv_head, KIND)


@triton.jit
def _reduce_chunks(
    out_row,  # [H, D], contiguous, written
    log_sums,
    partial_out,
    partial_lse,
    row,
    first_partial,  # the row's chunks are the partial results from here on
    num_chunks,
    kv_head,
    KIND: tl.constexpr,
):
    """Weigh a row's partial results for one KV head into its output, 16 chunks at a time."""
    HEAD_DIM: tl.constexpr = KIND.head_dim
    dims = tl.arange(0, HEAD_DIM)
    lanes = tl.arange(0, 16)
    for member in tl.range(0, KIND.group, num_stages=1):
        highest = tl.full([1], -float("inf"), tl.float32)
        weight_sum = tl.zeros([1], tl.float32)
        acc = tl.zeros([HEAD_DIM], tl.float32)
        for start in tl.range(0, num_chunks, 16, num_stages=1):
            is_chunk = start + lanes < num_chunks
            partial = ((first_partial + start + lanes) * KIND.num_kv_heads + kv_head) * KIND.group + member
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
        head = kv_head * KIND.group + member
        tl.store(out_row + head * HEAD_DIM + dims, (acc / weight_sum).to(out_row.dtype.element_ty))
        if log_sums is not None:
            place = row * (KIND.num_kv_heads * KIND.group) + head + tl.arange(0, 1)
            tl.store(log_sums + place, highest + tl.log2(weight_sum))


def _load_direct_kernel(shape: AttentionShape, align: int) -> JITFunction[...] | None:
    """Load the kernel of `fp8_decode_attention.py` if it serves such heads, in chunks that begin at multiples of
    `align`, which divides the size of a block."""
    serves = (
        shape.is_fp8
        and shape.device.type == "cuda"
        and torch.cuda.get_device_capability(shape.device) >= (8, 9)
        and has_known_gluon()
        and shape.head_dim in (64, 128)
        and shape.group <= 8
        and align % _DIRECT_TILE == 0
        and shape.dtype.itemsize == 2
    )
    if not serves:
        return None
    from nvcli.kernels.triton.attention.fp8_decode_attention import fp8_decode_attention_kernel

    return fp8_decode_attention_kernel


class DecodeAttention:
    """Decode attention of one geometry: its work lists and scratch memory, allocated once for a run.

    Call `plan` each step, then `run` in each layer. Neither waits for the device or allocates anything, so both may be
    captured in a CUDA graph. Everything must be launched on one stream at a time: the scratch memory is shared.

    is_beside: the kernel begins as soon as the one launched just before lets it, and ends after it
    (`hopper_segment_kernel.py`). It has a part of the multiprocessors, and tiles of half the size, so that twice as
    many programs run on each.
    is_invariant: rows get the same bits in every batch (`invariant_attention.py`).
    """

    def __init__(
        self,
        shape: AttentionShape,
        *,
        windows: Iterable[int | None],
        max_rows: int,
        is_beside: bool = False,
        is_invariant: bool = False,
    ) -> None:
        assert not is_invariant or shape.kv_dtype == shape.dtype
        self._shape, self._is_beside, self._is_invariant = shape, is_beside, is_invariant
        self._launch = AttentionLauncher(shape, is_invariant=is_invariant).launch
        tile_bytes = _TILE_BYTES // 2 if is_beside else _TILE_BYTES
        self._keys = min(64, max(16, tile_bytes // (shape.head_dim * shape.dtype.itemsize)))
        self._is_full_tile = self._keys * shape.head_dim * shape.kv_dtype.itemsize == tile_bytes
        self._align = self._keys if shape.block_size % self._keys == 0 else 1
        self._direct_kernel = _load_direct_kernel(shape, self._align)
        self._max_rows = max_rows
        self._lists = {window: self.work_list(window) for window in windows}
        partials = (max(one.max_partials for one in self._lists.values()), shape.num_kv_heads, shape.group)
        self._memory = [torch.empty(*partials, shape.head_dim, dtype=torch.float32, device=shape.device)]
        for _ in range(2 if is_invariant else 1):
            self._memory.append(torch.empty(partials, dtype=torch.float32, device=shape.device))
        self._memory.append(torch.zeros(max_rows, shape.num_kv_heads, dtype=torch.int32, device=shape.device))

    def work_list(self, window: int | None) -> DecodeWorkList:
        """Make a work list for this geometry."""
        return DecodeWorkList(
            window=window,
            num_kv_heads=self._shape.num_kv_heads,
            tile=self._keys,
            align=SPLIT.value if self._is_invariant else self._align,
            max_rows=self._max_rows,
            device=self._shape.device,
            lone_warps_from=None if self._direct_kernel is None else _FEWEST_ROWS,
            has_splits=self._is_invariant,
        )

    def plan(self, seq_lens: Tensor, slots: Tensor) -> None:
        """List the step's chunks. seq_lens: [B] int32, keys of each row, 0 for padding; slots: [B] int64, the slot of
        each row, by which its block table is found."""
        for work_list in self._lists.values():
            work_list.plan(seq_lens, slots)

    def run(self, layer: LayerInputs, out: Tensor, own: tuple[DecodeWorkList, Tensor] | None = None) -> None:
        """Attend as planned, in one of the windows that this was made for. q, out: [B, H, D]; out is contiguous.

        `own`: the list of the keys that are to be attended, planned by the caller, and the tensor for the log-sum-exp
        of their scores, at least [B, H] float32, base 2.
        """
        num_rows = layer.q.shape[0]
        work_list, log_sums = (self._lists[layer.window], None) if own is None else own
        assert out.is_contiguous()
        memory = out, work_list.items, work_list.num_items, log_sums, *self._memory
        shape, num_programs = self._shape, work_list.capacity(num_rows)
        grid = (shape.num_kv_heads, num_programs)
        if self._is_invariant:
            tile = invariant_decode_tile(shape, num_rows)
            programs, registers = (shape.num_kv_heads * num_programs,), invariant_registers(shape, tile)
            self._launch(invariant_attention_kernel, programs, layer, memory, tile, True, maxnreg=registers)
        elif self._direct_kernel is not None and num_rows >= _FEWEST_ROWS:
            assert not self._is_beside
            keys = _DIRECT_TILE if num_rows < _MANY_ROWS else _DIRECT_TILE_OF_MANY_ROWS
            tile = Tile(rows=8, keys=keys, num_warps=1, num_stages=1)
            self._launch(self._direct_kernel, grid, layer, memory, tile)
        else:
            waits = not self._is_beside and dependent(shape.device)["DEPENDENT"]
            constants = self._tile(num_rows), self._is_beside, waits
            self._launch(decode_attention_kernel, grid, layer, memory, *constants, launch_pdl=self._is_beside or waits)

    def _tile(self, num_rows: int) -> Tile:
        """Choose the tiles. Those in FP8 stand in registers twice, as they are read and as they are multiplied, so
        large heads take more warps."""
        shape = self._shape
        num_warps = 2 if shape.head_dim <= 256 else 4
        return Tile(
            rows=max(16, next_power_of_2(shape.group)),
            keys=self._keys,
            num_warps=2 * num_warps if shape.is_fp8 and shape.head_dim > 128 else num_warps,
            num_stages=2 if self._is_full_tile and num_rows > FEW_ROWS else 3,
        )
