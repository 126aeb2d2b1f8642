"""Paged prefill attention in Triton: causal attention of prompt slices, each behind whatever of it is cached already.

FlashAttention-2's algorithm (Dao, 2023) over keys and values read through block tables. A program takes a tile of
one slice's queries and one KV head. The query heads that share the KV head stand beside each other in the tile, so
that row r of a slice is head r % G of token r // G: short slices fill tiles better, and keys are read once for all.
Key tiles that every row sees are attended without masks, the rest with them.

The host lists the tiles of all slices once a step (`plan`), those with the most keys first. Launch parameters are the
same for all lengths, so nothing is compiled twice.

Held to `attention/torch_backend.py` by tests/attention. Shapes: T tokens of all slices, H query heads, KV heads,
G = H / KV, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE_FIELDS = 4
"""int32 of a list entry: request, first row in the slice, the slice's first token, its number of tokens."""


@triton.jit
def _attend(
    query,
    highest,
    weight_sum,
    acc,
    k_cache,
    v_cache,
    table,
    kv_head,
    begin,
    end,
    last_key,
    positions,
    scale_log2,
    MASKED: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Fold keys [begin, end) into the running softmax; `begin` is a multiple of KEYS, and so is `end` without masks."""
    ONE_BLOCK: tl.constexpr = BLOCK_SIZE % KEYS == 0  # a tile of keys never straddles blocks
    lanes = tl.arange(0, KEYS)
    dims = tl.arange(0, HEAD_DIM)
    # The next tile's block id is loaded ahead: see decode_attention.
    if ONE_BLOCK:
        next_block = tl.load(table + tl.minimum(begin, last_key) // BLOCK_SIZE)
    else:
        next_block = tl.load(table + tl.minimum(begin + lanes, last_key) // BLOCK_SIZE)
    for start in tl.range(begin, end, KEYS, num_stages=NUM_STAGES):
        keys = start + lanes
        block = next_block.to(tl.int64)
        if ONE_BLOCK:
            next_block = tl.load(table + tl.minimum(start + KEYS, last_key) // BLOCK_SIZE)
            offset = start % BLOCK_SIZE + lanes
        else:
            next_block = tl.load(table + tl.minimum(keys + KEYS, last_key) // BLOCK_SIZE)
            offset = keys % BLOCK_SIZE
        cache_offset = ((block * BLOCK_SIZE + offset) * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + dims[None, :]
        if MASKED:
            # Behind the slice's end lies what an earlier owner of the block left: 0 × NaN would be NaN.
            key = tl.load(k_cache + cache_offset, mask=(keys < end)[:, None], other=0.0)
        else:
            key = tl.load(k_cache + cache_offset)
        scores = tl.dot(query, key.T, input_precision="ieee")
        if MASKED:
            scores = tl.where(keys[None, :] <= positions[:, None], scores, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1) * scale_log2)
        decay = tl.exp2(highest - new_highest)
        weights = tl.exp2(scores * scale_log2 - new_highest[:, None])
        weight_sum = weight_sum * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        if MASKED:
            value = tl.load(v_cache + cache_offset, mask=(keys < end)[:, None], other=0.0)
        else:
            value = tl.load(v_cache + cache_offset)
        acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
        highest = new_highest
    return highest, weight_sum, acc


@triton.jit(do_not_specialize=["block_table_stride"])
def prefill_attention_kernel(
    q,  # [T, H, D], tokens q_stride apart
    k_cache,  # [num_blocks, BLOCK_SIZE, KV, D]
    v_cache,
    out,  # [T, H, D], contiguous
    block_tables,  # [requests, ...] int32, rows block_table_stride apart
    seq_lens,  # [requests] int32, keys of each request, the slice's own included
    tiles,  # [num_tiles, _TILE_FIELDS] int32
    scale_log2,  # scale × log2(e); positive
    q_stride,
    block_table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    TILE_FIELDS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    kv_head = tl.program_id(0)
    tile = tiles + tl.program_id(1) * TILE_FIELDS
    request = tl.load(tile)
    first_row = tl.load(tile + 1)
    first_token = tl.load(tile + 2)
    num_tokens = tl.load(tile + 3)
    seq_len = tl.load(seq_lens + request)
    prefix = seq_len - num_tokens

    rows = first_row + tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM)
    token = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    in_slice = token < num_tokens
    flat_token = (first_token + token).to(tl.int64)
    query = tl.load(
        q + (flat_token * q_stride + head * HEAD_DIM)[:, None] + dims[None, :], mask=in_slice[:, None], other=0.0
    )
    query = query.to(k_cache.dtype.element_ty)

    last_token = tl.minimum((first_row + ROWS - 1) // GROUP, num_tokens - 1)
    seen_by_all = (prefix + first_row // GROUP + 1) // KEYS * KEYS
    seen_by_any = prefix + last_token + 1
    last_key = tl.maximum(seq_len - 1, 0)
    table = block_tables + request.to(tl.int64) * block_table_stride
    highest = tl.full([ROWS], -float("inf"), tl.float32)
    weight_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    highest, weight_sum, acc = _attend(
        query, highest, weight_sum, acc, k_cache, v_cache, table, kv_head, 0, seen_by_all, last_key, prefix + token,
        scale_log2, False, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, KEYS, NUM_STAGES,
    )  # fmt: skip
    highest, weight_sum, acc = _attend(
        query, highest, weight_sum, acc, k_cache, v_cache, table, kv_head, seen_by_all, seen_by_any, last_key,
        prefix + token, scale_log2, True, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, KEYS, NUM_STAGES,
    )  # fmt: skip
    acc = acc / weight_sum[:, None]
    out_offset = (flat_token * (NUM_KV_HEADS * GROUP) + head)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out + out_offset, acc.to(out.dtype.element_ty), mask=in_slice[:, None])


@dataclass(frozen=True, slots=True)
class _Launch:
    rows: int
    keys: int
    num_warps: int
    num_stages: int


def _choose_launch(head_dim: int, dtype: torch.dtype, device: torch.device) -> _Launch:
    """Measured on an H200; GPUs with less shared memory get smaller tiles or fewer stages, which fit in 99 KiB."""
    if dtype.itemsize > 2:  # float32 runs without tensor cores: for tests
        return _Launch(rows=32, keys=32 if head_dim <= 128 else 16, num_warps=4, num_stages=2)
    capability = torch.cuda.get_device_capability(device)
    # KiB for each program: 227 on data-centre Hopper and Blackwell, 163 on the A100, 99 on the rest.
    shared_memory = 227 if capability[0] in (9, 10) else 163 if capability == (8, 0) else 99
    if head_dim > 128:
        if shared_memory >= 192:
            return _Launch(rows=128, keys=64, num_warps=8, num_stages=2)
        return _Launch(rows=64, keys=32, num_warps=4, num_stages=2)
    if head_dim <= 64:
        return _Launch(rows=128, keys=64, num_warps=4, num_stages=3)
    return _Launch(rows=64, keys=64, num_warps=4, num_stages=3 if shared_memory >= 112 else 2)


class PrefillAttention:
    """Lists the tiles of each step's prompt slices (`plan`), then attends them in each layer (`run`)."""

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._num_kv_heads, self._group = num_kv_heads, num_heads // num_kv_heads
        self._head_dim, self._block_size, self._device = head_dim, block_size, device
        self._launch = _choose_launch(head_dim, dtype, device)
        self._tiles = torch.empty(0, _TILE_FIELDS, dtype=torch.int32)
        self._captured_tiles = self._tiles

    def plan(self, first_request: int, extend_lens: Sequence[int], seq_lens: Sequence[int] | np.ndarray) -> None:
        """Host values. first_request: row of the first slice in the block tables; seq_lens: keys of each slice's
        request, by which the tiles are ordered (an upper bound serves)."""
        tiles = self._list_tiles(first_request, extend_lens, seq_lens)
        self._tiles = torch.from_numpy(tiles).to(self._device, non_blocking=True)

    def plan_captured(
        self,
        first_request: int,
        extend_lens: Sequence[int],
        seq_lens: Sequence[int] | np.ndarray,
        num_tokens: int,
        max_slices: int,
    ) -> None:
        """`plan` into static memory, for a graph that was captured behind a call with the same `num_tokens` and
        `max_slices`: any slices of no more tokens in all. The request row behind the slices' must have no keys: surplus
        tiles are its."""
        capacity = -(-num_tokens * self._group // self._launch.rows) + max_slices
        tiles = np.zeros((capacity, _TILE_FIELDS), dtype=np.int32)
        tiles[:, 0] = first_request + max_slices
        listed = self._list_tiles(first_request, extend_lens, seq_lens)
        tiles[: len(listed)] = listed
        if len(self._captured_tiles) < capacity:  # the largest graph is captured first
            self._captured_tiles = torch.empty(capacity, _TILE_FIELDS, dtype=torch.int32, device=self._device)
        self._tiles = self._captured_tiles[:capacity]
        self._tiles.copy_(torch.from_numpy(tiles), non_blocking=True)

    def _list_tiles(
        self, first_request: int, extend_lens: Sequence[int], seq_lens: Sequence[int] | np.ndarray
    ) -> np.ndarray:
        """[num_tiles, _TILE_FIELDS] int32."""
        lens = np.asarray(extend_lens, dtype=np.int64)
        num_rows = self._launch.rows
        tiles_of = -(-lens * self._group // num_rows)
        slice_of = np.repeat(np.arange(len(lens)), tiles_of)
        first_row = (np.arange(len(slice_of)) - np.repeat(np.cumsum(tiles_of) - tiles_of, tiles_of)) * num_rows
        num_keys = (np.asarray(seq_lens, dtype=np.int64) - lens)[slice_of] + first_row // self._group
        tiles = np.stack((first_request + slice_of, first_row, (np.cumsum(lens) - lens)[slice_of], lens[slice_of]), 1)
        # By length in steps of 512 keys, so that the tiles of short slices stay together: what one of them reads, the
        # next finds in the L2 cache.
        longest_first = np.lexsort((-first_row, slice_of, -(num_keys // 512)))
        ordered: np.ndarray = tiles[longest_first].astype(np.int32)
        return ordered

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        scale: float,
        out: Tensor,
    ) -> None:
        """Attend as planned. q, out: [T, H, D], the slices' tokens; q's may be strided, out is contiguous.
        block_tables: [requests, ...], seq_lens: [requests] int32, of the whole batch."""
        assert q.stride()[1:] == (self._head_dim, 1)
        assert out.is_contiguous()
        launch = self._launch
        prefill_attention_kernel[(self._num_kv_heads, self._tiles.shape[0])](
            q,
            k_cache,
            v_cache,
            out,
            block_tables,
            seq_lens,
            self._tiles,
            scale * 1.4426950408889634,
            q.stride(0),
            block_tables.stride(0),
            NUM_KV_HEADS=self._num_kv_heads,
            GROUP=self._group,
            HEAD_DIM=self._head_dim,
            BLOCK_SIZE=self._block_size,
            ROWS=launch.rows,
            KEYS=launch.keys,
            TILE_FIELDS=_TILE_FIELDS,
            NUM_STAGES=launch.num_stages,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )
