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

Experts of a mixture are multiplied likewise: rows are sorted by expert, and a tile is an item of the work list
(`expert_groups.py`). The rows behind an item's last are another expert's, so that results are stored row by row. What
lies behind the last feature of a gate or an up projection is up's or another expert's: its scales are taken to be 0.

There are as many programs as multiprocessors. They take the tiles of features of a band of rows one after the other, so
that programs at work at the same time find both factors in the L2 cache.

`hopper_fp8.py` launches it and says what it serves. Gluon has no interpreter: tests simulate it.
Shapes: T rows of activations, `in` and `out` features, G = in / 128, rounded up.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nvcli.kernels.expert_settings import ExpertActivation
from nvcli.kernels.fp8_types import FP8_MAX, LEAST_MAX
from nvcli.kernels.triton.launch.hopper_stages import LOADING_REGISTERS, LOADING_WARPS, make_barriers
from nvcli.kernels.triton.launch.triton_version import reinterpret, tma_load, tma_store
from nvcli.kernels.triton.products.expert_groups import ITEM_FIELDS
from nvcli.kernels.weight_formats import FP8_BLOCK

ROWS = gl.constexpr(64)
"""The rows of a group of warps that multiplies."""
BLOCK = gl.constexpr(FP8_BLOCK)
"""The features of a block, and the input features of a tile."""
_MAX = gl.constexpr(FP8_MAX)
_LEAST = gl.constexpr(LEAST_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperFP8Kind:
    """The constants of a compiled kernel."""

    groups: int
    """Groups of warps that multiply."""
    blocks: int
    """Blocks of features in a strip."""
    num_stages: int
    unit_tiles: int | None
    """See `HopperFP8Launch`."""
    by_blocks: bool
    activation: ExpertActivation | None
    """The activation of a gated product; None: it is none."""
    experts_per_token: int
    """0: the product of a linear layer."""


@gluon.jit
def _tile(tile, work, KIND: gl.constexpr):
    """Return the expert of a tile, its first row, the number of rows from there on, and its strip of features."""
    num_rows, _, strips, rows_together, _, items_ptr = work
    ROW_TILE: gl.constexpr = KIND.groups * ROWS
    if KIND.experts_per_token > 0:
        item_ptr = items_ptr + tile // strips * ITEM_FIELDS
        expert = gl.load(item_ptr)
        row = gl.load(item_ptr + 1)
        rows = gl.load(item_ptr + 2)
        strip = tile % strips
    else:
        row_tiles = gl.cdiv(num_rows, ROW_TILE)
        band = rows_together * strips
        first = tile // band * rows_together
        together = gl.minimum(row_tiles - first, rows_together)
        expert = 0
        row = (first + tile % band % together) * ROW_TILE
        rows = num_rows - row
        strip = tile % band // together
    return expert, row, rows, strip


@gluon.jit
def _weight_row(strip, block: gl.constexpr, expert_rows, KIND: gl.constexpr):
    """Return the first of the rows of an expert's weight that a block of a strip has."""
    return block * (expert_rows // 2) + strip * BLOCK if _is_gated(KIND) else (strip * KIND.blocks + block) * BLOCK


@gluon.constexpr_function
def _is_gated(kind):
    return kind.activation is not None


@gluon.jit
def _load(x_desc, weight_desc, work, factors, expert_rows, KIND: gl.constexpr):
    """Load tiles: the work of the loading warp. `expert_rows`: rows of an expert's weight."""
    num_tiles, in_tiles = work[1], work[4]
    x_smem, weight_smem, full, free = factors
    GROUPS: gl.constexpr = KIND.groups
    BLOCKS: gl.constexpr = KIND.blocks
    NUM_BYTES: gl.constexpr = (GROUPS * ROWS + BLOCKS * BLOCK) * BLOCK
    i = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert, row, rows, strip = _tile(tile, work, KIND)
        if KIND.experts_per_token > 0:
            in_tiles = gl.where(rows > 0, work[4], 0)
        for inner in range(in_tiles):
            stage = i % KIND.num_stages
            phase = (i // KIND.num_stages) & 1
            i += 1
            mbarrier.wait(free.index(stage), phase ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, NUM_BYTES)
            for group in gl.static_range(GROUPS):
                part = x_smem.index(stage * GROUPS + group)
                tma_load(x_desc, [row + group * ROWS, inner * BLOCK], bar, part)
            for block in gl.static_range(BLOCKS):
                feature = _weight_row(strip, block, expert_rows, KIND)
                if KIND.experts_per_token > 0:
                    feature += expert * expert_rows
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
def _activate(gate, up, KIND: gl.constexpr):
    """See `ExpertActivation`. float32. The approximation of gelu: x (1 + tanh(y)) / 2 is x sigmoid(2 y)."""
    if KIND.activation.limit > 0:
        values = _clamped(gate, up, KIND)
    else:
        argument = gate
        if KIND.activation.kind == "gelu_tanh":
            argument = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
        values = gate * _sigmoid(argument) * up
    return values


@gluon.constexpr_function
def _clamped_code(kind):
    activation = kind.activation
    if activation.kind == "clamped_silu":
        return f"""{{
        .reg .f32 gate, up;
        mul.f32 gate, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 gate, gate;
        add.f32 gate, gate, 0f3F800000;
        rcp.approx.ftz.f32 gate, gate;
        mul.f32 gate, gate, $1;
        min.NaN.f32 gate, gate, {activation.limit:.9e};
        min.NaN.f32 up, $2, {activation.limit:.9e};
        max.NaN.f32 up, up, {-activation.limit:.9e};
        mul.f32 $0, gate, up;
    }}"""
    return f"""{{
        .reg .f32 gate, up, t;
        min.NaN.f32 gate, $1, {activation.limit:.9e};
        min.NaN.f32 up, $2, {activation.limit:.9e};
        max.NaN.f32 up, up, {-activation.limit:.9e};
        mul.f32 t, gate, {activation.offset:.9e};
        fma.rn.f32 up, up, gate, t;
        mul.f32 t, gate, {-1.4426950408889634 * activation.alpha:.9e};
        ex2.approx.ftz.f32 t, t;
        add.f32 t, t, 0f3F800000;
        rcp.approx.ftz.f32 t, t;
        mul.f32 $0, t, up;
    }}"""


@gluon.jit
def _clamped(gate, up, KIND: gl.constexpr):
    """Compute it in one piece, as there are no registers for what comes between."""
    CODE: gl.constexpr = _clamped_code(KIND)
    return gl.inline_asm_elementwise(CODE, "=f,f,f", [gate, up], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _exponents(numbers):
    """Return the exponents, as float32 has them, of the least powers of two that are not below positive numbers."""
    return (numbers.to(gl.int32, bitcast=True) + 0x7FFFFF) >> 23


@gluon.jit
def _inverse_powers(exponents):
    """Return 1 divided by powers of two, of which the exponents are given."""
    return ((254 - exponents) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _sum_whole(i, in_tiles, factors, SELF: gl.constexpr, KIND: gl.constexpr, OF_SUMS: gl.constexpr):
    """Leave whole sums to the FP8 units, after `i` tiles. Return how many tiles have come then, and the sums of each
    block."""
    BLOCKS: gl.constexpr = KIND.blocks
    x_smem, weight_smem, full, free = factors
    of_weight: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    of_blocks: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCKS * BLOCK, 32])
    weights = reinterpret(weight_smem, weight_smem.dtype, [KIND.num_stages, BLOCKS * BLOCK, BLOCK], of_weight)
    sums = gl.zeros([ROWS, BLOCKS * BLOCK], gl.float32, of_blocks)
    for inner in range(in_tiles):
        stage = i % KIND.num_stages
        mbarrier.wait(full.index(stage), (i // KIND.num_stages) & 1)
        x = x_smem.index(stage * KIND.groups + SELF)
        product = warpgroup_mma(x, weights.index(stage).permute((1, 0)), sums, is_async=True)
        sums = warpgroup_mma_wait(1, deps=[product])  # that of the tile before has ended
        mbarrier.arrive(free.index((i + KIND.num_stages - 1) % KIND.num_stages), count=1, pred=inner > 0)
        i += 1
    sums = warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(free.index((i + KIND.num_stages - 1) % KIND.num_stages), count=1)
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
    KIND: gl.constexpr,
    OF_SUMS: gl.constexpr,
):
    """Add up in float32 what the FP8 units make of `unit_tiles` tiles at a time, block after block. Return how many
    units have come then (Triton 3.6 takes a count that loops do not raise by one each time to be constant), and the
    totals of each block."""
    UNIT_TILES: gl.constexpr = KIND.unit_tiles
    BLOCKS: gl.constexpr = KIND.blocks
    x_smem, weight_smem, full, free = factors
    no_sums = gl.zeros([ROWS, BLOCK], gl.float32, OF_SUMS)
    next_scales = row_scales
    totals = (no_sums,) * BLOCKS
    for inner in range(in_tiles // UNIT_TILES):
        if KIND.by_blocks:  # loaded a tile ahead of their use
            row_scales = next_scales
            next_scales = gl.load(x_scale_ptrs + gl.minimum(inner + 1, in_tiles - 1))
        new_totals = totals[:0]
        for block in gl.static_range(BLOCKS):
            sum_scales = row_scales
            if KIND.by_blocks:
                sum_scales = row_scales * gl.load(weight_scales_ptr + (strip * BLOCKS + block) * in_tiles + inner)
            sums = no_sums
            for n in gl.static_range(UNIT_TILES):
                tile = i * UNIT_TILES + n
                stage = tile % KIND.num_stages
                if block == 0:
                    mbarrier.wait(full.index(stage), (tile // KIND.num_stages) & 1)
                x = x_smem.index(stage * KIND.groups + SELF)
                weight = weight_smem.index(stage * BLOCKS + block).permute((1, 0))
                sums = warpgroup_mma(x, weight, sums, use_acc=n > 0, is_async=True)
                if block == BLOCKS - 1 and n > 0:
                    sums = warpgroup_mma_wait(1, deps=[sums])
                    mbarrier.arrive(free.index((tile - 1) % KIND.num_stages), count=1)
            sums = warpgroup_mma_wait(0, deps=[sums])
            if block == BLOCKS - 1:
                mbarrier.arrive(free.index((i * UNIT_TILES + UNIT_TILES - 1) % KIND.num_stages), count=1)
            if KIND.by_blocks:
                sums = sums * sum_scales[:, None]
            new_totals += (totals[block] + sums,)
        totals = new_totals
        i += 1
    return i, totals


@gluon.jit
def _store(values, out, row, rows, feature, KIND: gl.constexpr):
    """Store a block of results, of which `rows` are to be stored where there are experts."""
    out_desc, _, out_features, out_smem, out_ptr, order_ptr, _, num_tokens = out
    if KIND.experts_per_token == 0:
        tma.store_wait(0)
        out_smem.store(values)
        fence_async_shared()
        tma_store(out_desc, [row, feature], out_smem)
    else:
        out_smem.store(values)
        WIDTH: gl.constexpr = 16 if _is_gated(KIND) else 8  # numbers of 16 bytes
        LANES: gl.constexpr = BLOCK // WIDTH
        in_memory: gl.constexpr = gl.BlockedLayout([1, WIDTH], [32 // LANES, LANES], [4, 1], [1, 0])
        inner_rows = gl.arange(0, ROWS, gl.SliceLayout(1, in_memory))
        features = feature + gl.arange(0, BLOCK, gl.SliceLayout(0, in_memory))
        is_row = inner_rows < rows
        out_rows = row + inner_rows
        if not _is_gated(KIND):
            pairs = gl.load(order_ptr + out_rows, mask=is_row, other=0)
            out_rows = pairs % KIND.experts_per_token * num_tokens + pairs // KIND.experts_per_token
        places = out_rows.to(gl.int64)[:, None] * out_features + features[None, :]
        mask = is_row[:, None] & (features < out_features)[None, :]
        gl.store(out_ptr + places, out_smem.load(in_memory), mask=mask)


@gluon.jit
def _multiply_tile(i, tile, scales, out, work, factors, expert_rows, SELF: gl.constexpr, KIND: gl.constexpr):
    """Multiply a group's 64 rows of a tile, and store the results. Return the count of `_sum_whole` or
    `_sum_in_units`."""
    x_scales_ptr, weight_scales_ptr, bias_ptr = scales
    out_desc, exponents_ptr, out_features, _, _, order_ptr, pair_weights_ptr, _ = out
    num_rows, strips, in_tiles = work[0], work[2], work[4]
    expert, row, rows, strip = tile
    BLOCKS: gl.constexpr = KIND.blocks
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    inner_columns = gl.arange(0, BLOCK, gl.SliceLayout(0, of_sums))
    inner_rows = gl.arange(0, ROWS, gl.SliceLayout(1, of_sums))
    row += SELF * ROWS
    rows -= SELF * ROWS
    x_scale_ptrs = x_scales_ptr + gl.minimum(row + inner_rows, num_rows - 1) * (in_tiles if KIND.by_blocks else 1)
    row_scales = gl.load(x_scale_ptrs)
    if KIND.experts_per_token > 0:
        weight_scales_ptr += expert * expert_rows
        if bias_ptr is not None:
            bias_ptr += expert * expert_rows
        if not _is_gated(KIND):
            pairs = gl.load(order_ptr + row + inner_rows, mask=inner_rows < rows, other=0)
            pair_weights = gl.load(pair_weights_ptr + pairs)
    if KIND.unit_tiles is None:
        i, totals = _sum_whole(i, in_tiles, factors, SELF, KIND, of_sums)
    else:
        i, totals = _sum_in_units(
            i, in_tiles, strip, row_scales, x_scale_ptrs, weight_scales_ptr, factors, SELF, KIND, of_sums
        )  # fmt: skip
    if _is_gated(KIND):
        size = expert_rows // 2
        features = strip * BLOCK + inner_columns
        inside = features < size
        both = totals[:0]
        for block in gl.static_range(2):
            weight_scales = gl.load(weight_scales_ptr + block * size + features, mask=inside, other=0.0)
            result = totals[block] * row_scales[:, None] * weight_scales[None, :]
            if bias_ptr is not None:
                bias = gl.load(bias_ptr + block * size + features, mask=inside, other=0.0)
                result += bias.to(gl.float32)[None, :]
            both += (result,)
        values = _activate(both[0], both[1], KIND)
        exponents = _exponents(gl.maximum(gl.max(gl.abs(values), 1), _LEAST) * (1.0 / _MAX))
        exponents_ptrs = exponents_ptr + (row + inner_rows) * strips + strip
        gl.store(exponents_ptrs, exponents.to(gl.uint8), mask=inner_rows < rows)
        values *= _inverse_powers(exponents)[:, None]
        _store(values.to(out_desc.dtype), out, row, rows, strip * BLOCK, KIND)
    else:
        for block in gl.static_range(BLOCKS):
            result = totals[block]
            feature = (strip * BLOCKS + block) * BLOCK
            if not KIND.by_blocks:
                features = feature + inner_columns
                weight_scales = gl.load(weight_scales_ptr + features, mask=features < out_features, other=0.0)
                result *= row_scales[:, None] * weight_scales[None, :]
                if bias_ptr is not None:
                    bias = gl.load(bias_ptr + features, mask=features < out_features, other=0.0)
                    result += bias.to(gl.float32)[None, :]
            if KIND.experts_per_token > 0:
                result *= pair_weights[:, None]
            _store(result.to(out_desc.dtype), out, row, rows, feature, KIND)
    return i


@gluon.jit
def _multiply(scales, out, work, factors, expert_rows, SELF: gl.constexpr, KIND: gl.constexpr):
    """Multiply 64 rows of each tile: the work of group SELF."""
    out_desc, exponents_ptr, out_features, all_out_smem, out_ptr, order_ptr, pair_weights_ptr, num_tokens = out
    out_smem = all_out_smem.index(SELF)
    out = (out_desc, exponents_ptr, out_features, out_smem, out_ptr, order_ptr, pair_weights_ptr, num_tokens)
    i = 0
    for tile in range(gl.program_id(0), work[1], gl.num_programs(0)):
        place = _tile(tile, work, KIND)
        is_there = True
        if KIND.experts_per_token > 0:
            is_there = place[2] > 0
        if is_there:
            i = _multiply_tile(i, place, scales, out, work, factors, expert_rows, SELF, KIND)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["num_rows", "num_tiles", "strips", "rows_together", "in_tiles", "expert_rows", "num_tokens"],
    do_not_specialize_on_alignment=["x_scales_ptr"],
)
def hopper_fp8_kernel(
    x_desc,  # of [T, in] e4m3; tiles [ROWS, BLOCK]
    x_scales_ptr,  # [T] float32, or BY_BLOCKS [T, G]
    weight_desc,  # of [out, in] e4m3, GATED [2 out, in], of experts one below the other; tiles [BLOCK, BLOCK]
    weight_scales_ptr,  # [out] float32, GATED [2 out], or BY_BLOCKS [out / 128, rounded up, G]; of experts likewise
    out_desc,  # of [T, out], written, GATED in e4m3; tiles [ROWS, BLOCK]
    bias_ptr,  # of experts: None, or [E, expert_rows]
    exponents_ptr,  # GATED: [T, out / 128] uint8, written: the scales of blocks, which are powers of two
    out_ptr,  # of experts: what `out_desc` describes; but for GATED [k, tokens, out] by pair
    items_ptr,  # of experts: [N, ITEM_FIELDS] int32
    order_ptr,  # of experts: [T] int32
    pair_weights_ptr,  # of experts: [T] float32
    num_rows,
    num_tiles,
    strips,  # of features
    rows_together,  # tiles of rows in a band
    in_tiles,
    out_features,  # GATED: whole blocks
    expert_rows,  # of an expert's weight, or of the weight
    num_tokens,  # of experts
    KIND: gl.constexpr,
):
    of_factors: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [KIND.num_stages * KIND.groups, ROWS, BLOCK], of_factors)
    weight_smem = gl.allocate_shared_memory(
        weight_desc.dtype, [KIND.num_stages * KIND.blocks, BLOCK, BLOCK], of_factors
    )
    out_smem = gl.allocate_shared_memory(out_desc.dtype, [KIND.groups, ROWS, BLOCK], out_desc.layout)
    full, free = make_barriers(KIND.num_stages, KIND.groups)
    factors = (x_smem, weight_smem, full, free)
    work = (num_rows, num_tiles, strips, rows_together, in_tiles, items_ptr)
    scales = (x_scales_ptr, weight_scales_ptr, bias_ptr)
    out = (out_desc, exponents_ptr, out_features, out_smem, out_ptr, order_ptr, pair_weights_ptr, num_tokens)
    if KIND.groups == 2:
        gl.warp_specialize(
            [
                (_multiply, (scales, out, work, factors, expert_rows, 0, KIND)),
                (_multiply, (scales, out, work, factors, expert_rows, 1, KIND)),
                (_load, (x_desc, weight_desc, work, factors, expert_rows, KIND)),
            ],
            [4, LOADING_WARPS],
            [240, LOADING_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (scales, out, work, factors, expert_rows, 0, KIND)),
                (_multiply, (scales, out, work, factors, expert_rows, 1, KIND)),
                (_multiply, (scales, out, work, factors, expert_rows, 2, KIND)),
                (_load, (x_desc, weight_desc, work, factors, expert_rows, KIND)),
            ],
            [4, 4, LOADING_WARPS],
            [160, 160, LOADING_REGISTERS],
        )
