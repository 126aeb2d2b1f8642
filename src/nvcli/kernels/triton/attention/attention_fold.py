"""The inner loop of paged attention. It reads tiles of keys and values through a block table and folds them into the
running maxima, sums of weights and weighted values of some rows (FlashAttention-2; Dao, 2023). The kernels for decode
rows, prefill chunks, shared segments and batch-invariant runs are built around it.

FP8 keys and values are multiplied in float16, which represents them exactly and takes one conversion instruction
(bfloat16 takes four), or in the query's float32. Their scales are applied to the scores and to the weights.

Keys may have a tail behind their first D numbers, of which values have as many. In latent attention these D numbers
are the value itself: it is read once, and multiplied in both products.

Shapes: ROWS rows of a tile, each a query head of a token; KEYS keys of a tile; D head_dim; KV KV heads; G query heads
for each KV head.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from nvcli.kernels.triton.attention.fp8_kv import numbers_of_words, scale_pointers
from nvcli.kernels.whole_numbers import next_power_of_2

LOG2_E = 1.4426950408889634
ITEM_FIELDS = tl.constexpr(8)
"""The int32 fields of a work list's entry; together they fill one 32-byte sector of memory."""


def hopper_keys(head_dim: int) -> int:
    """Return the keys of a tile of `hopper_prefill_kernel.py`: as many as shared memory has room for."""
    return 128 if head_dim <= 128 else 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKind:
    """The compile-time properties of an attention kernel, except its tile sizes. Kernels take it as one constant."""

    num_kv_heads: int
    group: int
    """Query heads for each KV head."""
    head_dim: int
    tail_dim: int
    """Numbers of queries and keys behind the first `head_dim`."""
    has_values: bool
    """Whether values lie apart, each at the beginning of a place as large as a key's; otherwise they are the first
    `head_dim` numbers of their keys."""
    block_size: int
    """Tokens of a block of the cache, [num_blocks, block_size, KV, D and the tail]; in FP8 each block is followed by
    its scales."""
    block_stride: int
    """Elements from one block to the next."""
    has_window: bool
    soft_cap: float
    """Soft cap × log2(e); 0: none."""
    has_sinks: bool
    """Whether each head has a sink, a score that belongs to no key."""
    bias_extent: int
    """The distances at which queries add numbers to scores (`DistanceBias`); 0: they add none."""
    is_both_ways: bool
    """Whether the rows of prefill tiles see keys after their own, too."""
    is_invariant: bool
    """Whether weights are summed by a matrix product, so that tiles of any size add them in the same order."""
    loads_ahead: bool
    """Whether the scales of FP8 keys are loaded one tile ahead."""
    on_gpu: bool
    """False in the interpreter, which cannot run inline assembly."""
    row_size: int
    """Elements from one token of a block to the next."""
    head_stride: int
    """Elements from the key of one head to that of the next."""
    shared_column: int
    """The place in a token's row of the last 64 numbers of all heads' keys; 0: each head has its own."""

    @property
    def padded_group(self) -> int:
        """The query heads for each KV head, padded to a power of 2."""
        return next_power_of_2(self.group)

    @property
    def hopper_keys(self) -> int:
        """Keys of a tile of `hopper_prefill_kernel.py`."""
        return hopper_keys(self.head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The tile sizes, warps and pipeline stages of a kernel; a compile-time constant, as `AttentionKind` is."""

    rows: int
    """Rows of the products."""
    keys: int
    """Keys of a tile."""
    masked_keys: int = 0
    """Keys of a masked tile, a divisor of `keys`; 0: the same number."""
    num_warps: int
    num_stages: int


@triton.jit
def store_item(item, fields, mask):
    """Write the first fields of entries of a work list, for all of `item` or one for each."""
    for number in tl.static_range(len(fields)):
        tl.store(item + number, fields[number], mask=mask)


@triton.jit
def soft_capped(scores, CAP: tl.constexpr):
    """Compute CAP × tanh(scores / CAP), with tanh(x) = 2 sigmoid(2 x) - 1."""
    return 2 * CAP * tl.sigmoid(scores * (2 / CAP)) - CAP


@triton.jit
def load_sinks(sinks, head, is_row):
    """Load the heads' sinks times log2(e), as the kernels' softmax takes powers of 2."""
    return tl.load(sinks + head, mask=is_row, other=0.0) * 1.4426950408889634


@triton.jit
def bias_rows(bias, token, head, KIND: tl.constexpr):
    """Return where the numbers begin that queries add to the scores of near keys: [ROWS] pointers; None: they add
    none."""
    rows = None
    if bias is not None:
        rows = bias + (token * (KIND.num_kv_heads * KIND.group) + head) * KIND.bias_extent
    return rows


@triton.jit
def load_query(q, k_cache, token, head, is_row, q_stride, scale_log2, KIND: tl.constexpr):
    """Load the first D numbers of the rows' queries, [ROWS, D] in the type of the products, and the factor of their
    scores: a number, or [ROWS] for FP8, where each query is divided by a power of 2 so that its elements are below 2.

    q: [tokens, H, D and the tail], tokens q_stride apart; token: int64, a number or [ROWS]; head: [ROWS].
    """
    HEAD_DIM: tl.constexpr = KIND.head_dim
    places = token * q_stride + head * (HEAD_DIM + KIND.tail_dim)
    query = tl.load(q + places[:, None] + tl.arange(0, HEAD_DIM)[None, :], mask=is_row[:, None], other=0.0)
    unit = scale_log2
    if k_cache.dtype.element_ty == tl.float8e4nv:
        OPERAND: tl.constexpr = tl.float32 if query.dtype.is_fp32() else tl.float16
        values = query.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(values), axis=1), 1e-30)
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        query = (values * (1.0 / power)[:, None]).to(OPERAND)
        unit = power * scale_log2
    else:
        query = query.to(k_cache.dtype.element_ty)
    return query, unit


@triton.jit
def load_query_tail(q, k_cache, token, head, is_row, q_stride, unit, scale_log2, KIND: tl.constexpr):
    """Load the tails of the rows' queries, [ROWS, tail]; the arguments are those of `load_query`, and what it
    returned."""
    places = token * q_stride + head * (KIND.head_dim + KIND.tail_dim) + KIND.head_dim
    tail = tl.load(q + places[:, None] + tl.arange(0, KIND.tail_dim)[None, :], mask=is_row[:, None], other=0.0)
    if k_cache.dtype.element_ty == tl.float8e4nv:
        OPERAND: tl.constexpr = tl.float32 if tail.dtype.is_fp32() else tl.float16
        tail = (tail.to(tl.float32) * (scale_log2 / unit)[:, None]).to(OPERAND)
    else:
        tail = tail.to(k_cache.dtype.element_ty)
    return tail


@triton.jit
def _load_scales(k_cache, v_cache, table, start, end, kv_head, KIND: tl.constexpr, KEYS: tl.constexpr):
    """Load the scales of keys [start, start + KEYS) and of their values: [KEYS] bfloat16 each, 0 from `end` on.

    They are loaded one tile ahead where Triton supports it: it pipelines only keys and values, and each tile would wait
    for a load in place. The block ids are loaded a second time for this, because Triton does not pipeline a loop that
    carries ids over two tiles (seen with 3.6).
    """
    keys = start + tl.arange(0, KEYS)
    if KIND.block_size % KEYS == 0:
        block = tl.load(table + tl.minimum(start, tl.maximum(end - 1, 0)) // KIND.block_size)
    else:
        block = tl.load(table + tl.minimum(keys, tl.maximum(end - 1, 0)) // KIND.block_size)
    block, offset = block.to(tl.int64), keys % KIND.block_size
    KEY_DIM: tl.constexpr = KIND.head_dim + KIND.tail_dim
    k_scales = scale_pointers(
        k_cache, block, offset, kv_head, KIND.num_kv_heads, KEY_DIM, KIND.block_size, KIND.block_stride
    )
    v_scales = scale_pointers(
        v_cache, block, offset, kv_head, KIND.num_kv_heads, KEY_DIM, KIND.block_size, KIND.block_stride
    )
    return tl.load(k_scales, mask=keys < end, other=0.0), tl.load(v_scales, mask=keys < end, other=0.0)


@triton.jit
def fold_keys(
    query,  # [ROWS, D]; this and `unit` as `load_query` gives them
    tail,  # [ROWS, tail], as `load_query_tail` gives it; None: there is none
    unit,
    highest,  # [ROWS] float32, scores in powers of 2
    weight_sum,  # [ROWS] float32; [ROWS, 16], equal columns, of an invariant kind
    acc,  # [ROWS, D] float32
    acc_unit,  # [ROWS] float32: of an FP8 cache, what `acc` is divided by
    k_cache,
    v_cache,
    table,  # the request's row of the block tables
    kv_head,
    begin,
    end,
    last_key,  # no block behind this key's is looked up; None: the last key before `end`
    first_read,  # keys before it are not read; None: all are
    firsts,  # [ROWS], the first key that each row sees; None: the first that is read
    lasts,  # [ROWS], the last one; None: the one before `end`
    KIND: tl.constexpr,
    KEYS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    MASKED: tl.constexpr,
    IN_WORDS: tl.constexpr,  # values in FP8 are read as words, and there is nothing in `acc` yet
    bias=None,  # `bias_rows`
    positions=None,  # [ROWS], those of the queries; only a bias needs them
):
    """Fold keys [begin, end) into the running softmax of the rows. Without masks they fill whole tiles, and every row
    sees all of them from its first one on; where blocks hold whole tiles, `begin` is then a multiple of KEYS.

    For an FP8 cache, `acc_unit` is the largest product of a weight and its value's scale, so that weights in float16
    are at most 1 however large the scales are.
    """
    IS_FP8: tl.constexpr = k_cache.dtype.element_ty == tl.float8e4nv
    ONE_BLOCK: tl.constexpr = KIND.block_size % KEYS == 0  # a tile of keys never straddles blocks
    HEAD_DIM: tl.constexpr = KIND.head_dim
    lanes = tl.arange(0, KEYS)
    dims = tl.arange(0, HEAD_DIM)
    if last_key is None:
        last_key = tl.maximum(end - 1, 0)
    # The next tile's block id is loaded ahead of its use: a dependent load inside the loop would take the pipeline's
    # stages, and keys and values would be left with one buffer.
    if ONE_BLOCK:
        next_block = tl.load(table + tl.minimum(begin, last_key) // KIND.block_size)
    else:
        next_block = tl.load(table + tl.minimum(begin + lanes, last_key) // KIND.block_size)
    if IS_FP8 and KIND.loads_ahead:
        next_key_scale, next_value_scale = _load_scales(k_cache, v_cache, table, begin, end, kv_head, KIND, KEYS)
    if IN_WORDS:
        # A word has four dimensions, whose sums stand apart: byte i of a word goes to sum i.
        ROWS: tl.constexpr = query.shape[0]
        NUM_WORDS: tl.constexpr = KIND.head_dim // 4
        words = tl.arange(0, NUM_WORDS)
        acc0 = tl.zeros([ROWS, NUM_WORDS], tl.float32)
        acc1 = acc0
        acc2 = acc0
        acc3 = acc0
    if KIND.is_invariant:
        ones = tl.full([KEYS, 16], 1.0, v_cache.dtype.element_ty)
    for start in tl.range(begin, end, KEYS, num_stages=NUM_STAGES):
        keys = start + lanes
        block = next_block.to(tl.int64)
        if ONE_BLOCK:
            next_block = tl.load(table + tl.minimum(start + KEYS, last_key) // KIND.block_size)
            offset = start % KIND.block_size + lanes
        else:
            next_block = tl.load(table + tl.minimum(keys + KEYS, last_key) // KIND.block_size)
            offset = keys % KIND.block_size
        if IS_FP8 and not KIND.loads_ahead:
            key_scale, value_scale = _load_scales(k_cache, v_cache, table, start, end, kv_head, KIND, KEYS)
        elif IS_FP8:
            key_scale, value_scale = next_key_scale, next_value_scale
            next_key_scale, next_value_scale = _load_scales(
                k_cache, v_cache, table, start + KEYS, end, kv_head, KIND, KEYS
            )
        row_offset = block * KIND.block_stride + (offset * KIND.num_kv_heads + kv_head) * (HEAD_DIM + KIND.tail_dim)
        cache_offset = row_offset[:, None] + dims[None, :]
        read_mask = None
        other: tl.constexpr = 0.0 if MASKED else None
        if MASKED:
            # What lies behind the last key or before the first may be anything: 0 × NaN would be NaN.
            is_read = keys < end
            if first_read is not None:
                is_read = is_read & (keys >= first_read)
            read_mask = is_read[:, None]
        key = tl.load(k_cache + cache_offset, mask=read_mask, other=other)
        if IS_FP8:
            key = key.to(query.dtype)
        scores = tl.dot(query, key.T, input_precision="ieee")
        if KIND.tail_dim:
            tail_offset = row_offset[:, None] + (HEAD_DIM + tl.arange(0, KIND.tail_dim))[None, :]
            key_tail = tl.load(k_cache + tail_offset, mask=read_mask, other=other)
            if IS_FP8:
                key_tail = key_tail.to(tail.dtype)
            scores = tl.dot(tail, key_tail.T, scores, input_precision="ieee")
        if IS_FP8:
            scores = scores * key_scale.to(tl.float32)[None, :]
        factor, row_factor = unit[:, None] if IS_FP8 else unit, unit
        if KIND.soft_cap > 0:
            scores = soft_capped(scores * factor, KIND.soft_cap)
            factor, row_factor = 1.0, 1.0
        if bias is not None:
            distance = positions[:, None] - keys[None, :]
            is_near = (distance >= 0) & (distance < KIND.bias_extent)
            near = tl.load(bias[:, None] + distance, mask=is_near, other=0.0).to(tl.float32)
            scores = scores * factor + near * 1.4426950408889634
            factor, row_factor = 1.0, 1.0
        if MASKED:
            is_seen = is_read[None, :] if lasts is None else keys[None, :] <= lasts[:, None]
            if firsts is not None:
                is_seen = is_seen & (keys[None, :] >= firsts[:, None])
            scores = tl.where(is_seen, scores, -float("inf"))
        elif firsts is not None:
            scores = tl.where(keys[None, :] >= firsts[:, None], scores, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1) * row_factor)
        reference = new_highest
        if firsts is not None or (MASKED and KIND.is_invariant):
            # A row may have seen nothing yet: -inf minus -inf would be NaN.
            reference = tl.where(new_highest == -float("inf"), 0.0, new_highest)
        decay = tl.exp2(highest - reference)
        if KIND.is_invariant:
            weights = tl.exp2(tl.fma(scores, factor, -reference[:, None])).to(v_cache.dtype.element_ty)
            weight_sum = tl.dot(weights, ones, weight_sum * decay[:, None], input_precision="ieee")
        else:
            weights = tl.exp2(scores * factor - reference[:, None])
            weight_sum = weight_sum * decay + tl.sum(weights, 1)
        highest = new_highest
        if IS_FP8:
            weights = weights * value_scale.to(tl.float32)[None, :]
            old_unit = acc_unit * decay
            acc_unit = tl.maximum(tl.maximum(old_unit, tl.max(weights, 1)), 1e-30)
            inverse = 1.0 / acc_unit
            decay = old_unit * inverse
            weights = weights * inverse[:, None]
        if IN_WORDS:
            weights = weights.to(query.dtype)
            word_offset = (row_offset // 4)[:, None] + words[None, :]
            value = tl.load(v_cache.to(tl.pointer_type(tl.int32)) + word_offset, mask=read_mask, other=0)
            value0, value1, value2, value3 = numbers_of_words(value, query.dtype, KIND.on_gpu)
            acc0 = tl.dot(weights, value0, acc0 * decay[:, None], input_precision="ieee")
            acc1 = tl.dot(weights, value1, acc1 * decay[:, None], input_precision="ieee")
            acc2 = tl.dot(weights, value2, acc2 * decay[:, None], input_precision="ieee")
            acc3 = tl.dot(weights, value3, acc3 * decay[:, None], input_precision="ieee")
        else:
            acc = acc * decay[:, None]
            value = key
            if KIND.has_values:
                value = tl.load(v_cache + cache_offset, mask=read_mask, other=other)
                if IS_FP8:
                    value = value.to(query.dtype)
            acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
    if IN_WORDS:
        acc = tl.join(tl.join(acc0, acc2), tl.join(acc1, acc3)).reshape(ROWS, HEAD_DIM)
    return highest, weight_sum, acc, acc_unit


@triton.jit
def weighted_mean(acc, weight_sum, acc_unit, IS_FP8: tl.constexpr):
    """Return the rows' results: zeros for rows that attend to nothing."""
    if IS_FP8:
        acc = acc * acc_unit[:, None]
    return acc / tl.where(weight_sum > 0, weight_sum, 1.0)[:, None]
