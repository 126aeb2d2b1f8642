"""Products of many rows with FP8 weights for Hopper GPUs, in Gluon, the layer of Triton that says which warps do what.

A program has groups of warps. One brings tiles of 128 input features to shared memory by TMA. Each of the other ones
multiplies 64 rows by one block of 128 features of the weight, or by two. FP8 units keep about 14 bits of a sum: they
add up the products of some tiles, and each group adds these sums up in float32 registers while another group multiplies
(DeepSeek-V3, 2024, section 3.3.2). With scales by blocks these are tiles of one scale for each row and another for the
block, by which the sums are scaled as they are added. Where the units are left whole sums, two blocks are multiplied at
once, which reads the rows from shared memory half as often.

The gate and the up projection are multiplied together: the two blocks of a group have the same 128 features of both.
The group writes FP8 codes of the activated numbers, with a scale for the 128 of each row. These scales are powers of
two, so that another kernel may give a row one scale, by which codes lose nothing but what is too small for FP8 then.

There are as many programs as multiprocessors. They take the tiles of features of a band of rows one after the other, so
that programs at work at the same time find both factors in the L2 cache.

`hopper_fp8.py` launches it and says what it serves. Gluon has no interpreter: tests simulate it.
Shapes: T rows of activations, `in` and `out` features, G = in / 128, rounded up.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nvcli.kernels.fp8_types import FP8_MAX, LEAST_MAX
from nvcli.kernels.triton.launch.hopper_stages import LOADING_REGISTERS, LOADING_WARPS, make_barriers
from nvcli.kernels.triton.launch.triton_version import reinterpret, tma_load, tma_store
from nvcli.kernels.weight_formats import FP8_BLOCK

ROWS = gl.constexpr(64)
"""The rows of a group of warps that multiplies."""
BLOCK = gl.constexpr(FP8_BLOCK)
"""The features of a block, and the input features of a tile."""
_MAX = gl.constexpr(FP8_MAX)
_LEAST = gl.constexpr(LEAST_MAX)


@gluon.jit
def _tile(tile, num_rows, strips, rows_together, ROW_TILE: gl.constexpr):
    """Return the first row of a tile, and its strip of features."""
    row_tiles = gl.cdiv(num_rows, ROW_TILE)
    band = rows_together * strips
    first = tile // band * rows_together
    together = gl.minimum(row_tiles - first, rows_together)
    return (first + tile % band % together) * ROW_TILE, tile % band // together


@gluon.jit
def _weight_block(strip, block: gl.constexpr, strips, BLOCKS: gl.constexpr, GATED: gl.constexpr):
    """Return which 128 rows of the weight a block of a strip has."""
    return block * strips + strip if GATED else strip * BLOCKS + block


@gluon.jit
def _load(
    x_desc,
    weight_desc,
    tiles,
    GROUPS: gl.constexpr,
    BLOCKS: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    GATED: gl.constexpr,
):
    """Load tiles: the work of the loading warp."""
    num_rows, num_tiles, strips, rows_together, in_tiles, x_smem, weight_smem, full, free = tiles
    NUM_BYTES: gl.constexpr = (GROUPS * ROWS + BLOCKS * BLOCK) * BLOCK
    i = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row, strip = _tile(tile, num_rows, strips, rows_together, GROUPS * ROWS)
        for inner in range(in_tiles):
            stage = i % NUM_STAGES
            phase = (i // NUM_STAGES) & 1
            i += 1
            mbarrier.wait(free.index(stage), phase ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, NUM_BYTES)
            for group in gl.static_range(GROUPS):
                part = x_smem.index(stage * GROUPS + group)
                tma_load(x_desc, [row + group * ROWS, inner * BLOCK], bar, part)
            for block in gl.static_range(BLOCKS):
                feature = _weight_block(strip, block, strips, BLOCKS, GATED) * BLOCK
                part = weight_smem.index(stage * BLOCKS + block)
                tma_load(weight_desc, [feature, inner * BLOCK], bar, part)


@gluon.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)) in 4 instructions: Triton's own take care of denormal numbers, which FP8 has no room for."""
    return gl.inline_asm_elementwise(
        """{
            .reg .f32 t;
            mul.f32 t, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 t, t;
            add.f32 t, t, 0f3F800000;
            rcp.approx.ftz.f32 $0, t;
        }""",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _activate(gate, GELU: gl.constexpr):
    """silu(gate), or with GELU its tanh approximation: x (1 + tanh(y)) / 2 is x sigmoid(2 y). float32."""
    argument = gate
    if GELU:
        argument = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
    return gate * _sigmoid(argument)


@gluon.jit
def _exponents(numbers):
    """Return the exponents, as float32 has them, of the least powers of two that are not below positive numbers."""
    return (numbers.to(gl.int32, bitcast=True) + 0x7FFFFF) >> 23


@gluon.jit
def _inverse_powers(exponents):
    """Return 1 divided by powers of two, of which the exponents are given."""
    return ((254 - exponents) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _sum_whole(
    i,  # tiles that have come
    in_tiles,
    factors,
    SELF: gl.constexpr,
    GROUPS: gl.constexpr,
    BLOCKS: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    OF_SUMS: gl.constexpr,
):
    """Leave whole sums to the FP8 units. Return how many tiles have come then, and the sums of each block."""
    x_smem, weight_smem, full, free = factors
    of_weight: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    of_blocks: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCKS * BLOCK, 32])
    weights = reinterpret(weight_smem, weight_smem.dtype, [NUM_STAGES, BLOCKS * BLOCK, BLOCK], of_weight)
    sums = gl.zeros([ROWS, BLOCKS * BLOCK], gl.float32, of_blocks)
    for inner in range(in_tiles):
        stage = i % NUM_STAGES
        mbarrier.wait(full.index(stage), (i // NUM_STAGES) & 1)
        x = x_smem.index(stage * GROUPS + SELF)
        product = warpgroup_mma(x, weights.index(stage).permute((1, 0)), sums, is_async=True)
        sums = warpgroup_mma_wait(1, deps=[product])  # that of the tile before has ended
        mbarrier.arrive(free.index((i + NUM_STAGES - 1) % NUM_STAGES), count=1, pred=inner > 0)
        i += 1
    sums = warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(free.index((i + NUM_STAGES - 1) % NUM_STAGES), count=1)
    parts = (sums,) * BLOCKS
    if BLOCKS == 2:
        parts = gl.split(sums.reshape([ROWS, 2, BLOCK]).permute((0, 2, 1)))
    totals = parts[:0]
    for block in gl.static_range(BLOCKS):
        totals += (gl.convert_layout(parts[block], OF_SUMS),)
    return i, totals


@gluon.jit
def _sum_in_units(
    i,  # units of tiles that have come
    in_tiles,
    strip,
    row_scales,
    x_scale_ptrs,
    weight_scales_ptr,
    factors,
    SELF: gl.constexpr,
    GROUPS: gl.constexpr,
    BLOCKS: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    OF_SUMS: gl.constexpr,
    UNIT_TILES: gl.constexpr,
    BY_BLOCKS: gl.constexpr,
):
    """Add up in float32 what the FP8 units make of UNIT_TILES tiles at a time, block after block. Return how many units
    have come then (Triton 3.6 takes a count that loops do not raise by one each time to be constant), and the totals of
    each block."""
    x_smem, weight_smem, full, free = factors
    no_sums = gl.zeros([ROWS, BLOCK], gl.float32, OF_SUMS)
    next_scales = row_scales
    totals = (no_sums,) * BLOCKS
    for inner in range(in_tiles // UNIT_TILES):
        if BY_BLOCKS:  # loaded a tile ahead of their use
            row_scales = next_scales
            next_scales = gl.load(x_scale_ptrs + gl.minimum(inner + 1, in_tiles - 1))
        new_totals = totals[:0]
        for block in gl.static_range(BLOCKS):
            sum_scales = row_scales
            if BY_BLOCKS:
                sum_scales = row_scales * gl.load(weight_scales_ptr + (strip * BLOCKS + block) * in_tiles + inner)
            sums = no_sums
            for n in gl.static_range(UNIT_TILES):
                tile = i * UNIT_TILES + n
                stage = tile % NUM_STAGES
                if block == 0:
                    mbarrier.wait(full.index(stage), (tile // NUM_STAGES) & 1)
                x = x_smem.index(stage * GROUPS + SELF)
                weight = weight_smem.index(stage * BLOCKS + block).permute((1, 0))
                sums = warpgroup_mma(x, weight, sums, use_acc=n > 0, is_async=True)
                if block == BLOCKS - 1 and n > 0:
                    sums = warpgroup_mma_wait(1, deps=[sums])
                    mbarrier.arrive(free.index((tile - 1) % NUM_STAGES), count=1)
            sums = warpgroup_mma_wait(0, deps=[sums])
            if block == BLOCKS - 1:
                mbarrier.arrive(free.index((i * UNIT_TILES + UNIT_TILES - 1) % NUM_STAGES), count=1)
            if BY_BLOCKS:
                sums = sums * sum_scales[:, None]
            new_totals += (totals[block] + sums,)
        totals = new_totals
        i += 1
    return i, totals


@gluon.jit
def _multiply(
    scales,
    out,
    tiles,
    SELF: gl.constexpr,
    GROUPS: gl.constexpr,
    BLOCKS: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    BY_BLOCKS: gl.constexpr,
    GATED: gl.constexpr,
    GELU: gl.constexpr,
    UNIT_TILES: gl.constexpr,
):
    """Multiply 64 rows of each tile: the work of group SELF."""
    x_scales_ptr, weight_scales_ptr = scales
    out_desc, exponents_ptr, out_features, all_out_smem = out
    num_rows, num_tiles, strips, rows_together, in_tiles, x_smem, weight_smem, full, free = tiles
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    factors = (x_smem, weight_smem, full, free)
    out_smem = all_out_smem.index(SELF)
    inner_columns = gl.arange(0, BLOCK, gl.SliceLayout(0, of_sums))
    inner_rows = gl.arange(0, ROWS, gl.SliceLayout(1, of_sums))
    i = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row, strip = _tile(tile, num_rows, strips, rows_together, GROUPS * ROWS)
        row += SELF * ROWS
        rows = row + inner_rows
        x_scale_ptrs = x_scales_ptr + gl.minimum(rows, num_rows - 1) * (in_tiles if BY_BLOCKS else 1)
        row_scales = gl.load(x_scale_ptrs)
        if UNIT_TILES is None:
            i, totals = _sum_whole(i, in_tiles, factors, SELF, GROUPS, BLOCKS, NUM_STAGES, of_sums)
        else:
            i, totals = _sum_in_units(
                i, in_tiles, strip, row_scales, x_scale_ptrs, weight_scales_ptr, factors, SELF,
                GROUPS, BLOCKS, NUM_STAGES, of_sums, UNIT_TILES, BY_BLOCKS,
            )  # fmt: skip
        if GATED:
            gate_scales = gl.load(weight_scales_ptr + strip * BLOCK + inner_columns)
            up_scales = gl.load(weight_scales_ptr + (strips + strip) * BLOCK + inner_columns)
            gate = totals[0] * row_scales[:, None] * gate_scales[None, :]
            up = totals[1] * row_scales[:, None] * up_scales[None, :]
            values = _activate(gate, GELU) * up
            exponents = _exponents(gl.maximum(gl.max(gl.abs(values), 1), _LEAST) * (1.0 / _MAX))
            gl.store(exponents_ptr + rows * strips + strip, exponents.to(gl.uint8), mask=rows < num_rows)
            values *= _inverse_powers(exponents)[:, None]
            values = values.to(out_desc.dtype)
            tma.store_wait(0)
            out_smem.store(values)
            fence_async_shared()
            tma_store(out_desc, [row, strip * BLOCK], out_smem)
        else:
            for block in gl.static_range(BLOCKS):
                result = totals[block]
                feature = (strip * BLOCKS + block) * BLOCK
                if not BY_BLOCKS:
                    features = feature + inner_columns
                    weight_scales = gl.load(weight_scales_ptr + features, mask=features < out_features, other=0.0)
                    result *= row_scales[:, None] * weight_scales[None, :]
                values = result.to(out_desc.dtype)
                tma.store_wait(0)
                out_smem.store(values)
                fence_async_shared()
                tma_store(out_desc, [row, feature], out_smem)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["num_rows", "num_tiles", "strips", "rows_together", "in_tiles"],
    do_not_specialize_on_alignment=["x_scales_ptr"],
)
def hopper_fp8_kernel(
    x_desc,  # of [T, in] e4m3; tiles [ROWS, BLOCK]
    x_scales_ptr,  # [T] float32, or BY_BLOCKS [T, G]
    weight_desc,  # of [out, in] e4m3, GATED [2 out, in]; tiles [BLOCK, BLOCK]
    weight_scales_ptr,  # [out] float32, GATED [2 out], or BY_BLOCKS [out / 128, rounded up, G]
    out_desc,  # of [T, out], written, GATED in e4m3; tiles [ROWS, BLOCK]
    exponents_ptr,  # GATED: [T, out / 128] uint8, written: the scales of blocks, which are powers of two
    num_rows,
    num_tiles,
    strips,  # of features
    rows_together,  # tiles of rows in a band
    in_tiles,
    out_features,
    GROUPS: gl.constexpr,
    BLOCKS: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    BY_BLOCKS: gl.constexpr,
    GATED: gl.constexpr,
    GELU: gl.constexpr,
    UNIT_TILES: gl.constexpr,
):
    of_factors: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [NUM_STAGES * GROUPS, ROWS, BLOCK], of_factors)
    weight_smem = gl.allocate_shared_memory(weight_desc.dtype, [NUM_STAGES * BLOCKS, BLOCK, BLOCK], of_factors)
    out_smem = gl.allocate_shared_memory(out_desc.dtype, [GROUPS, ROWS, BLOCK], out_desc.layout)
    full, free = make_barriers(NUM_STAGES, GROUPS)
    tiles = (num_rows, num_tiles, strips, rows_together, in_tiles, x_smem, weight_smem, full, free)
    scales = (x_scales_ptr, weight_scales_ptr)
    out = (out_desc, exponents_ptr, out_features, out_smem)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (scales, out, tiles, 0, GROUPS, BLOCKS, NUM_STAGES, BY_BLOCKS, GATED, GELU, UNIT_TILES)),
                (_multiply, (scales, out, tiles, 1, GROUPS, BLOCKS, NUM_STAGES, BY_BLOCKS, GATED, GELU, UNIT_TILES)),
                (_load, (x_desc, weight_desc, tiles, GROUPS, BLOCKS, NUM_STAGES, GATED)),
            ],
            [4, LOADING_WARPS],
            [240, LOADING_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (scales, out, tiles, 0, GROUPS, BLOCKS, NUM_STAGES, BY_BLOCKS, GATED, GELU, UNIT_TILES)),
                (_multiply, (scales, out, tiles, 1, GROUPS, BLOCKS, NUM_STAGES, BY_BLOCKS, GATED, GELU, UNIT_TILES)),
                (_multiply, (scales, out, tiles, 2, GROUPS, BLOCKS, NUM_STAGES, BY_BLOCKS, GATED, GELU, UNIT_TILES)),
                (_load, (x_desc, weight_desc, tiles, GROUPS, BLOCKS, NUM_STAGES, GATED)),
            ],
            [4, 4, LOADING_WARPS],
            [160, 160, LOADING_REGISTERS],
        )
