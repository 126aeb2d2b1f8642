"""Products of many rows with weights of 4 bits for Hopper GPUs, in Gluon, the layer of Triton that says which warps do
what.

A program has groups of warps. One brings tiles of 128 input features to shared memory by TMA: activations, and words of
codes. The other ones multiply: each turns the words of its features into numbers in registers, a quarter of a tile at a
time, which are the first factor of Hopper's matrix units, and the activations are the second one. While a quarter is
multiplied, the next one is turned into numbers. A weight is read and turned into numbers once for 128 rows.

The scales of integers have 16 bits. They are multiplied in two halves, so that a number is rounded once, as it is where
a weight is turned into 16 bits in memory. Those of affine codes are rounded before (`w4_codes.affine_numbers`). Codes
of 8 bits have pieces of a tile with words of their own, of 64 columns, or in groups of 16 of 32, whose halves are put
side by side: a register then has the same two columns as before, and nothing moves.

Gate and up projection are multiplied together: in a block of 64 rows of a weight lie 8 of the gate, the 8 of the up
projection with the same features, the next 8 of the gate, and so on. This is how the matrix units give both results of
a feature to the same thread. TMA brings them in this order, or in their own: R = 32 rows of a tile follow one another
in memory (`kernels/w4.py`), and 8 of them are a dimension of what is described to it.

With it the reference workload of Qwen3-8B makes 10,147 output tokens/s, and 9,164 without (H200, Triton 3.8.0, torch
2.11.0). `hopper_w4.py` launches it and says what it serves. Gluon has no interpreter: tests simulate it.
Shapes: T rows of activations, `in` and `out` features, P parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from nvcli.kernels.expert_settings import ExpertActivation
from nvcli.kernels.triton.launch.hopper_stages import LOADING_REGISTERS, LOADING_WARPS, make_barriers
from nvcli.kernels.triton.launch.triton_version import reinterpret, tma_load
from nvcli.kernels.triton.products.expert_groups import ITEM_FIELDS
from nvcli.kernels.triton.products.w4_codes import BF16_AFFINE, BF16_HALVES, F16_AFFINE, F16_HALVES

BLOCK = gl.constexpr(64)
"""The rows of a weight that are multiplied at once."""
PART = gl.constexpr(32)
"""The columns of a part."""
GROUPS = gl.constexpr(2)
"""The groups of warps that multiply."""
_PARTS = gl.constexpr(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperW4Kind:
    """The constants of a compiled kernel."""

    format: str
    """The weight's: "integer", "affine", "affine in 8 bits" or "mxfp4"."""
    scale_words: int
    """Words of scales of a row of a tile: 1, or of affine codes 4, or 8 in groups of 16."""
    pieces: int
    """The pieces of a tile, each with words of its own: 1, or of codes of 8 bits 2, or 4 in groups of 16."""
    piece_words: int
    """Words that hold the codes of a row of a piece."""
    row_tile: int
    blocks: int
    """Blocks of a weight's rows that each group multiplies."""
    num_stages: int
    out_bytes: int
    """Bytes of a number of the result."""
    is_gated: bool
    activation: ExpertActivation
    experts_per_token: int
    """0: the product of a linear layer."""

    @property
    def all_blocks(self) -> int:
        """Blocks of a strip."""
        return self.blocks * int(GROUPS.value)

    @property
    def words_tile(self) -> tuple[int, int, int, int, int]:
        """The words of a block of rows of a piece: of a gated product [R rows and piece, 8 rows, gate or up, row,
        word]; else [R rows, piece, 8 rows, row, word]."""
        return (1, 4, 2, 8, self.piece_words) if self.is_gated else (2, 1, 4, 8, self.piece_words)

    @property
    def words_shape(self) -> list[int]:
        """The words of all stages."""
        return [self.num_stages * self.all_blocks * self.pieces, *self.words_tile]


_BF16_INTEGERS = gl.constexpr(
    tuple(
        f"{{ .reg .b32 t, u; shr.b32 t, $1, {4 * part}; lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; "
        "sub.bf16x2 t, t, $6; mul.bf16x2 u, t, $4; fma.rn.bf16x2 $0, t, $2, u; }"
        for part in range(4)
    )
)
_F16_INTEGERS = gl.constexpr(
    tuple(
        f"{{ .reg .b32 t, u; shr.b32 t, $1, {4 * part}; lop3.b32 t, t, 0x000F000F, 0x64006400, 0xEA; "
        "sub.f16x2 t, t, $6; mul.f16x2 u, t, $4; fma.rn.f16x2 $0, t, $2, u; }"
        for part in range(4)
    )
)
_FP4_NUMBERS = gl.constexpr(
    tuple(
        f"{{ .reg .b32 t, u; shl.b32 t, $1, {12 - 4 * part}; shr.b32 u, t, 6; and.b32 t, t, 0x80008000; "
        "lop3.b32 t, u, 0x01C001C0, t, 0xEA; mul.bf16x2 $0, t, $2; }"
        for part in range(4)
    )
)


@gluon.jit
def _tile(tile, work, KIND: gl.constexpr):
    """Return the expert, the first row, the number of rows from there on, the strip of features, the first 128 input
    features and the end of these that a tile has, and its part."""
    num_rows, _, part_tiles, strips, in_tiles, _, items_ptr = work
    if KIND.experts_per_token > 0:
        item_ptr = items_ptr + tile // strips * ITEM_FIELDS
        expert = gl.load(item_ptr)
        row = gl.load(item_ptr + 1)
        rows = gl.load(item_ptr + 2)
        strip = tile % strips
        part = 0
    else:
        row_tiles = gl.cdiv(num_rows, KIND.row_tile)
        expert = 0
        row = tile % row_tiles * KIND.row_tile
        rows = num_rows - row
        strip = tile // row_tiles % strips
        part = tile // row_tiles // strips
    first = part * part_tiles
    return expert, row, rows, strip, part, first, gl.minimum(first + part_tiles, in_tiles)


@gluon.jit
def _load(descriptors, work, stages, KIND: gl.constexpr):
    """Load tiles: the work of the loading warp."""
    x_desc, words_desc, scales_desc = descriptors
    x_smem, words_smem, scales_smem, full, free = stages
    num_tiles, in_tiles, row_blocks = work[1], work[4], work[5]
    ALL_BLOCKS: gl.constexpr = KIND.all_blocks
    NUM_STAGES: gl.constexpr = KIND.num_stages
    SCALE_WORDS: gl.constexpr = KIND.scale_words
    PIECES: gl.constexpr = KIND.pieces
    OF_ROW: gl.constexpr = PIECES * KIND.piece_words * 2 + 4 * SCALE_WORDS
    NUM_BYTES: gl.constexpr = _PARTS * PART * KIND.row_tile * 2 + ALL_BLOCKS * BLOCK * OF_ROW
    words_parts = reinterpret(words_smem, words_smem.dtype, KIND.words_shape, words_desc.layout)
    scales_parts = reinterpret(
        scales_smem, scales_smem.dtype, [NUM_STAGES * ALL_BLOCKS, SCALE_WORDS, BLOCK // 16, 2, 8], scales_desc.layout
    )
    i = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert, row, rows, strip, _, first, end = _tile(tile, work, KIND)
        if rows <= 0:
            end = first
        for inner in range(first, end):
            stage = i % NUM_STAGES
            phase = (i // NUM_STAGES) & 1
            i += 1
            mbarrier.wait(free.index(stage), phase ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, NUM_BYTES)
            for panel in gl.static_range(_PARTS):
                at = stage * _PARTS + panel
                tma_load(x_desc, [row, (inner * _PARTS + panel) * PART], bar, x_smem.index(at))
            for block in gl.static_range(ALL_BLOCKS):
                number = strip * ALL_BLOCKS + block
                at = stage * ALL_BLOCKS + block
                for n in gl.static_range(PIECES):
                    words = words_parts.index(at * PIECES + n)
                    piece = inner * PIECES + n
                    if KIND.is_gated:
                        place = (expert * row_blocks + number) * in_tiles * PIECES + piece
                        tma_load(words_desc, [place, 0, 0, 0, 0], bar, words)
                    else:
                        tma_load(words_desc, [expert * row_blocks + 2 * number, piece, 0, 0, 0], bar, words)
                scales = scales_parts.index(at)
                group = (expert * in_tiles + inner) * SCALE_WORDS
                tma_load(scales_desc, [group, number * (BLOCK // 16), 0, 0], bar, scales)


@gluon.jit
def _twice(values, DTYPE: gl.constexpr):
    """Round float32 to DTYPE, and put the bits into both halves of an int32."""
    bits = values.to(DTYPE).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return bits * 65537


@gluon.jit
def _factors(pairs, FORMAT: gl.constexpr, DTYPE: gl.constexpr):
    """Split joined scales (`kernels/w4.py`) into the factors of `_numbers`, int32 each: for integers both halves of the
    scales, and the zeros or offsets."""
    scales = pairs
    low_scales = pairs
    zeros = pairs
    if FORMAT == "integer":
        exact = (pairs & -256).to(gl.float32, bitcast=True)
        scales = _twice(exact, DTYPE)
        low_scales = _twice(exact - exact.to(DTYPE).to(gl.float32), DTYPE)
        zeros = (pairs & 255) * 65537 + (0x43004300 if gl.bfloat16 == DTYPE else 0x64006400)
    elif FORMAT == "affine" or FORMAT == "affine in 8 bits":
        scales, zeros = gl.inline_asm_elementwise(
            BF16_HALVES if gl.bfloat16 == DTYPE else F16_HALVES,
            "=&r,=&r,r",
            [pairs],
            dtype=(gl.int32, gl.int32),
            is_pure=True,
            pack=1,
        )
    return scales, low_scales, zeros


@gluon.jit
def _numbers(words, scales, low_scales, zeros, part: gl.constexpr, FORMAT: gl.constexpr, DTYPE: gl.constexpr):
    """Return the numbers of one part, in the same bits of all words: [BLOCK, words] of DTYPE."""
    EIGHT: gl.constexpr = 4 if FORMAT == "affine in 8 bits" else 0
    if FORMAT == "mxfp4":
        factors = ((scales >> (8 * part)) & 255) + 126
        factors = factors * 8388736  # in both halves of a register: << 7 and << 23
        numbers = gl.inline_asm_elementwise(
            _FP4_NUMBERS[part], "=r,r,r,r", [words, factors[:, None]], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    elif FORMAT == "affine" or FORMAT == "affine in 8 bits":
        numbers = gl.inline_asm_elementwise(
            BF16_AFFINE[part + EIGHT] if gl.bfloat16 == DTYPE else F16_AFFINE[part + EIGHT],
            "=r,r,r,r,r,r",
            [words, scales[:, None], zeros[:, None]],
            dtype=gl.bfloat16 if gl.bfloat16 == DTYPE else gl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        numbers = gl.inline_asm_elementwise(
            _BF16_INTEGERS[part] if gl.bfloat16 == DTYPE else _F16_INTEGERS[part],
            "=r,r,r,r,r,r,r,r",
            [words, scales[:, None], low_scales[:, None], zeros[:, None]],
            dtype=gl.bfloat16 if gl.bfloat16 == DTYPE else gl.float16,
            is_pure=True,
            pack=2,
        )
    return numbers


@gluon.jit
def _group_factors(scales, FORMAT: gl.constexpr, DTYPE: gl.constexpr, OPERAND: gl.constexpr):
    """Load the scales of a group of columns, [BLOCK / 8, 8] int32 in shared memory, as `_factors` returns them."""
    # Of rows of the operand: eight in lanes, two in registers, and four in warps.
    in_rows: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0]], [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]], [[2, 0], [4, 0]], [], [BLOCK // 8, 8]
    )
    pairs = gl.convert_layout(scales.load(in_rows).reshape([BLOCK]), gl.SliceLayout(1, OPERAND))
    return _factors(pairs, FORMAT, DTYPE)


@gluon.jit
def _add_block(
    total,
    words_smem,  # [BLOCK, words] int16 for each piece
    scales_smem,  # [BLOCK / 8, 8] int32 for each group of columns
    x_smem,
    block,  # of those of all stages
    stage,
    KIND: gl.constexpr,
    DTYPE: gl.constexpr,
    OPERAND: gl.constexpr,
):
    """Add the product of one block of a tile: [BLOCK, ROW_TILE]. Only the last part may still be multiplied."""
    FORMAT: gl.constexpr = KIND.format
    SCALE_WORDS: gl.constexpr = KIND.scale_words
    PIECES: gl.constexpr = KIND.pieces
    first_group = block * SCALE_WORDS
    codes = words_smem.index(block * PIECES).load(OPERAND)
    last = codes
    for part in gl.static_range(_PARTS):
        if part > 0 and part * PIECES % _PARTS == 0:
            codes = words_smem.index(block * PIECES + part * PIECES // _PARTS).load(OPERAND)
        if SCALE_WORDS > _PARTS:  # a piece has two groups, in the halves of its words
            group = first_group + 2 * part
            scales, low_scales, zeros = _group_factors(scales_smem.index(group), FORMAT, DTYPE, OPERAND)
            low = _numbers(codes, scales, low_scales, zeros, 0, FORMAT, DTYPE)
            scales, low_scales, zeros = _group_factors(scales_smem.index(group + 1), FORMAT, DTYPE, OPERAND)
            high = _numbers(codes, scales, low_scales, zeros, 1, FORMAT, DTYPE)
            numbers = gl.join(low, high).permute((0, 2, 1)).reshape([BLOCK, PART])
            numbers = gl.convert_layout(numbers, OPERAND)
        else:
            if part % (_PARTS // SCALE_WORDS) == 0:
                group = first_group + part * SCALE_WORDS // _PARTS
                scales, low_scales, zeros = _group_factors(scales_smem.index(group), FORMAT, DTYPE, OPERAND)
            numbers = _numbers(codes, scales, low_scales, zeros, part % (_PARTS // PIECES), FORMAT, DTYPE)
        panel = x_smem.index(stage * _PARTS + part).permute((1, 0))
        total = warpgroup_mma(numbers, panel, total, is_async=True)
        warpgroup_mma_wait(1, deps=[last])
        last = numbers
    return total


@gluon.jit
def _activate(gate, up, ACTIVATION: gl.constexpr):
    """See `ExpertActivation`. float32."""
    LIMIT: gl.constexpr = ACTIVATION.limit
    argument = gate
    if ACTIVATION.kind == "clamped_swiglu":
        gate = gl.where(gate > LIMIT, LIMIT, gate)
        up = gl.where(up > LIMIT, LIMIT, gl.where(up < -LIMIT, -LIMIT, up)) + ACTIVATION.offset
        argument = ACTIVATION.alpha * gate
    elif ACTIVATION.kind == "gelu_tanh":
        argument = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
    factor = gate * (1 / (1 + gl.exp(-argument)))
    if ACTIVATION.kind == "clamped_silu":
        factor = gl.where(factor > LIMIT, LIMIT, factor)
        up = gl.where(up > LIMIT, LIMIT, gl.where(up < -LIMIT, -LIMIT, up))
    return factor * up


@gluon.jit
def _finish(total, result, out_smem, tile, block, KIND: gl.constexpr, OF_SUMS: gl.constexpr):
    """Store a block of sums: the `block`th of all rows of a weight."""
    bias_ptr, order_ptr, weights_ptr, out_ptr, num_rows, out_features = result
    expert, row, rows, part = tile
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    ROW_TILE: gl.constexpr = KIND.row_tile
    OUT_BYTES: gl.constexpr = KIND.out_bytes
    ACTIVATION: gl.constexpr = KIND.activation
    FEATURES: gl.constexpr = BLOCK // 2 if KIND.is_gated else BLOCK
    if bias_ptr is not None:
        inner = gl.arange(0, BLOCK, gl.SliceLayout(1, OF_SUMS))
        feature = block * BLOCK + inner
        if KIND.is_gated:
            feature = block * (BLOCK // 2) + inner // 16 * 8 + inner % 8
        place = expert * (out_features * 2 if KIND.is_gated else out_features) + gl.minimum(feature, out_features - 1)
        if KIND.is_gated:
            place += inner // 8 % 2 * out_features
        total += gl.load(bias_ptr + place).to(gl.float32)[:, None]
    if KIND.is_gated:
        # Rounded where the two-step version stores: both give the same bits but for the order of the sums.
        both = total.to(dtype).to(gl.float32).reshape([BLOCK // 16, 2, 8, ROW_TILE]).permute((0, 2, 3, 1))
        gate, up = gl.split(both)
        values = _activate(gate, up, ACTIVATION).reshape([FEATURES, ROW_TILE])
    else:
        values = total
        if KIND.experts_per_token > 0:
            columns = gl.arange(0, ROW_TILE, gl.SliceLayout(0, OF_SUMS))
            is_pair = columns < rows
            pairs = gl.load(order_ptr + row + columns, mask=is_pair, other=0)
            values *= gl.load(weights_ptr + pairs, mask=is_pair, other=0.0)[None, :]
    out_smem.permute((1, 0)).store(values.to(dtype))
    LANES: gl.constexpr = FEATURES * OUT_BYTES // 16
    in_memory: gl.constexpr = gl.BlockedLayout([1, 16 // OUT_BYTES], [32 // LANES, LANES], [4, 1], [1, 0])
    inner_rows = gl.arange(0, ROW_TILE, gl.SliceLayout(1, in_memory))
    features = block * FEATURES + gl.arange(0, FEATURES, gl.SliceLayout(0, in_memory))
    is_row = inner_rows < rows
    if KIND.experts_per_token > 0 and not KIND.is_gated:
        pair = gl.load(order_ptr + row + inner_rows, mask=is_row, other=0)
        out_rows = pair % KIND.experts_per_token * num_rows + pair // KIND.experts_per_token
    else:
        out_rows = part * num_rows + row + inner_rows
    places = out_rows.to(gl.int64)[:, None] * out_features + features[None, :]
    gl.store(out_ptr + places, out_smem.load(in_memory), mask=is_row[:, None] & (features < out_features)[None, :])


@gluon.jit
def _multiply(result, work, stages, all_out_smem, SELF: gl.constexpr, KIND: gl.constexpr):
    """Multiply `blocks` blocks of each strip: the work of group SELF."""
    BLOCKS: gl.constexpr = KIND.blocks
    ALL_BLOCKS: gl.constexpr = KIND.all_blocks
    NUM_STAGES: gl.constexpr = KIND.num_stages
    ROW_TILE: gl.constexpr = KIND.row_tile
    x_smem, words_smem, scales_smem, full, free = stages
    num_tiles = work[1]
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROW_TILE, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, of_sums, 2)
    DTYPE: gl.constexpr = x_smem.dtype
    out_smem = all_out_smem.index(SELF)
    i = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert, row, rows, strip, part, first, end = _tile(tile, work, KIND)
        if rows > 0:
            block = strip * ALL_BLOCKS + SELF * BLOCKS
            totals = (gl.zeros([BLOCK, ROW_TILE], gl.float32, of_sums),) * BLOCKS
            for _ in range(first, end):
                stage = i % NUM_STAGES
                phase = (i // NUM_STAGES) & 1
                i += 1
                mbarrier.wait(full.index(stage), phase)
                under_way = totals[:0]
                for n in gl.static_range(BLOCKS):
                    at = stage * ALL_BLOCKS + SELF * BLOCKS + n
                    under_way += (
                        _add_block(totals[n], words_smem, scales_smem, x_smem, at, stage, KIND, DTYPE, operand),
                    )
                # ptxas would wait for each product, were one under way when the next tile begins.
                ended = warpgroup_mma_wait(0, deps=under_way)
                totals = (ended,) if BLOCKS == 1 else ended
                mbarrier.arrive(free.index(stage), count=1)
            for n in gl.static_range(BLOCKS):
                _finish(totals[n], result, out_smem, (expert, row, rows, part), block + n, KIND, of_sums)


@gluon.jit(do_not_specialize=["num_rows", "num_tiles", "part_tiles", "strips", "in_tiles", "row_blocks"])
def hopper_w4_kernel(
    x_desc,  # of [T, in]; tiles [ROW_TILE, PART]
    words_desc,  # of int16; tiles `HopperW4Kind.words_tile`
    scales_desc,  # of [E × groups or tiles, rows / 16, 2, 8] int32; tiles [SCALE_WORDS, BLOCK / 16, 2, 8]
    bias_ptr,  # None, or [E, out or 2 out]
    items_ptr,  # of experts: [N, ITEM_FIELDS] int32
    order_ptr,  # of experts: [pairs] int32
    weights_ptr,  # of experts, not GATED: [pairs] float32
    out_ptr,  # [P, T, out], or of experts and not GATED [k, T, out] by pair, written
    num_rows,  # T; of a result by pair the tokens
    num_tiles,
    part_tiles,  # of 128 input features, of every part but the last
    strips,  # of features
    in_tiles,
    row_blocks,  # of R rows, of an expert
    out_features,
    KIND: gl.constexpr,
):
    NUM_GROUPS: gl.constexpr = GROUPS
    NUM_STAGES: gl.constexpr = KIND.num_stages
    FEATURES: gl.constexpr = BLOCK // 2 if KIND.is_gated else BLOCK
    out_dtype: gl.constexpr = out_ptr.dtype.element_ty
    in_panels: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    in_words: gl.constexpr = gl.NVMMASharedLayout(2 * KIND.piece_words, 16, 2)
    num_pieces: gl.constexpr = NUM_STAGES * KIND.all_blocks * KIND.pieces
    of_scales: gl.constexpr = gl.NVMMASharedLayout(32, 32, 2)
    of_result: gl.constexpr = gl.NVMMASharedLayout(64 if KIND.is_gated else 128, KIND.out_bytes * 8, 2)
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [NUM_STAGES * _PARTS, KIND.row_tile, PART], in_panels)
    words_smem = gl.allocate_shared_memory(gl.int16, [num_pieces, BLOCK, KIND.piece_words], in_words)
    num_groups: gl.constexpr = NUM_STAGES * KIND.all_blocks * KIND.scale_words
    scales_smem = gl.allocate_shared_memory(gl.int32, [num_groups, BLOCK // 8, 8], of_scales)
    out_smem = gl.allocate_shared_memory(out_dtype, [NUM_GROUPS, KIND.row_tile, FEATURES], of_result)
    full, free = make_barriers(NUM_STAGES, NUM_GROUPS)
    stages = (x_smem, words_smem, scales_smem, full, free)
    work = (num_rows, num_tiles, part_tiles, strips, in_tiles, row_blocks, items_ptr)
    result = (bias_ptr, order_ptr, weights_ptr, out_ptr, num_rows, out_features)
    gl.warp_specialize(
        [
            (_multiply, (result, work, stages, out_smem, 0, KIND)),
            (_multiply, (result, work, stages, out_smem, 1, KIND)),
            (_load, ((x_desc, words_desc, scales_desc), work, stages, KIND)),
        ],
        [4, LOADING_WARPS],
        [240, LOADING_REGISTERS],
    )
