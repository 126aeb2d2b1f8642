"""Paged decode attention over keys and values in FP8 that go from memory straight to the registers that a product
takes, in Gluon, the layer of Triton that says which thread has what.

A program is one warp. In `decode_kernel.py` keys and values pass through shared memory, and what brings them from
there to a product's operands takes more instructions than the products. Here each thread loads pieces of 16 bytes, and
the products are arranged so that these are just what it has to hand to the tensor cores. Thread 4 g + c loads

- of keys, the c-th quarter of each key in the g-th eighth of a tile. Keys are the left operand of the first product,
  whose sum over dimensions may take them in any order, in which the query is loaded as well;
- of values, piece g of the c-th quarter of a tile. Values are the left operand of the second product, and four sums
  stand for the four bytes of a word. Weights are its right operand, to which the tensor cores' own transposition of
  8 × 8 numbers brings them.

So there is neither shared memory nor a barrier in the loop, and the next tile's loads are on their way while this one
is multiplied. Registers decide how many warps a multiprocessor holds, and so how many bytes are on their way: up to 168
for each thread 12 warps, up to 128 it holds 16.

A weight is 2 to the power of its score's distance from the query's reference. In `decode_kernel.py` that is the
highest score so far, found anew in each tile. Here it is raised only when a weight times the scale of its value exceeds
256, which seldom happens behind the first tile: float16 is as exact there, and the other tiles need no maximum over
threads and leave the sums as they are.

Two KV heads a program, whose keys lie side by side in memory, did not pay: 130 µs instead of 125 for 256 rows of 100 to
1,620 keys on an H200, as their chunks are half as long, and 446 instead of 457 for 1,024.

It does not share the fold of `attention_fold.py`, through which 256 rows of about 860 keys took 147 µs on an H200, and
126 so. The work list and the other arguments are those of `decode_kernel.py`; tests on a GPU hold it to the reference.
It serves head sizes 64 and 128, up to 8 queries of a row for each KV head, or 16 with more registers, and work lists
whose chunks begin at multiples of a tile that does not straddle blocks.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from nvcli.kernels.triton.attention.attention_fold import ITEM_FIELDS
from nvcli.kernels.triton.attention.gluon_fp8 import numbers_of_bytes
from nvcli.kernels.triton.launch.triton_version import barrier

_STAGED = gl.constexpr(2048)
"""The most numbers of partial results that are loaded at a time, 64 in each thread: with 128 they would decide how many
registers the kernel has."""

_CLUSTER = gl.constexpr(8)
"""Chunks of a long row that are reduced together, before what they come to is."""
_MOST_CHUNKS = gl.constexpr(24)
"""The most chunks of a row that are all reduced together: the sum of a cluster takes a round trip to memory more."""


@gluon.constexpr_function
def _powers(first, count):
    return [first << i for i in range(count)]


@gluon.constexpr_function
def _key_layout():
    """[8, 16 words]: thread 4 g + c has piece c of key g."""
    return gl.DistributedLinearLayout([[0, 1], [0, 2]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [], [], [8, 16])


@gluon.constexpr_function
def _value_layout(num_words):
    """[4, words]: thread 4 g + c has piece g of key c."""
    piece = num_words // 8
    words = [[0, word] for word in _powers(1, piece.bit_length() - 1)]
    lanes = [[1, 0], [2, 0], [0, piece], [0, 2 * piece], [0, 4 * piece]]
    return gl.DistributedLinearLayout(words, lanes, [], [], [4, num_words])


@gluon.constexpr_function
def _value_pairs(tile, num_words):
    """[4, words, tile / 4]: the same for some keys, with the words of two keys tile / 8 apart in neighbouring
    registers, where the product takes them."""
    piece = num_words // 8
    words = [[0, word, 0] for word in _powers(1, piece.bit_length() - 1)]
    keys = [[0, 0, key] for key in _powers(1, (tile // 8).bit_length() - 1)]
    lanes = [[1, 0, 0], [2, 0, 0], [0, piece, 0], [0, 2 * piece, 0], [0, 4 * piece, 0]]
    return gl.DistributedLinearLayout([[0, 0, tile // 8], *words, *keys], lanes, [], [], [4, num_words, tile // 4])


@gluon.constexpr_function
def _reduction_layout(head_dim):
    """[chunks, queries, head_dim]: a thread has 4 dimensions of all chunks and queries, or of every other query."""
    return gl.BlockedLayout([1, 1, 4], [1, 128 // head_dim, head_dim // 4], [1, 1, 1], [2, 1, 0])


@gluon.jit
def _log2(x):
    """Compute log2 by the GPU's own instruction, right to 2^-22."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _transposed(x):
    """[rows, queries] float16, as a product leaves it → the same with each 8 × 8 numbers transposed."""
    return gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x], dtype=gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def _soft_capped(scores, SOFT_CAP: gl.constexpr):
    """SOFT_CAP × tanh(scores / SOFT_CAP), for scores times log2(e)."""
    powers = gl.exp2(scores * (2.0 * 1.4426950408889634 / SOFT_CAP))
    return SOFT_CAP - 2.0 * SOFT_CAP / (powers + 1.0)


@gluon.jit
def _load_each(pointers, COUNT: gl.constexpr, STEP: gl.constexpr):
    """Load what is at each pointer and COUNT - 1 times STEP behind it: → the pointers' shape, and a dimension of 2 for
    each bit of COUNT. One address serves for all, so that it takes two registers."""
    if COUNT == 1:
        x = gl.load(pointers)
    else:
        x = gl.join(_load_each(pointers, COUNT // 2, STEP * 2), _load_each(pointers + STEP, COUNT // 2, STEP * 2))
    return x


@gluon.jit
def _load_keys(cache, block, place, HEAD_DIM, ROW: gl.constexpr, STRIDE: gl.constexpr, KEYS: gl.constexpr):
    """→ [8, 16, KEYS, HEAD_DIM / 64] int32: words of KEYS neighbouring keys in each eighth of a tile. A thread's second
    piece of a key is the neighbour of its first one, so that a key is brought from the L2 cache at once."""
    pointers = (cache.cast(gl.pointer_type(gl.int32)) + block.to(gl.int64) * STRIDE)[:, None] + place
    x = _load_each(pointers, KEYS, ROW)
    if HEAD_DIM == 128:
        x = gl.join(x, _load_each(pointers + 4, KEYS, ROW))
    return x.reshape([8, 16, KEYS, HEAD_DIM // 64])


@gluon.jit
def _load_values(cache, block, place, ROW: gl.constexpr, STRIDE: gl.constexpr, KEYS: gl.constexpr):
    """→ [4, words of a head, KEYS] int32, KEYS neighbouring keys in each quarter of a tile."""
    pointers = (cache.cast(gl.pointer_type(gl.int32)) + block.to(gl.int64) * STRIDE)[:, None] + place
    return _load_each(pointers, KEYS, ROW).reshape([4, place.shape[1], KEYS])


@gluon.jit
def _load_scales(cache, block, place, STRIDE: gl.constexpr, KEYS: gl.constexpr):
    """→ [8], numbers of which each has the bfloat16 scales of 2 or 4 neighbouring keys, so that they are one load."""
    pointers = cache.cast(gl.pointer_type(gl.int32)) + block.to(gl.int64) * STRIDE + place
    return gl.load(pointers.to(gl.pointer_type(gl.int32 if KEYS == 2 else gl.int64), bitcast=True))


@gluon.jit
def _scales_in_rows(numbers, layout: gl.constexpr):
    """[8], numbers of 2 or 4 bfloat16 → [TILE] float32 in the order of the products' rows, in which keys are (which of
    an eighth's keys, eighth)."""
    if numbers.dtype == gl.int64:
        words = gl.join(numbers.to(gl.int32), (numbers >> 32).to(gl.int32))
    else:
        words = numbers[:, None]
    scales = gl.join(words << 16, words & -65536).to(gl.float32, bitcast=True)
    return gl.convert_layout(scales.permute([1, 2, 0]).reshape([scales.shape[1] * 16]), layout)


@gluon.jit
def _left_operand(values, TILE: gl.constexpr, layout: gl.constexpr):
    """[4, words, TILE / 4] → [words, TILE], keys in the order of the products' rows, and words in an order of (place in
    a piece, piece)."""
    NUM_WORDS: gl.constexpr = values.shape[1]
    values = values.reshape([4, 8, NUM_WORDS // 8, 2, TILE // 8]).permute([2, 1, 4, 0, 3])
    return gl.convert_layout(values.reshape([NUM_WORDS, TILE]), layout)


@gluon.jit(do_not_specialize=["window", "block_table_stride"], do_not_specialize_on_alignment=["block_tables"])
def fp8_decode_attention_kernel(
    q,  # the arguments are those of decode_attention_kernel; a tile has 8 or 16 queries, all of a row, and 16 or 32
    # keys
    k_cache,
    v_cache,
    block_tables,
    sinks,
    out,
    items,
    num_items,
    starts,
    log_sums,
    partial_out,
    partial_lse,
    arrivals,
    window,
    scale_log2,
    q_stride,
    block_table_stride,
    KIND: gl.constexpr,
    TILE: gl.constexpr,
):
    """Program (KV head, entry of the work list)."""
    HEAD_DIM: gl.constexpr = KIND.head_dim
    KEYS: gl.constexpr = TILE.keys
    QUERIES: gl.constexpr = TILE.rows
    kv_head = gl.program_id(0)
    index = gl.program_id(1)
    if index >= gl.load(num_items):
        return
    item = items + index * ITEM_FIELDS
    row = gl.load(item)
    begin = gl.load(item + 1)
    end = gl.load(item + 2)
    num_chunks = gl.load(item + 3)
    # Keys up to the first end and from the last beginning on are those that all of the row's tokens see.
    first_seen = 0
    first_end = end
    last_begin = 0
    first_token = row
    num_queries = KIND.group
    if starts is not None:
        first_token = gl.load(starts + row)
        num_tokens = gl.load(starts + row + 1) - first_token
        num_queries = num_tokens * KIND.group
        first_end = gl.load(item + 7) - num_tokens + 1
        if KIND.has_window:
            first_seen = gl.maximum(first_end - window, 0)
            last_begin = first_end + num_tokens - 1 - window
    elif KIND.has_window:
        first_seen = gl.load(item + 7)
        last_begin = first_seen
    if KIND.has_window:
        begin = gl.maximum(begin, first_seen // KEYS * KEYS)  # no tile is without a key that is seen
    last_key = gl.maximum(end - 1, 0)
    table = block_tables + gl.load(item + 6).to(gl.int64) * block_table_stride

    NUM_WORDS: gl.constexpr = HEAD_DIM // 4
    ROW: gl.constexpr = KIND.num_kv_heads * NUM_WORDS  # words of a token in a block
    STRIDE: gl.constexpr = KIND.block_stride // 4
    PER_ROW: gl.constexpr = KEYS // 8  # keys of which a thread has pieces
    product: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, product, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, product, 2)
    by_key: gl.constexpr = gl.SliceLayout(1, product)
    by_query: gl.constexpr = gl.SliceLayout(0, product)
    in_memory: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 1], [1, 0])
    memory_rows: gl.constexpr = gl.SliceLayout(1, in_memory)
    memory_columns: gl.constexpr = gl.SliceLayout(0, in_memory)
    key_layout: gl.constexpr = _key_layout()
    value_layout: gl.constexpr = _value_layout(NUM_WORDS)
    value_pairs: gl.constexpr = _value_pairs(KEYS, NUM_WORDS)

    # Queries as numbers below 2 and powers of 2, as `float16_query` makes them. Dimension d is in column
    # (d4, d3 d2, d1, d6 d5, d0) of bits of d; with heads of 64 in column (d3 d2, d1, d5 d4, d0).
    heads = gl.arange(0, QUERIES, memory_rows)
    column = gl.arange(0, HEAD_DIM, memory_columns)
    QUARTER: gl.constexpr = HEAD_DIM // 4
    dims = (column & 1) | (column >> 3 & 1) << 1 | (column >> 4 & 3) << 2 | column >> 6 << 4
    dims += (column >> 1 & 3) * QUARTER
    if starts is None:
        places = (kv_head * KIND.group + heads)[:, None] * HEAD_DIM + dims[None, :]
    else:
        places = (heads // KIND.group * q_stride + (kv_head * KIND.group + heads % KIND.group) * HEAD_DIM)[:, None]
        places += dims[None, :]
    query = gl.load(
        q + first_token.to(gl.int64) * q_stride + places, mask=(heads < num_queries)[:, None], other=0.0
    ).to(gl.float32)
    largest = gl.maximum(gl.max(gl.abs(query), axis=1), 1e-30)
    power = (largest.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
    query = gl.convert_layout((query * (1.0 / power)[:, None]).to(gl.float16).permute([1, 0]), right)
    unit = gl.convert_layout(power, by_query) * scale_log2

    # Where each thread's pieces are from the beginning of a block, in words, for a tile at its beginning.
    key_row = gl.arange(0, 8, gl.SliceLayout(1, key_layout)) * PER_ROW
    key_words = gl.arange(0, 16, gl.SliceLayout(0, key_layout))
    key_words = kv_head * NUM_WORDS + key_words // 4 * (NUM_WORDS // 4) + key_words % 4
    key_place = (key_row * ROW)[:, None] + key_words[None, :]
    scale_place = KIND.block_size * ROW + (kv_head * KIND.block_size + key_row) // 2
    value_row = gl.arange(0, 4, gl.SliceLayout(1, value_layout)) * (2 * PER_ROW)
    value_words = kv_head * NUM_WORDS + gl.arange(0, NUM_WORDS, gl.SliceLayout(0, value_layout))
    value_place = (value_row * ROW)[:, None] + value_words[None, :]

    no_scores = gl.zeros([KEYS, QUERIES], gl.float32, product)
    reference = gl.full([QUERIES], -1e30, gl.float32, by_query)
    weight_sum = gl.sum(no_scores.reshape([PER_ROW, 8, QUERIES]), 0)
    # [words, queries] for each byte of a word
    acc0 = gl.zeros([NUM_WORDS, QUERIES], gl.float32, product)
    acc1 = gl.zeros([NUM_WORDS, QUERIES], gl.float32, product)
    acc2 = gl.zeros([NUM_WORDS, QUERIES], gl.float32, product)
    acc3 = gl.zeros([NUM_WORDS, QUERIES], gl.float32, product)

    # Each thread loads the tile's block id: a wait for what is in a register of all threads would come at once.
    offset = begin % KIND.block_size
    key_block = gl.load(table + gl.minimum(begin + key_row, last_key) // KIND.block_size)
    value_block = gl.load(table + gl.minimum(begin + value_row, last_key) // KIND.block_size)
    keys = _load_keys(k_cache, key_block, key_place + offset * ROW, HEAD_DIM, ROW, STRIDE, PER_ROW)
    key_scale = _load_scales(k_cache, key_block, scale_place + offset // 2, STRIDE, PER_ROW)
    value_scale = _load_scales(v_cache, key_block, scale_place + offset // 2, STRIDE, PER_ROW)
    values = _load_values(v_cache, value_block, value_place + offset * ROW, ROW, STRIDE, 2 * PER_ROW)
    key_block = gl.load(table + gl.minimum(begin + KEYS + key_row, last_key) // KIND.block_size)
    value_block = gl.load(table + gl.minimum(begin + KEYS + value_row, last_key) // KIND.block_size)
    for start in range(begin, end, KEYS):
        following = start + KEYS
        offset = following % KIND.block_size
        is_next = following < end

        byte0, byte1, byte2, byte3 = numbers_of_bytes(keys, 1)
        numbers = gl.join(gl.join(byte0, byte2), gl.join(byte1, byte3))
        numbers = numbers.reshape([8, 4, 4, PER_ROW, HEAD_DIM // 64, 2, 2]).permute([3, 0, 4, 2, 5, 1, 6])
        scores = mma_v2(gl.convert_layout(numbers.reshape([KEYS, HEAD_DIM]), left), query, no_scores)
        scores = scores * _scales_in_rows(key_scale, by_key)[:, None]
        # A weight without its scale has at most 88 bits before the point.
        factors = gl.maximum(_scales_in_rows(value_scale, by_key), 2.0**-80)
        if is_next:
            keys = _load_keys(k_cache, key_block, key_place + offset * ROW, HEAD_DIM, ROW, STRIDE, PER_ROW)
            key_scale = _load_scales(k_cache, key_block, scale_place + offset // 2, STRIDE, PER_ROW)
            value_scale = _load_scales(v_cache, key_block, scale_place + offset // 2, STRIDE, PER_ROW)
        key_block = gl.load(table + gl.minimum(following + KEYS + key_row, last_key) // KIND.block_size)
        if KIND.soft_cap > 0:
            scores = _soft_capped(scores * unit[None, :], KIND.soft_cap)
        if (following > first_end) | (start < last_begin):
            # What an earlier owner of the block left may be NaN, and 0 × NaN too.
            row_of_product = gl.arange(0, KEYS, by_key)
            in_rows = start + row_of_product % 8 * PER_ROW + row_of_product // 8
            is_key = (in_rows >= first_seen) & (in_rows < end)
            if starts is None:
                scores = gl.where(is_key[:, None], scores, -float("inf"))
            else:
                ends = first_end + gl.arange(0, QUERIES, by_query) // KIND.group
                is_seen = is_key[:, None] & (in_rows[:, None] < ends[None, :])
                if KIND.has_window:
                    is_seen = is_seen & (in_rows[:, None] >= (ends - window)[None, :])
                scores = gl.where(is_seen, scores, -float("inf"))
            factors = gl.where(is_key, factors, 1.0)
            value_slice: gl.constexpr = values.type.layout
            quarter = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, value_slice))) * (2 * PER_ROW)
            of_quarter = gl.arange(0, 2 * PER_ROW, gl.SliceLayout(0, gl.SliceLayout(1, value_slice)))
            in_values = start + quarter[:, None, None] + of_quarter[None, None, :]
            values = gl.where((in_values >= first_seen) & (in_values < end), values, 0)
        if KIND.soft_cap > 0:
            weights = gl.exp2(scores - reference[None, :])
        else:
            weights = gl.exp2(scores * unit[None, :] - reference[None, :])
        scaled = weights * factors[:, None]
        if gl.max(scaled.to(gl.int32, bitcast=True).reshape([KEYS * QUERIES]), 0) > 0x43800000:  # 256.0
            if KIND.soft_cap == 0:
                scores = scores * unit[None, :]
            new_reference = gl.maximum(reference, gl.max(scores + _log2(factors)[:, None], 0))
            decay = gl.exp2(reference - new_reference)
            reference = new_reference
            weight_sum = weight_sum * gl.convert_layout(decay, gl.SliceLayout(0, weight_sum.type.layout))[None, :]
            acc0 = acc0 * decay[None, :]
            acc1 = acc1 * decay[None, :]
            acc2 = acc2 * decay[None, :]
            acc3 = acc3 * decay[None, :]
            weights = gl.exp2(scores - reference[None, :])
            scaled = weights * factors[:, None]
        weight_sum += gl.sum(weights.reshape([PER_ROW, 8, QUERIES]), 0)
        scaled = _transposed(scaled.to(gl.float16)).reshape([PER_ROW, 8, QUERIES // 8, 8]).permute([0, 3, 2, 1])
        scaled = gl.convert_layout(scaled.reshape([KEYS, QUERIES]), right)
        byte0, byte1, byte2, byte3 = numbers_of_bytes(gl.convert_layout(values, value_pairs), 2)
        acc0 = mma_v2(_left_operand(byte0, KEYS, left), scaled, acc0)
        acc1 = mma_v2(_left_operand(byte1, KEYS, left), scaled, acc1)
        acc2 = mma_v2(_left_operand(byte2, KEYS, left), scaled, acc2)
        acc3 = mma_v2(_left_operand(byte3, KEYS, left), scaled, acc3)
        if is_next:
            values = _load_values(v_cache, value_block, value_place + offset * ROW, ROW, STRIDE, 2 * PER_ROW)
        value_block = gl.load(table + gl.minimum(following + KEYS + value_row, last_key) // KIND.block_size)

    # Rows of the sums are (place in a piece, piece).
    acc = gl.join(gl.join(acc0, acc2), gl.join(acc1, acc3)).reshape([NUM_WORDS // 8, 8, QUERIES, 4])
    acc = gl.convert_layout(acc.permute([2, 1, 0, 3]).reshape([QUERIES, HEAD_DIM]), in_memory)
    highest = gl.convert_layout(reference, memory_rows)
    weight_sum = gl.convert_layout(gl.sum(weight_sum, 0), memory_rows)
    group = gl.arange(0, QUERIES, memory_rows)
    in_group = group < num_queries
    PARTIALS: gl.constexpr = KIND.group if starts is None else QUERIES
    head = kv_head * KIND.group + (group if starts is None else group % KIND.group)
    if KIND.has_sinks:
        # A row's first chunk alone counts the sink, so that the sum over chunks has it once.
        sink = gl.load(sinks + head, mask=in_group, other=0.0) * 1.4426950408889634
        sink = gl.where(gl.load(item + 5) == 0, sink, -float("inf"))
        new_highest = gl.maximum(highest, sink)
        decay = gl.exp2(highest - new_highest)
        weight_sum = weight_sum * decay + gl.exp2(sink - new_highest)
        acc = acc * decay[:, None]
        highest = new_highest
    dims = gl.arange(0, HEAD_DIM, memory_columns)
    # A padding row has no key: it gets zeros.
    acc = acc / gl.where(weight_sum > 0, weight_sum, 1.0)[:, None]

    if starts is not None:
        head += group // KIND.group * (KIND.num_kv_heads * KIND.group)
    out_row = out + first_token.to(gl.int64) * (KIND.num_kv_heads * KIND.group * HEAD_DIM)
    row_sums = log_sums
    if log_sums is not None:
        row_sums = log_sums + first_token * (KIND.num_kv_heads * KIND.group)
    if num_chunks == 1:
        out_places = head[:, None] * HEAD_DIM + dims[None, :]
        gl.store(out_row + out_places, acc.to(out.dtype.element_ty), mask=in_group[:, None])
        if log_sums is not None:
            gl.store(row_sums + head, highest + gl.log2(weight_sum), mask=in_group)
    else:
        ROWS: gl.constexpr = KIND.padded_group if starts is None else QUERIES
        first = gl.load(item + 4) * KIND.num_kv_heads + kv_head
        chunk = gl.load(item + 5)
        partial = (first + chunk * KIND.num_kv_heads) * PARTIALS + group
        gl.store(partial_out + (partial[:, None] * HEAD_DIM + dims[None, :]), acc, mask=in_group[:, None])
        gl.store(partial_lse + partial, highest + gl.log2(weight_sum), mask=in_group)
        lanes = gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(0, _reduction_layout(HEAD_DIM))))
        is_last = True
        count = num_chunks
        step = KIND.num_kv_heads
        if num_chunks > _MOST_CHUNKS:
            number = chunk // _CLUSTER
            members = gl.minimum(_CLUSTER, num_chunks - number * _CLUSTER)
            begin_of_cluster = first + number * (_CLUSTER * KIND.num_kv_heads)
            is_last = _is_last(arrivals + begin_of_cluster, members)
            if is_last:
                _reduce_chunks(
                    partial_out, partial_lse, begin_of_cluster * PARTIALS + lanes, partial_out, partial_lse,
                    begin_of_cluster, members, step, num_queries, KIND, ROWS, PARTIALS,
                )  # fmt: skip
            count = (num_chunks + (_CLUSTER - 1)) // _CLUSTER
            step = _CLUSTER * KIND.num_kv_heads
        if is_last:
            # No cluster begins at the second chunk.
            is_last = _is_last(arrivals + first + KIND.num_kv_heads, count)
        if is_last:
            out_head = kv_head * KIND.group + lanes % KIND.group
            out_head += lanes // KIND.group * (KIND.num_kv_heads * KIND.group)
            _reduce_chunks(
                out_row, row_sums, out_head, partial_out, partial_lse, first, count, step, num_queries, KIND, ROWS,
                PARTIALS,
            )  # fmt: skip


@gluon.jit
def _is_last(arrivals, count):
    """Tell others that what the program has stored is there, and return whether it is the last of `count` to do so."""
    # All threads have stored before one of them says so; acquire and release order it across programs.
    barrier()
    is_last = gl.atomic_add(arrivals, 1, sem="acq_rel") == count - 1
    if is_last:
        gl.store(arrivals, 0)  # for the next layer
    return is_last


@gluon.jit
def _reduce_chunks(
    out,
    sums,
    places,  # [ROWS], the place of each query among the results
    partial_out,
    partial_lse,
    first,  # the KV head's results in the first chunk, in results of a KV head in a chunk
    count,
    step,  # from one result to the next
    num_queries,
    KIND: gl.constexpr,
    ROWS: gl.constexpr,
    PARTIALS: gl.constexpr,
):
    """Weigh partial results of a row for one KV head into one, some chunks at a time for all queries."""
    HEAD_DIM: gl.constexpr = KIND.head_dim
    CHUNKS: gl.constexpr = _STAGED // (ROWS * HEAD_DIM)
    layout: gl.constexpr = _reduction_layout(HEAD_DIM)
    of_query: gl.constexpr = gl.SliceLayout(2, layout)
    by_query: gl.constexpr = gl.SliceLayout(0, of_query)
    of_sum: gl.constexpr = gl.SliceLayout(0, layout)
    by_sum: gl.constexpr = gl.SliceLayout(1, of_sum)
    chunks = gl.arange(0, CHUNKS, gl.SliceLayout(1, of_query))
    lanes = gl.arange(0, ROWS, by_query)
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    highest = gl.full([ROWS], -1e30, gl.float32, by_query)
    weight_sum = gl.zeros([ROWS], gl.float32, by_query)
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, of_sum)
    for start in range(0, count, CHUNKS):
        is_read = (start + chunks < count)[:, None] & (lanes < num_queries)[None, :]
        partial = (first + (start + chunks) * step)[:, None] * PARTIALS + lanes[None, :]
        # .cg: past the L1 cache, which may hold what was there before the other programs stored.
        lse = gl.load(partial_lse + partial, mask=is_read, other=-float("inf"), cache_modifier=".cg")
        value = gl.load(
            partial_out + (partial[:, :, None] * HEAD_DIM + dims[None, None, :]),
            mask=is_read[:, :, None], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        new_highest = gl.maximum(highest, gl.max(lse, 0))
        decay = gl.exp2(highest - new_highest)
        weights = gl.exp2(lse - new_highest[None, :])
        weight_sum = weight_sum * decay + gl.sum(weights, 0)
        acc = acc * gl.convert_layout(decay, by_sum)[:, None] + gl.sum(value * weights[:, :, None], 0)
        highest = new_highest
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, of_sum))
    is_query = gl.arange(0, ROWS, by_sum) < num_queries
    acc = acc / gl.convert_layout(gl.where(weight_sum > 0, weight_sum, 1.0), by_sum)[:, None]
    barrier()  # all threads have read: the place may be that of a chunk
    gl.store(out + (places[:, None] * HEAD_DIM + dims[None, :]), acc.to(out.dtype.element_ty), mask=is_query[:, None])
    if sums is not None:
        gl.store(sums + places, gl.convert_layout(highest + gl.log2(weight_sum), by_sum), mask=is_query)
