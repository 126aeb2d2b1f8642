"""Paged decode attention over keys and values in FP8 that go from memory straight to the registers that a product
takes, in Gluon, the layer of Triton that says which thread has what.

A program is one warp. In `decode_attention.py` keys and values pass through shared memory, and what brings them from
there to a product's operands takes more instructions than the products. Here each thread loads pieces of 16 bytes, and
the products are arranged so that these are just what it has to hand to the tensor cores. Thread 4 g + c loads

- of keys, pieces c, c + 4, ... of some keys: the sum over dimensions may take them in any order, in which the query
  is loaded as well;
- of values, piece g of some other keys: with values as the left operand and weights as the right one, a thread's
  scores are the weights that it has to hand over, and four sums stand for the four bytes of a word.

So there is neither shared memory nor a barrier in the loop, and the next tile's loads are on their way while this one
is multiplied. The work list and the other arguments are those of `decode_attention.py`, to which tests on a GPU hold
it. It serves head sizes 64 and 128, up to 8 query heads for each KV head, and work lists whose chunks begin at
multiples of a tile that does not straddle blocks.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2


@gluon.constexpr_function
def _powers(first, count):
    return [first << i for i in range(count)]


@gluon.constexpr_function
def _key_layout(tile, num_words):
    """[tile, words]: thread 4 g + c has pieces c, c + 4, ... of keys tile / 4 × (g / 2) + g % 2, and every second key
    from there on."""
    registers = [[0, 1], [0, 2], *([0, word] for word in _powers(16, (num_words // 16).bit_length() - 1))]
    registers += [[key, 0] for key in _powers(2, (tile // 8).bit_length() - 1)]
    lanes = [[0, 4], [0, 8], [1, 0], [tile // 4, 0], [tile // 2, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [], [], [tile, num_words])


@gluon.constexpr_function
def _value_layout(tile, num_words, keys_first):
    """[tile, words]: thread 4 g + c has piece g of tile / 4 neighbouring keys; with `keys_first` two keys' words stand
    in neighbouring registers."""
    piece = num_words // 8
    words = [[0, word] for word in _powers(1, piece.bit_length() - 1)]
    keys = [[key, 0] for key in _powers(1, (tile // 4).bit_length() - 1)]
    registers = [keys[0], *words, *keys[1:]] if keys_first else [*words, *keys]
    lanes = [[tile // 4, 0], [tile // 2, 0], [0, piece], [0, 2 * piece], [0, 4 * piece]]
    return gl.DistributedLinearLayout(registers, lanes, [], [], [tile, num_words])


@gluon.constexpr_function
def _scale_layout(tile):
    """[tile]: thread 4 g + c has those of the keys whose values it has."""
    registers = [[key] for key in _powers(1, (tile // 4).bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, [[tile // 4], [tile // 2], [0], [0], [0]], [], [], [tile])


@gluon.jit
def _numbers_of_keys(words):
    """Return the numbers of bytes 0, 1, 2 and 3 of words, each of the words' shape, in float16; those of bytes 0 and 1,
    and of 2 and 3, stand in one register."""
    return gl.inline_asm_elementwise(
        """{
            .reg .b16 low, high;
            .reg .b32 first_two, last_two;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 first_two, low;
            cvt.rn.f16x2.e4m3x2 last_two, high;
            mov.b32 {$0, $1}, first_two;
            mov.b32 {$2, $3}, last_two;
        }""",
        "=h,=h,=h,=h,r",
        [words],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _numbers_of_values(words):
    """Return the same, with the numbers of two neighbouring keys in one register."""
    return gl.inline_asm_elementwise(
        """{
            .reg .b32 first_two, last_two;
            .reg .b16 low, high;
            prmt.b32 first_two, $4, $5, 0x5140;
            prmt.b32 last_two, $4, $5, 0x7362;
            mov.b32 {low, high}, first_two;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            mov.b32 {low, high}, last_two;
            cvt.rn.f16x2.e4m3x2 $2, low;
            cvt.rn.f16x2.e4m3x2 $3, high;
        }""",
        "=r,=r,=r,=r,r,r",
        [words],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _log2(x):
    """Compute log2 by the GPU's own instruction, right to 2^-22."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _upper_half(x):
    """[16, columns] → the first 8 rows; those behind are no query's."""
    upper, _lower = gl.split(x.reshape([2, 8, x.shape[1]]).permute([1, 2, 0]))
    return upper


@gluon.jit
def _soft_capped(scores, SOFT_CAP: gl.constexpr):
    """SOFT_CAP × tanh(scores / SOFT_CAP), for scores times log2(e)."""
    powers = gl.exp2(scores * (2.0 * 1.4426950408889634 / SOFT_CAP))
    return SOFT_CAP - 2.0 * SOFT_CAP / (powers + 1.0)


@gluon.jit
def _load_keys(k_cache, block, offset, kv_head, is_tile, NUM_KV_HEADS, HEAD_DIM, BLOCK_STRIDE, TILE):
    """→ [TILE, HEAD_DIM / 4] int32; anything where there is no tile."""
    NUM_WORDS: gl.constexpr = HEAD_DIM // 4
    layout: gl.constexpr = _key_layout(TILE, NUM_WORDS)
    rows = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    words = gl.arange(0, NUM_WORDS, gl.SliceLayout(0, layout))
    first = block.to(gl.int64) * (BLOCK_STRIDE // 4) + (offset * NUM_KV_HEADS + kv_head) * NUM_WORDS
    places = (rows * (NUM_KV_HEADS * NUM_WORDS))[:, None] + words[None, :]
    mask = gl.full([TILE, NUM_WORDS], is_tile, gl.int1, layout)
    return gl.load(k_cache.cast(gl.pointer_type(gl.int32)) + first + places, mask=mask)


@gluon.jit
def _load_values(v_cache, block, offset, kv_head, low, high, is_tile, NUM_KV_HEADS, HEAD_DIM, BLOCK_STRIDE, TILE):
    """→ [TILE, HEAD_DIM / 4] int32; anything where there is no tile. Keys outside [low, high] of the tile get the
    values of those beside them: what an earlier owner of the block left may be NaN, and 0 × NaN too."""
    NUM_WORDS: gl.constexpr = HEAD_DIM // 4
    layout: gl.constexpr = _value_layout(TILE, NUM_WORDS, False)
    rows = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    rows = gl.maximum(gl.minimum(rows, high), low)
    words = gl.arange(0, NUM_WORDS, gl.SliceLayout(0, layout))
    first = block.to(gl.int64) * (BLOCK_STRIDE // 4) + (offset * NUM_KV_HEADS + kv_head) * NUM_WORDS
    places = (rows * (NUM_KV_HEADS * NUM_WORDS))[:, None] + words[None, :]
    mask = gl.full([TILE, NUM_WORDS], is_tile, gl.int1, layout)
    return gl.load(v_cache.cast(gl.pointer_type(gl.int32)) + first + places, mask=mask)


@gluon.jit
def _load_scales(cache, block, offset, kv_head, is_tile, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, TILE):
    """→ [TILE] bfloat16; anything where there is no tile."""
    layout: gl.constexpr = _scale_layout(TILE)
    FIRST: gl.constexpr = BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM // 2
    first = block.to(gl.int64) * (BLOCK_STRIDE // 2) + (FIRST + kv_head * BLOCK_SIZE + offset)
    # A tile begins at a multiple of its size.
    places = gl.multiple_of(first, 8) + gl.arange(0, TILE, layout)
    return gl.load(cache.cast(gl.pointer_type(gl.bfloat16)) + places, mask=gl.full([TILE], is_tile, gl.int1, layout))


@gluon.jit
def _in_columns(x, layout: gl.constexpr):
    """Put what belongs to the keys of a tile, [TILE], in the order of the products' columns, in which keys are
    (which of a thread's pairs, thread c, which of the pair)."""
    TILE: gl.constexpr = x.shape[0]
    return gl.convert_layout(x.reshape([4, TILE // 8, 2]).permute([1, 0, 2]).reshape([TILE]), layout)


@gluon.jit
def _left_operand(values, layout: gl.constexpr):
    """[TILE, words] → [words, TILE], keys in the order of the products' columns, and words in an order of (place in a
    piece, piece)."""
    TILE: gl.constexpr = values.shape[0]
    NUM_WORDS: gl.constexpr = values.shape[1]
    values = values.reshape([4, TILE // 8, 2, 8, NUM_WORDS // 8]).permute([4, 3, 1, 0, 2])
    return gl.convert_layout(values.reshape([NUM_WORDS, TILE]), layout)


@gluon.jit(do_not_specialize=["block_table_stride"], do_not_specialize_on_alignment=["block_tables"])
def fp8_decode_attention_kernel(
    q,  # the arguments are those of decode_attention_kernel
    k_cache,
    v_cache,
    out,
    block_tables,
    items,
    num_items,
    partial_out,
    partial_lse,
    arrivals,
    sinks,
    log_sums,
    scale_log2,
    q_stride,
    block_table_stride,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_STRIDE: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    TILE: gl.constexpr,  # keys: 32; with 64, registers are spilled
    ITEM_FIELDS: gl.constexpr,
):
    """Program (KV head, entry of the work list)."""
    kv_head = gl.program_id(0)
    index = gl.program_id(1)
    if index >= gl.load(num_items):
        return
    item = items + index * ITEM_FIELDS
    row = gl.load(item)
    begin = gl.load(item + 1)
    end = gl.load(item + 2)
    num_chunks = gl.load(item + 3)
    first_seen = 0
    if HAS_WINDOW:
        first_seen = gl.load(item + 7)
        begin = gl.maximum(begin, first_seen // TILE * TILE)  # no tile is without a key that is seen
    last_key = gl.maximum(end - 1, 0)
    table = block_tables + gl.load(item + 6).to(gl.int64) * block_table_stride

    NUM_WORDS: gl.constexpr = HEAD_DIM // 4
    product: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, product, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, product, 2)
    in_memory: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 1], [1, 0])
    memory_rows: gl.constexpr = gl.SliceLayout(1, in_memory)
    memory_columns: gl.constexpr = gl.SliceLayout(0, in_memory)
    value_pairs: gl.constexpr = _value_layout(TILE, NUM_WORDS, True)

    # Queries as numbers below 2 and powers of 2, as `float16_query` makes them. Dimension d is in column
    # (d6, d3 d2, d1, d5 d4, d0) of bits of d.
    heads = gl.arange(0, 16, memory_rows)
    column = gl.arange(0, HEAD_DIM, memory_columns)
    dims = (column & 1) | (column >> 3 & 1) << 1 | (column >> 4 & 3) << 2 | (column >> 1 & 3) << 4 | column >> 6 << 6
    places = (kv_head * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
    query = gl.load(q + row.to(gl.int64) * q_stride + places, mask=(heads < GROUP)[:, None], other=0.0).to(gl.float32)
    largest = gl.maximum(gl.max(gl.abs(query), axis=1), 1e-30)
    power = (largest.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
    query = gl.convert_layout((query * (1.0 / power)[:, None]).to(gl.float16), left)

    no_scores = gl.zeros([16, TILE], gl.float32, product)
    score_layout: gl.constexpr = _upper_half(no_scores).type.layout
    score_rows: gl.constexpr = gl.SliceLayout(1, score_layout)
    score_columns: gl.constexpr = gl.SliceLayout(0, score_layout)
    upper_power, _lower_power = gl.split(power.reshape([2, 8]).permute([1, 0]))
    query_scale = gl.convert_layout(upper_power, score_rows) * scale_log2
    highest = gl.full([8], -float("inf"), gl.float32, score_rows)
    weight_sum = gl.zeros([8], gl.float32, score_rows)
    if HAS_SINKS:
        # A row's first chunk alone counts the sink, so that the sum over chunks has it once.
        is_first = gl.load(item + 5) == 0
        members = gl.arange(0, 8, score_rows)
        sink = gl.load(sinks + kv_head * GROUP + members, mask=members < GROUP, other=0.0) * 1.4426950408889634
        highest = gl.where(is_first, sink, highest)
        weight_sum = gl.where(is_first, 1.0, weight_sum)
    highest_scaled = gl.full([8], -float("inf"), gl.float32, score_rows)
    # [words, queries] for each byte of a word
    acc0 = gl.zeros([NUM_WORDS, 8], gl.float32, product)
    acc1 = gl.zeros([NUM_WORDS, 8], gl.float32, product)
    acc2 = gl.zeros([NUM_WORDS, 8], gl.float32, product)
    acc3 = gl.zeros([NUM_WORDS, 8], gl.float32, product)
    place = gl.arange(0, TILE, score_columns)
    lanes = (place & 1) | place >> 3 << 1 | (place >> 1 & 3) * (TILE // 4)

    block = gl.load(table + gl.minimum(begin, last_key) // BLOCK_SIZE)
    offset = begin % BLOCK_SIZE
    any_key = begin < end
    words = _load_keys(k_cache, block, offset, kv_head, any_key, NUM_KV_HEADS, HEAD_DIM, BLOCK_STRIDE, TILE)
    low = gl.maximum(first_seen - begin, 0)
    values = _load_values(
        v_cache, block, offset, kv_head, low, last_key - begin, any_key, NUM_KV_HEADS, HEAD_DIM, BLOCK_STRIDE, TILE
    )
    key_scale = _load_scales(
        k_cache, block, offset, kv_head, any_key, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, TILE
    )
    value_scale = _load_scales(
        v_cache, block, offset, kv_head, any_key, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, TILE
    )
    block = gl.load(table + gl.minimum(begin + TILE, last_key) // BLOCK_SIZE)
    for start in range(begin, end, TILE):
        following = start + TILE
        offset = following % BLOCK_SIZE
        is_tile = following < end
        keys = start + lanes
        is_key = keys < end
        if HAS_WINDOW:
            is_key = is_key & (keys >= first_seen)

        byte0, byte1, byte2, byte3 = _numbers_of_keys(words)
        key = gl.join(gl.join(byte0, byte2), gl.join(byte1, byte3))
        key = key.reshape([4, TILE // 8, 2, HEAD_DIM // 64, 4, 4, 2, 2]).permute([3, 5, 6, 4, 7, 1, 0, 2])
        key = gl.convert_layout(key.reshape([HEAD_DIM, TILE]), right)
        scores = _upper_half(mma_v2(query, key, no_scores))
        words = _load_keys(k_cache, block, offset, kv_head, is_tile, NUM_KV_HEADS, HEAD_DIM, BLOCK_STRIDE, TILE)
        scores = scores * (query_scale[:, None] * _in_columns(key_scale.to(gl.float32), score_columns)[None, :])
        key_scale = _load_scales(
            k_cache, block, offset, kv_head, is_tile, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, TILE
        )
        if SOFT_CAP > 0:
            scores = _soft_capped(scores, SOFT_CAP)
        scores = gl.where(is_key[None, :], scores, -float("inf"))
        new_highest = gl.maximum(highest, gl.max(scores, 1))
        decay = gl.exp2(highest - new_highest)
        weights = gl.exp2(scores - new_highest[:, None])
        weight_sum = weight_sum * decay + gl.sum(weights, 1)
        highest = new_highest

        # The sum of values has a maximum of its own: see decode_attention.
        log_scale = _in_columns(_log2(value_scale.to(gl.float32)), score_columns)
        value_scale = _load_scales(
            v_cache, block, offset, kv_head, is_tile, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, TILE
        )
        scores = gl.where(is_key[None, :], scores + log_scale[None, :], -float("inf"))
        new_highest = gl.maximum(highest_scaled, gl.max(scores, 1))
        decay = gl.convert_layout(gl.exp2(highest_scaled - new_highest), gl.SliceLayout(0, product))[None, :]
        weights = gl.exp2(scores - new_highest[:, None]).to(gl.float16)
        highest_scaled = new_highest
        weights = gl.convert_layout(weights.permute([1, 0]), right)
        byte0, byte1, byte2, byte3 = _numbers_of_values(gl.convert_layout(values, value_pairs))
        acc0 = mma_v2(_left_operand(byte0, left), weights, acc0 * decay)
        acc1 = mma_v2(_left_operand(byte1, left), weights, acc1 * decay)
        acc2 = mma_v2(_left_operand(byte2, left), weights, acc2 * decay)
        acc3 = mma_v2(_left_operand(byte3, left), weights, acc3 * decay)
        low = gl.maximum(first_seen - following, 0)
        values = _load_values(
            v_cache, block, offset, kv_head, low, last_key - following, is_tile,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_STRIDE, TILE,
        )  # fmt: skip
        block = gl.load(table + gl.minimum(following + TILE, last_key) // BLOCK_SIZE)

    # Rows of the sums are (place in a piece, piece).
    acc = gl.join(gl.join(acc0, acc2), gl.join(acc1, acc3)).reshape([NUM_WORDS // 8, 8, 8, 4]).permute([2, 1, 0, 3])
    acc = gl.convert_layout(acc.reshape([8, HEAD_DIM]), in_memory)
    factor = gl.where(highest_scaled > -float("inf"), gl.exp2(highest_scaled - highest), 0.0)
    acc = acc * gl.convert_layout(factor, memory_rows)[:, None]
    highest = gl.convert_layout(highest, memory_rows)
    weight_sum = gl.convert_layout(weight_sum, memory_rows)
    group = gl.arange(0, 8, memory_rows)
    in_group = group < GROUP
    dims = gl.arange(0, HEAD_DIM, memory_columns)
    # A padding row has no key: it gets zeros.
    acc = acc / gl.where(weight_sum > 0, weight_sum, 1.0)[:, None]

    out_row = out + row.to(gl.int64) * (NUM_KV_HEADS * GROUP * HEAD_DIM)
    if num_chunks == 1:
        out_places = (kv_head * GROUP + group)[:, None] * HEAD_DIM + dims[None, :]
        gl.store(out_row + out_places, acc.to(out.dtype.element_ty), mask=in_group[:, None])
        if log_sums is not None:
            head_places = (row * NUM_KV_HEADS + kv_head) * GROUP + group
            gl.store(log_sums + head_places, highest + gl.log2(weight_sum), mask=in_group)
    else:
        first_partial = gl.load(item + 4)
        partial = ((first_partial + gl.load(item + 5)) * NUM_KV_HEADS + kv_head) * GROUP
        gl.store(partial_out + ((partial + group)[:, None] * HEAD_DIM + dims[None, :]), acc, mask=in_group[:, None])
        gl.store(partial_lse + partial + group, highest + gl.log2(weight_sum), mask=in_group)
        # All threads have stored before one of them says so; acquire and release order it across programs.
        gl.thread_barrier()
        arrived = gl.atomic_add(arrivals + row * NUM_KV_HEADS + kv_head, 1, sem="acq_rel")
        if arrived == num_chunks - 1:
            gl.store(arrivals + row * NUM_KV_HEADS + kv_head, 0)  # for the next layer
            _reduce_chunks(
                out_row, log_sums, partial_out, partial_lse, row, first_partial, num_chunks, kv_head, in_memory,
                NUM_KV_HEADS, GROUP, HEAD_DIM,
            )  # fmt: skip


@gluon.jit
def _reduce_chunks(
    out_row,
    log_sums,
    partial_out,
    partial_lse,
    row,
    first_partial,
    num_chunks,
    kv_head,
    layout: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):
    """Weigh a row's partial results for one KV head into its output, a chunk at a time for all query heads."""
    group = gl.arange(0, 8, gl.SliceLayout(1, layout))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    in_group = group < GROUP
    highest = gl.full([8], -float("inf"), gl.float32, gl.SliceLayout(1, layout))
    weight_sum = gl.zeros([8], gl.float32, gl.SliceLayout(1, layout))
    acc = gl.zeros([8, HEAD_DIM], gl.float32, layout)
    for chunk in range(num_chunks):
        partial = ((first_partial + chunk) * NUM_KV_HEADS + kv_head) * GROUP + group
        # .cg: past the L1 cache, which may hold what was there before the other programs stored.
        lse = gl.load(partial_lse + partial, mask=in_group, other=0.0, cache_modifier=".cg")
        value = gl.load(
            partial_out + (partial[:, None] * HEAD_DIM + dims[None, :]),
            mask=in_group[:, None], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        new_highest = gl.maximum(highest, lse)
        decay = gl.exp2(highest - new_highest)
        weight = gl.exp2(lse - new_highest)
        weight_sum = weight_sum * decay + weight
        acc = acc * decay[:, None] + value * weight[:, None]
        highest = new_highest
    places = (kv_head * GROUP + group)[:, None] * HEAD_DIM + dims[None, :]
    gl.store(out_row + places, (acc / weight_sum[:, None]).to(out_row.dtype.element_ty), mask=in_group[:, None])
    if log_sums is not None:
        place = (row * NUM_KV_HEADS + kv_head) * GROUP + group
        gl.store(log_sums + place, highest + gl.log2(weight_sum), mask=in_group)
