"""Paged prefill attention in Triton: causal attention of prefill chunks, each behind whatever of it is cached already.

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

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.triton.decode_attention import float16_query, log2_scores, soft_capped
from nvcli.kernels.triton.fp8_kv import load_scales
from nvcli.kernels.triton.prefill_tiles import TILE_FIELDS, TileKey, TileList, TilePart

_LOG2_E = 1.4426950408889634
_PROGRAMS_FOR_THE_REST = 264
"""Programs that share out the tiles that another kernel has left: two for each multiprocessor of an H200."""


@triton.jit
def _attend(
    query,
    highest,
    weight_sum,
    acc,
    acc_unit,
    k_cache,
    v_cache,
    table,
    kv_head,
    begin,
    end,
    last_key,
    positions,
    window,
    scale_log2,  # a number, or [ROWS] for an FP8 cache
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    KEYS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Fold keys [begin, end) into the running softmax. Without masks they are a whole number of tiles, and where blocks
    hold whole tiles, `begin` is a multiple of KEYS.

    Of an FP8 cache, the sums of values stand in `acc` divided by `acc_unit` [ROWS], the largest product of a weight and
    its value's scale: so weights in float16 are numbers up to 1, of whatever size the scales are.
    """
    IS_FP8: tl.constexpr = k_cache.dtype.element_ty == tl.float8e4nv
    ONE_BLOCK: tl.constexpr = BLOCK_SIZE % KEYS == 0  # a tile of keys never straddles blocks
    lanes = tl.arange(0, KEYS)
    dims = tl.arange(0, HEAD_DIM)
    # The next tile's block id is loaded ahead: see decode_attention.
    if ONE_BLOCK:
        next_block = tl.load(table + tl.minimum(begin, last_key) // BLOCK_SIZE)
    else:
        next_block = tl.load(table + tl.minimum(begin + lanes, last_key) // BLOCK_SIZE)
    if IS_FP8:
        next_key_scale, next_value_scale = load_scales(
            k_cache, v_cache, table, begin, end, kv_head, KEYS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE
        )
    for start in tl.range(begin, end, KEYS, num_stages=NUM_STAGES):
        keys = start + lanes
        block = next_block.to(tl.int64)
        if ONE_BLOCK:
            next_block = tl.load(table + tl.minimum(start + KEYS, last_key) // BLOCK_SIZE)
            offset = start % BLOCK_SIZE + lanes
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
        if MASKED:
            # Behind the chunk's end lies what an earlier owner of the block left: 0 × NaN would be NaN.
            key = tl.load(k_cache + cache_offset, mask=(keys < end)[:, None], other=0.0)
        else:
            key = tl.load(k_cache + cache_offset)
        if IS_FP8:
            key = key.to(query.dtype)
        scores = tl.dot(query, key.T, input_precision="ieee")
        if IS_FP8:
            scores = scores * key_scale.to(tl.float32)[None, :]
        unit, row_unit = scale_log2[:, None] if IS_FP8 else scale_log2, scale_log2
        if SOFT_CAP > 0:
            scores = soft_capped(scores * unit, SOFT_CAP)
            unit, row_unit = 1.0, 1.0
        if MASKED:
            is_seen = keys[None, :] <= positions[:, None]
            if HAS_WINDOW:
                is_seen = is_seen & (keys[None, :] > positions[:, None] - window)
            scores = tl.where(is_seen, scores, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1) * row_unit)
        # A row whose window begins behind this tile has seen nothing yet: -inf minus -inf would be NaN.
        reference = new_highest
        if MASKED and HAS_WINDOW:
            reference = tl.where(new_highest == -float("inf"), 0.0, new_highest)
        decay = tl.exp2(highest - reference)
        weights = tl.exp2(scores * unit - reference[:, None])
        weight_sum = weight_sum * decay + tl.sum(weights, 1)
        if IS_FP8:
            weights = weights * value_scale.to(tl.float32)[None, :]
            old_unit = acc_unit * decay
            acc_unit = tl.maximum(tl.maximum(old_unit, tl.max(weights, 1)), 1e-30)
            inverse = 1.0 / acc_unit
            decay = old_unit * inverse
            weights = weights * inverse[:, None]
        acc = acc * decay[:, None]
        if MASKED:
            value = tl.load(v_cache + cache_offset, mask=(keys < end)[:, None], other=0.0)
        else:
            value = tl.load(v_cache + cache_offset)
        if IS_FP8:
            value = value.to(query.dtype)
        acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
        highest = new_highest
    return highest, weight_sum, acc, acc_unit


@triton.jit
def _read_tile(tiles, index, TILE_FIELDS: tl.constexpr):
    """Return the slot, the first row, the chunk's first token and its number of tokens, and the request's keys."""
    tile = tiles + index * TILE_FIELDS
    return tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)


@triton.jit
def _attend_tile(
    slot,
    first_row,
    first_token,
    num_tokens,
    num_keys,
    first_key,  # the first key to attend to, with IS_REST
    kv_head,
    q,  # [T, H, D], tokens q_stride apart
    k_cache,  # [num_blocks, BLOCK_SIZE, KV, D]; in FP8 each block's scales stand behind it
    v_cache,
    out,  # [T, H, D], contiguous
    block_tables,  # [slots, ...] int32, rows block_table_stride apart
    sinks,  # [H] float32, scores that belong to no key, with HAS_SINKS
    log_sums,  # [T, H] float32, log-sum-exp over prefixes, base 2; written with IS_PREFIX, read with IS_REST
    window,  # keys that a row sees at most, where HAS_WINDOW
    scale_log2,  # scale × log2(e); positive
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
    IS_PREFIX: tl.constexpr,  # every row sees all keys
    IS_REST: tl.constexpr,  # `out` holds the result over the keys before those of the tile, with the sinks
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,  # of a tile without masks
    MASKED_KEYS: tl.constexpr,  # of a tile with masks; divides KEYS
    NUM_STAGES: tl.constexpr,
    MASKED_STAGES: tl.constexpr,
):
    """Attend the rows of one tile in the query heads of one KV head."""
    prefix = num_keys - num_tokens  # below 0 for tokens that attend to nothing

    rows = first_row + tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM)
    token = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    in_chunk = token < num_tokens
    flat_token = (first_token + token).to(tl.int64)
    query = tl.load(
        q + (flat_token * q_stride + head * HEAD_DIM)[:, None] + dims[None, :], mask=in_chunk[:, None], other=0.0
    )
    # Keys and values in FP8 are multiplied in float16: see decode_attention.
    IS_FP8: tl.constexpr = k_cache.dtype.element_ty == tl.float8e4nv
    if IS_FP8:
        query, query_scale = float16_query(query)
        scale_log2 = scale_log2 * query_scale
    else:
        query = query.to(k_cache.dtype.element_ty)

    last_token = tl.minimum((first_row + ROWS - 1) // GROUP, num_tokens - 1)
    # Keys up to here are before the diagonal of every row, and up to there of any row.
    if IS_PREFIX:
        position = tl.full([ROWS], 0, tl.int32) + (num_keys - 1)
        seen_by_all = num_keys
        seen_by_any = num_keys
    else:
        position = prefix + token
        seen_by_all = tl.maximum(prefix + first_row // GROUP + 1, 0)
        seen_by_any = prefix + last_token + 1
    last_key = tl.maximum(num_keys - 1, 0)
    table = block_tables + slot.to(tl.int64) * block_table_stride
    highest = tl.full([ROWS], -float("inf"), tl.float32)
    weight_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    acc_unit = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        highest = log2_scores(tl.load(sinks + head))
        weight_sum += 1.0
    if IS_REST:
        place = flat_token * (NUM_KV_HEADS * GROUP) + head
        highest = tl.load(log_sums + place, mask=in_chunk, other=0.0)
        weight_sum += 1.0
        before = tl.load(out + place[:, None] * HEAD_DIM + dims[None, :], mask=in_chunk[:, None], other=0.0)
        acc = before.to(tl.float32)
        if IS_FP8:
            acc_unit = tl.max(tl.abs(acc), 1) / 448.0  # as if the largest code had stood there with all of the weight
            acc = acc / tl.maximum(acc_unit, 1e-30)[:, None]
    if HAS_WINDOW:
        # Where blocks hold whole tiles the first tile is rounded down within its block; else it begins where the first
        # row's window does, for what is before may lie in a block that was given back.
        MASKED_ALIGN: tl.constexpr = MASKED_KEYS if BLOCK_SIZE % MASKED_KEYS == 0 else 1
        ALIGN: tl.constexpr = KEYS if BLOCK_SIZE % KEYS == 0 else MASKED_ALIGN
        begin = tl.maximum(prefix + first_row // GROUP - window + 1, 0) // ALIGN * ALIGN
        last_begin = tl.maximum(prefix + last_token - window + 1, 0)
        middle = begin + tl.cdiv(last_begin - begin, KEYS) * KEYS  # every row's window has begun
        diagonal = tl.maximum(begin + tl.maximum(seen_by_all - begin, 0) // KEYS * KEYS, middle)
        highest, weight_sum, acc, acc_unit = _attend(
            query, highest, weight_sum, acc, acc_unit, k_cache, v_cache, table, kv_head, begin,
            tl.minimum(middle, seen_by_any), last_key, position, window, scale_log2, True, True, SOFT_CAP,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, MASKED_KEYS, MASKED_STAGES,
        )  # fmt: skip
    elif IS_REST:
        middle = first_key
        diagonal = middle + (seen_by_all - middle) // KEYS * KEYS
    else:
        middle = 0
        diagonal = seen_by_all // KEYS * KEYS
    highest, weight_sum, acc, acc_unit = _attend(
        query, highest, weight_sum, acc, acc_unit, k_cache, v_cache, table, kv_head, middle, diagonal,
        last_key, position, window, scale_log2, False, HAS_WINDOW, SOFT_CAP,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, KEYS, NUM_STAGES,
    )  # fmt: skip
    highest, weight_sum, acc, acc_unit = _attend(
        query, highest, weight_sum, acc, acc_unit, k_cache, v_cache, table, kv_head, diagonal, seen_by_any,
        last_key, position, window, scale_log2, True, HAS_WINDOW, SOFT_CAP,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, MASKED_KEYS, MASKED_STAGES,
    )  # fmt: skip
    if IS_FP8:
        acc = acc * acc_unit[:, None]
    # Tokens that attend to nothing get zeros.
    acc = acc / tl.where(weight_sum > 0, weight_sum, 1.0)[:, None]
    out_offset = (flat_token * (NUM_KV_HEADS * GROUP) + head)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out + out_offset, acc.to(out.dtype.element_ty), mask=in_chunk[:, None])
    if IS_PREFIX:
        tl.store(log_sums + flat_token * (NUM_KV_HEADS * GROUP) + head, highest + tl.log2(weight_sum), mask=in_chunk)


@triton.jit(
    do_not_specialize=["block_table_stride", "window"],
    do_not_specialize_on_alignment=["block_tables"],
)
def prefill_attention_kernel(
    q,  # the arguments that are not explained here are those of `_attend_tile`
    k_cache,
    v_cache,
    out,
    block_tables,
    tiles,  # [capacity, TILE_FIELDS] int32
    num_tiles,  # [1] int32
    num_before,  # [1] int32, tiles at the head of the list that another kernel attends; None: there are none
    sinks,
    log_sums,
    window,
    scale_log2,
    q_stride,
    block_table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_PREFIX: tl.constexpr,
    IS_REST: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED_KEYS: tl.constexpr,
    TILE_FIELDS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    MASKED_STAGES: tl.constexpr,
):
    """A program has one tile and KV head. Where another kernel attends most of the list, a few programs share out what
    is left, as a program for each tile would take longer to see that nothing is."""
    program = tl.program_id(0)
    if num_before is None:
        item = program
        slot, first_row, first_token, num_tokens, num_keys = _read_tile(tiles, item // NUM_KV_HEADS, TILE_FIELDS)
        if item // NUM_KV_HEADS >= tl.load(num_tiles):
            return
        first_key = 0
        if IS_REST:
            first_key = tl.load(tiles + item // NUM_KV_HEADS * TILE_FIELDS + 5)
        _attend_tile(
            slot, first_row, first_token, num_tokens, num_keys, first_key, item % NUM_KV_HEADS, q, k_cache, v_cache,
            out, block_tables, sinks, log_sums, window, scale_log2, q_stride, block_table_stride, NUM_KV_HEADS, GROUP,
            HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, HAS_WINDOW, SOFT_CAP, HAS_SINKS, IS_PREFIX, IS_REST, ROWS, KEYS,
            MASKED_KEYS, NUM_STAGES, MASKED_STAGES,
        )  # fmt: skip
    else:
        end = tl.load(num_tiles) * NUM_KV_HEADS
        for item in range(tl.load(num_before) * NUM_KV_HEADS + program, end, tl.num_programs(0)):
            slot, first_row, first_token, num_tokens, num_keys = _read_tile(tiles, item // NUM_KV_HEADS, TILE_FIELDS)
            _attend_tile(
                slot, first_row, first_token, num_tokens, num_keys, 0, item % NUM_KV_HEADS, q, k_cache, v_cache, out,
                block_tables, sinks, log_sums, window, scale_log2, q_stride, block_table_stride, NUM_KV_HEADS, GROUP,
                HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, HAS_WINDOW, SOFT_CAP, HAS_SINKS, False, False, ROWS, KEYS,
                MASKED_KEYS, NUM_STAGES, MASKED_STAGES,
            )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """Tile sizes and how a program works; the kernel's arguments of these names say more."""

    rows: int
    keys: int
    masked_keys: int
    num_warps: int
    num_stages: int
    masked_stages: int


def _choose_launch(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device) -> _Launch:
    """Choose by head size and type what measurements on an H200 speak for. GPUs with less shared memory get smaller
    tiles or fewer stages, which fit in 99 KiB.

    Masked tiles of 32 keys against 64 at head size 128, 32 query heads and 8 KV heads, in microseconds a layer: 137
    against 143 for 20 prompts of 400 tokens, 107 against 114 for 40 of 200, 177 against 183 for 16 of 562, 631 against
    629 for two of 4,096, and 3,797 against 3,927 for 8,192 tokens that end at 16,384. Tiles of 32 keys throughout, with
    fewer registers, took 114, 85, 159, 676 and 4,204: they lose where prompts are long.

    Tiles of FP8 keys are turned into float16 by every program that reads them, and stand in registers meanwhile: so
    they serve 128 rows where they can, and are smaller where the compiler would spill more. When they were still
    turned into bfloat16, which takes four instructions a number, 8,192 tokens that end at 16,384 took 7,790 with tiles
    of 64 rows and 6,808 with 128 and 8 warps (bfloat16: 4,211). Float16 has not run on a GPU, and no FP8 launch
    for other head sizes has been timed.
    """
    if dtype.itemsize > 2:  # float32 runs without tensor cores: for tests
        keys = 32 if head_dim <= 128 else 16
        return _Launch(rows=32, keys=keys, masked_keys=16, num_warps=4, num_stages=2, masked_stages=2)
    capability = torch.cuda.get_device_capability(device)
    # KiB for each program: 227 on data-centre Hopper and Blackwell, 163 on the A100, 99 on the rest.
    shared_memory = 227 if capability[0] in (9, 10) else 163 if capability == (8, 0) else 99
    is_fp8 = kv_dtype == torch.float8_e4m3fn
    if is_fp8 and head_dim > 256:
        return _Launch(rows=32, keys=32, masked_keys=32, num_warps=8, num_stages=2, masked_stages=2)
    if is_fp8 and head_dim > 128:
        keys = 64 if shared_memory >= 112 else 32
        return _Launch(rows=64, keys=keys, masked_keys=32, num_warps=8, num_stages=2, masked_stages=2)
    if head_dim > 256:
        rows, keys = (64, 32) if shared_memory >= 192 else (32, 16)
        return _Launch(rows=rows, keys=keys, masked_keys=keys, num_warps=8, num_stages=2, masked_stages=2)
    if head_dim > 128:
        if shared_memory >= 192:
            return _Launch(rows=128, keys=64, masked_keys=64, num_warps=8, num_stages=2, masked_stages=2)
        return _Launch(rows=64, keys=32, masked_keys=32, num_warps=4, num_stages=2, masked_stages=2)
    stages = 3 if head_dim <= 64 or shared_memory >= 112 else 2
    if is_fp8:
        return _Launch(rows=128, keys=64, masked_keys=32, num_warps=8, num_stages=stages, masked_stages=stages)
    if head_dim <= 64:
        return _Launch(rows=128, keys=64, masked_keys=64, num_warps=4, num_stages=stages, masked_stages=stages)
    return _Launch(rows=64, keys=64, masked_keys=32, num_warps=4, num_stages=stages, masked_stages=stages)


def _choose_rest_launch(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device) -> _Launch:
    """Choose for chunks behind prefixes: what each tile takes to begin and to end counts for more than its products.

    On an H200 a layer of 32 query heads and 8 KV heads of 128 in bfloat16 takes, for the rests of 1,024 chunks of 8
    tokens, 120 us with tiles of 64 rows and 32 keys, 110 with 32 rows and 2 warps, 163 with the usual launch, and 358
    with the kernel for Hopper; for those of 512 chunks of 32 tokens 166, 218, 214 and 225.
    """
    if dtype.itemsize > 2 or kv_dtype != dtype or head_dim > 128:
        return _choose_launch(head_dim, dtype, kv_dtype, device)
    return _Launch(rows=64, keys=32, masked_keys=32, num_warps=4, num_stages=3, masked_stages=3)


class PrefillAttention:
    """Prefill attention of one geometry, for any window. Plan `tiles` each step, then call `run` in each layer.

    Neither waits for the device or allocates anything, so both may be captured in a CUDA graph. Geometries of equal
    `tile_key` may share their tiles.
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
        is_for_rests: bool = False,
    ) -> None:
        """`is_for_rests`: for short chunks and few keys, as they are behind prefixes."""
        self._num_kv_heads, self._group = num_kv_heads, num_heads // num_kv_heads
        self._head_dim, self._block_size = head_dim, block_size
        choose = _choose_rest_launch if is_for_rests else _choose_launch
        self._launch = choose(head_dim, dtype, kv_dtype, device)

    @property
    def tile_key(self) -> TileKey:
        """What its tiles are."""
        return TileKey(self._group, self._launch.rows)

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        tiles: TileList,
        out: Tensor,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        log_sums: Tensor | None = None,
    ) -> None:
        """Attend the tiles. q, out: [T, H, D], the chunks' tokens; q's may be strided, out is contiguous.
        block_tables: [slots, ...] int32, of the layer's KV group; sinks: [H] float32. log_sums: [at least T, H]
        float32, written by tiles of prefixes, beside their results in `out`, and read by those of rests; neither has
        windows."""
        assert (log_sums is not None) == (tiles.part in (TilePart.PREFIX, TilePart.REST))
        assert q.stride()[1:] == (self._head_dim, 1)
        assert out.is_contiguous()
        assert k_cache.stride() == v_cache.stride()
        assert k_cache.stride()[1:] == (self._num_kv_heads * self._head_dim, self._head_dim, 1)
        launch = self._launch
        num_programs = self._num_kv_heads * tiles.capacity
        if tiles.num_before is not None:
            num_programs = min(num_programs, _PROGRAMS_FOR_THE_REST)
        prefill_attention_kernel[(num_programs,)](
            q,
            k_cache,
            v_cache,
            out,
            block_tables,
            tiles.tiles,
            tiles.num_tiles,
            tiles.num_before,
            out if sinks is None else sinks,
            log_sums,
            window or 0,
            scale * _LOG2_E,
            q.stride(0),
            block_tables.stride(0),
            NUM_KV_HEADS=self._num_kv_heads,
            GROUP=self._group,
            HEAD_DIM=self._head_dim,
            BLOCK_SIZE=self._block_size,
            BLOCK_STRIDE=k_cache.stride(0),
            HAS_WINDOW=window is not None,
            SOFT_CAP=0.0 if soft_cap is None else soft_cap * _LOG2_E,
            HAS_SINKS=sinks is not None and tiles.part is not TilePart.REST,
            IS_PREFIX=tiles.part is TilePart.PREFIX,
            IS_REST=tiles.part is TilePart.REST,
            ROWS=launch.rows,
            KEYS=launch.keys,
            MASKED_KEYS=launch.masked_keys,
            TILE_FIELDS=TILE_FIELDS,
            NUM_STAGES=launch.num_stages,
            MASKED_STAGES=launch.masked_stages,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )
