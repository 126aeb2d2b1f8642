"""Products of up to some hundred rows with FP8 weights for Hopper GPUs, in Gluon, the layer of Triton that says which
warps do what.

A program has groups of warps. One brings tiles of 128 input features to shared memory by TMA; two multiply them, half
of the rows each. Features of the weight are the first factor of the matrix units, 64 of them in a block, and rows of
activations are the second one. So a program takes all rows of a decode step, and a weight is read once.

FP8 units, which keep about 14 bits of a sum, add up the products of 128 input features, and these sums are added up in
float32. While one group adds, the matrix units work for the other one.

An item of work is a strip of features times a tile of rows. Halves of items share out the work where there are too few
whole ones to keep all multiprocessors busy until the end: half of the features, or half of the rows where these are
more, so that less is read. The input features may be cut into parts, whose results the norm behind the product adds up.

With programmatic dependent launch the kernel begins while the one before it ends: it brings the first tiles of the
weight, and waits for that kernel before it touches anything else.

`hopper_fp8_decode.py` launches it and says what it serves. Gluon has no interpreter: tests simulate it.
Shapes: T rows of activations, `in` and `out` features, P parts.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from nvcli.kernels.triton.launch.hopper_stages import LOADING_REGISTERS, LOADING_WARPS, make_barriers
from nvcli.kernels.triton.launch.triton_version import tma_load

BLOCK = gl.constexpr(64)
"""The features that are multiplied at once."""
TILE = gl.constexpr(128)
"""The input features of a tile."""
GROUPS = gl.constexpr(2)
"""The groups of warps that multiply, and the blocks of a whole strip."""
_MULTIPLYING_REGISTERS = gl.constexpr(240)


@gluon.jit
def _wait_for_kernel_before():
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def halves_rows(row_tile):
    """Whether half of an item has half of its rows, or else of its features."""
    return row_tile > 128


@gluon.jit
def _item(item, work, ROW_TILE: gl.constexpr):
    """Return the first row, the first feature and the part of an item, whether it is a whole one, its first tile of
    input features, and how many it has. Whole ones come first; tiles of rows that share features follow each other."""
    row_tiles, rest_tiles, half_tiles, whole_strips, half_strips, parts, _, part_tiles, in_tiles = work
    HALF_ROWS: gl.constexpr = ROW_TILE // 2 if halves_rows(ROW_TILE) else ROW_TILE
    HALF_FEATURES: gl.constexpr = GROUPS * BLOCK if halves_rows(ROW_TILE) else BLOCK
    whole_items = row_tiles * whole_strips  # of a part
    rest_items = rest_tiles * whole_strips
    is_whole = item < whole_items * parts
    if is_whole:
        part = item // whole_items
        feature = item % whole_items // row_tiles * (GROUPS * BLOCK)
        row = item % row_tiles * ROW_TILE
    else:
        half = item - whole_items * parts
        part = half // (rest_items + half_tiles * half_strips)
        at = half % (rest_items + half_tiles * half_strips) - rest_items
        if at < 0:  # behind the last tile of a whole strip
            feature = (at + rest_items) * (GROUPS * BLOCK)
            row = row_tiles * ROW_TILE
        else:
            feature = whole_strips * (GROUPS * BLOCK) + at // half_tiles * HALF_FEATURES
            row = at % half_tiles * HALF_ROWS
    first = part * part_tiles
    return row, feature, part, is_whole, first, gl.minimum(part_tiles, in_tiles - first)


@gluon.jit
def _load_weight(weight_desc, weight_smem, bar, stage, feature, start, is_whole, ROW_TILE: gl.constexpr):
    """Set the barrier for a tile's bytes, and load the weight's part of it."""
    HALVES_ROWS: gl.constexpr = halves_rows(ROW_TILE)
    HALF_BYTES: gl.constexpr = (GROUPS * BLOCK + ROW_TILE // 2 if HALVES_ROWS else BLOCK + ROW_TILE) * TILE
    mbarrier.expect(bar, (GROUPS * BLOCK + ROW_TILE) * TILE, pred=is_whole)
    mbarrier.expect(bar, HALF_BYTES, pred=is_whole == 0)
    for n in gl.static_range(GROUPS):
        is_there = is_whole | (HALVES_ROWS or n == 0)
        place = weight_smem.index(stage * GROUPS + n)
        tma_load(weight_desc, [feature + n * BLOCK, start], bar, place, pred=is_there)


@gluon.jit
def _load(x_desc, weight_desc, work, stages, ROW_TILE: gl.constexpr, NUM_STAGES: gl.constexpr):
    """Load tiles: the work of the loading warp."""
    x_smem, weight_smem, full, free = stages
    ROWS: gl.constexpr = ROW_TILE // GROUPS
    HALVES_ROWS: gl.constexpr = halves_rows(ROW_TILE)
    row, feature, _, is_whole, first, num_tiles = _item(gl.program_id(0), work, ROW_TILE)
    num_early = gl.minimum(num_tiles, NUM_STAGES)
    for early in range(num_early):
        bar = full.index(early)
        _load_weight(weight_desc, weight_smem, bar, early, feature, (first + early) * TILE, is_whole, ROW_TILE)
    _wait_for_kernel_before()
    i = 0
    for item in range(gl.program_id(0), work[6], gl.num_programs(0)):
        row, feature, _, is_whole, first, num_tiles = _item(item, work, ROW_TILE)
        for inner in range(first, first + num_tiles):
            stage = i % NUM_STAGES
            bar = full.index(stage)
            if i >= num_early:
                mbarrier.wait(free.index(stage), ((i // NUM_STAGES) & 1) ^ 1)
                _load_weight(weight_desc, weight_smem, bar, stage, feature, inner * TILE, is_whole, ROW_TILE)
            for n in gl.static_range(GROUPS):
                is_there = is_whole | (not HALVES_ROWS or n == 0)
                place = x_smem.index(stage * GROUPS + n)
                tma_load(x_desc, [row + n * ROWS, inner * TILE], bar, place, pred=is_there)
            i += 1


@gluon.jit
def _finish(
    total,
    result,
    out_smem,
    row,
    feature,
    part,
    OUT_BYTES: gl.constexpr,
    ROWS: gl.constexpr,
    OF_SUMS: gl.constexpr,
):
    """Scale and store the sums of a block: [BLOCK, ROWS]."""
    x_scales_ptr, weight_scales_ptr, out_ptr, num_rows, out_features = result
    features = gl.arange(0, BLOCK, gl.SliceLayout(1, OF_SUMS))
    rows = gl.arange(0, ROWS, gl.SliceLayout(0, OF_SUMS))
    weight_scales = gl.load(weight_scales_ptr + feature + features, mask=features < out_features - feature, other=0.0)
    x_scales = gl.load(x_scales_ptr + row + rows, mask=rows < num_rows - row, other=0.0)
    values = (total * x_scales[None, :] * weight_scales[:, None]).to(out_ptr.dtype.element_ty)
    pieces = (values,)
    if OUT_BYTES == 4:  # as many bytes at once as of numbers of 16 bits
        pieces = gl.split(values.reshape([BLOCK, 2, ROWS // 2]).permute((0, 2, 1)))
    NUM_PIECES: gl.constexpr = OUT_BYTES // 2
    WIDTH: gl.constexpr = 16 // OUT_BYTES
    in_memory: gl.constexpr = gl.BlockedLayout([1, WIDTH], [32 * WIDTH // BLOCK, BLOCK // WIDTH], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS // NUM_PIECES, gl.SliceLayout(1, in_memory))
    features = gl.arange(0, BLOCK, gl.SliceLayout(0, in_memory))
    for n in gl.static_range(NUM_PIECES):
        out_smem.permute((1, 0)).store(pieces[n])
        first = row + n * (ROWS // NUM_PIECES)
        corner_ptr = out_ptr + ((part * num_rows + first) * out_features + feature)
        places = rows[:, None] * out_features + features[None, :]
        mask = (rows < num_rows - first)[:, None] & (features < out_features - feature)[None, :]
        gl.store(corner_ptr + places, out_smem.load(in_memory), mask=mask)


@gluon.jit
def _multiply_strip(
    i,
    num_tiles,
    result,
    corner,  # the first row and feature, and the part
    stages,
    out_smem,
    PLACE: gl.constexpr,  # of the rows in a tile
    FIRST_BLOCK: gl.constexpr,
    BLOCKS: gl.constexpr,
    OUT_BYTES: gl.constexpr,
    ROWS: gl.constexpr,
    NUM_STAGES: gl.constexpr,
):
    """Multiply ROWS rows by BLOCKS blocks of features: `num_tiles` tiles, the `i`th that come and the next ones. Return
    how many have come then: Triton 3.6 takes a count that loops do not raise by one each time to be constant."""
    row, feature, part = corner
    x_smem, weight_smem, full, free = stages
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    # Registers have room for the products of two blocks with up to 64 rows each.
    AT_ONCE: gl.constexpr = BLOCKS if ROWS <= 64 else 1
    nothing = gl.zeros([BLOCK, ROWS], gl.float32, of_sums)
    totals = (nothing,) * BLOCKS
    for _ in range(num_tiles):
        stage = i % NUM_STAGES
        phase = (i // NUM_STAGES) & 1
        i += 1
        mbarrier.wait(full.index(stage), phase)
        x = x_smem.index(stage * GROUPS + PLACE).permute((1, 0))
        added = totals[:0]
        for first in gl.static_range(0, BLOCKS, AT_ONCE):
            products = totals[:0]
            for n in gl.static_range(first, first + AT_ONCE):
                weight = weight_smem.index(stage * GROUPS + FIRST_BLOCK + n)
                products += (warpgroup_mma(weight, x, nothing, use_acc=False, is_async=True),)
            ended = warpgroup_mma_wait(0, deps=products)
            products = (ended,) if AT_ONCE == 1 else ended
            if first + AT_ONCE == BLOCKS:
                mbarrier.arrive(free.index(stage), count=1)
            for n in gl.static_range(AT_ONCE):
                added += (totals[first + n] + products[n],)
        totals = added
    for n in gl.static_range(BLOCKS):
        _finish(
            totals[n], result, out_smem, row + PLACE * ROWS, feature + (FIRST_BLOCK + n) * BLOCK, part, OUT_BYTES, ROWS,
            of_sums,
        )  # fmt: skip
    return i


@gluon.jit
def _multiply(
    result,
    work,
    stages,
    all_out_smem,
    SELF: gl.constexpr,
    OUT_BYTES: gl.constexpr,
    ROW_TILE: gl.constexpr,
    NUM_STAGES: gl.constexpr,
):
    """Multiply: the work of group SELF."""
    ROWS: gl.constexpr = ROW_TILE // GROUPS
    BOTH: gl.constexpr = GROUPS
    HALF_PLACE: gl.constexpr = 0 if halves_rows(ROW_TILE) else SELF
    HALF_BLOCK: gl.constexpr = SELF if halves_rows(ROW_TILE) else 0
    out_smem = all_out_smem.index(SELF)
    _wait_for_kernel_before()
    i = 0
    for item in range(gl.program_id(0), work[6], gl.num_programs(0)):
        row, feature, part, is_whole, _, num_tiles = _item(item, work, ROW_TILE)
        corner = (row, feature, part)
        if is_whole:
            i = _multiply_strip(
                i, num_tiles, result, corner, stages, out_smem, SELF, 0, BOTH, OUT_BYTES, ROWS, NUM_STAGES
            )
        else:
            i = _multiply_strip(
                i, num_tiles, result, corner, stages, out_smem, HALF_PLACE, HALF_BLOCK, 1, OUT_BYTES, ROWS, NUM_STAGES
            )


@gluon.jit(
    do_not_specialize=[
        "num_rows", "row_tiles", "rest_tiles", "half_tiles", "whole_strips", "half_strips", "parts", "part_tiles",
        "in_tiles",
    ]
)  # fmt: skip
def hopper_fp8_decode_kernel(
    x_desc,  # of [T, in] e4m3; tiles [ROW_TILE / 2, TILE]
    x_scales_ptr,  # [T] float32
    weight_desc,  # of [out, in] e4m3; tiles [BLOCK, TILE]
    weight_scales_ptr,  # [out] float32
    out_ptr,  # [P, T, out], written
    num_rows,
    out_features,
    row_tiles,  # of whole items
    rest_tiles,  # behind them: halves, 0 or 1
    half_tiles,  # of rows of strips that have halves alone
    whole_strips,  # the first ones, of two blocks
    half_strips,  # those that have halves alone, of two blocks, or of one if features are halved
    parts,
    part_tiles,  # of TILE input features, of every part but the last
    in_tiles,
    OUT_BYTES: gl.constexpr,  # of a number of the result
    ROW_TILE: gl.constexpr,
    NUM_STAGES: gl.constexpr,
):
    NUM_GROUPS: gl.constexpr = GROUPS
    of_tiles: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [NUM_STAGES * NUM_GROUPS, ROW_TILE // NUM_GROUPS, TILE], of_tiles)
    weight_smem = gl.allocate_shared_memory(weight_desc.dtype, [NUM_STAGES * NUM_GROUPS, BLOCK, TILE], of_tiles)
    out_rows: gl.constexpr = ROW_TILE // NUM_GROUPS * 2 // OUT_BYTES
    of_result: gl.constexpr = gl.NVMMASharedLayout(128, OUT_BYTES * 8, 2)
    out_smem = gl.allocate_shared_memory(out_ptr.dtype.element_ty, [NUM_GROUPS, out_rows, BLOCK], of_result)
    full, free = make_barriers(NUM_STAGES, NUM_GROUPS)
    stages = (x_smem, weight_smem, full, free)
    num_items = (whole_strips * (row_tiles + rest_tiles) + half_strips * half_tiles) * parts
    work = (
        row_tiles, rest_tiles, half_tiles, whole_strips, half_strips, parts, num_items, part_tiles, in_tiles
    )  # fmt: skip
    result = (x_scales_ptr, weight_scales_ptr, out_ptr, num_rows, out_features)
    gl.warp_specialize(
        [
            (_multiply, (result, work, stages, out_smem, 0, OUT_BYTES, ROW_TILE, NUM_STAGES)),
            (_multiply, (result, work, stages, out_smem, 1, OUT_BYTES, ROW_TILE, NUM_STAGES)),
            (_load, (x_desc, weight_desc, work, stages, ROW_TILE, NUM_STAGES)),
        ],
        [4, LOADING_WARPS],
        [_MULTIPLYING_REGISTERS, LOADING_REGISTERS],
    )
