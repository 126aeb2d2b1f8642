"""The launches of the products of many rows with weights of 4 bits on Hopper GPUs (`hopper_w4_kernel.py`).

They serve weights of integers in groups of 128, affine codes, but not those of 4 bits in groups of 16, and MXFP4 with
activations in bfloat16. Everything else, and every other GPU, is for `products.py` and `experts.py`. Shapes: T rows,
`in` and `out` features, P parts, H hidden, k experts per token.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.activation import Activation
from nvcli.kernels.expert_settings import ExpertActivation
from nvcli.kernels.expert_types import ExpertMatrix, Routes
from nvcli.kernels.triton.launch.descriptors import TILE_BYTES, describe, describe_kept
from nvcli.kernels.triton.launch.multiprocessors import num_multiprocessors
from nvcli.kernels.triton.products.expert_groups import WorkList
from nvcli.kernels.triton.products.hopper_w4_kernel import BLOCK, GROUPS, PART, HopperW4Kind, hopper_w4_kernel
from nvcli.kernels.triton.products.product_launch import HopperW4Launch, Kind
from nvcli.kernels.weight_formats import ROW_BLOCK, W4Format
from nvcli.kernels.whole_numbers import ceil_div

_BLOCK: int = BLOCK.value
_GROUPS: int = GROUPS.value
_PART: int = PART.value
_MOST_STAGES = 6
_TILE = 4 * _PART
"""The input features of a tile."""
_ROW_TILES = (32, 64, 128)
_BLOCKS = (2, 3, 1)
"""Blocks to try, in this order: of launches with equal estimates the first was fastest, as it reads less for each
product."""
_MOST_PARTS = 8
_BLOCK_CYCLES, _ROW_CYCLES, _END_CYCLES = 740, 5.8, 1500
"""Cycles of a program for a block of each group in one tile, for each row of it, and for the end of an item."""
_BYTES_PER_CYCLE, _LAUNCH_CYCLES = 18, 2400
"""The cost of adding up parts: bytes that a multiprocessor writes and reads in a cycle, and the cycles of another
launch."""
_COPIED = tl.constexpr(1024)
"""The columns of a row that a program copies."""


def num_stages(launch: HopperW4Launch, format: W4Format, out_bytes: int, *, is_gated: bool) -> int:
    """Count the stages that fit in shared memory. `out_bytes`: bytes of a number of the result."""
    features = _BLOCK // 2 if is_gated else _BLOCK
    of_result = _GROUPS * launch.row_tile * features * out_bytes
    of_row = _TILE * format.bits // 8 + 4 * _scale_words(format)
    of_stage = 2 * _TILE * launch.row_tile + _GROUPS * launch.blocks * _BLOCK * of_row
    return min(_MOST_STAGES, (TILE_BYTES - of_result) // of_stage)


def _scale_words(format: W4Format) -> int:
    """Count the words of scales of a row of a tile."""
    return _TILE // format.group if format.has_group_scales else 1


@lru_cache(maxsize=1024)
def choose_hopper_w4_launch(
    kind: Kind, num_rows: int, out_features: int, in_features: int, format: W4Format, device: torch.device
) -> HopperW4Launch:
    """Choose the launch that takes the least time, as `cycles` estimates it. `out_features` are those of the result."""
    row_tile = next((rows for rows in _ROW_TILES if num_rows <= rows), _ROW_TILES[-1])
    most_parts = 1 if kind == "gated" else max(1, min(_MOST_PARTS, in_features // (2 * _TILE)))
    launches = [
        launch
        for num_parts in range(1, most_parts + 1)
        for blocks in _BLOCKS
        if _fits(launch := HopperW4Launch(row_tile, blocks, num_parts), kind, format)
    ]
    programs = num_multiprocessors(device)
    return min(launches, key=lambda launch: cycles(launch, kind, num_rows, out_features, in_features, programs))


def _fits(launch: HopperW4Launch, kind: Kind, format: W4Format) -> bool:
    """Whether a stage is loaded while another is multiplied."""
    out_bytes = 4 if launch.num_parts > 1 else 2
    return num_stages(launch, format, out_bytes, is_gated=kind == "gated") > 1


def cycles(
    launch: HopperW4Launch, kind: Kind, num_rows: int, out_features: int, in_features: int, num_programs: int
) -> float:
    """Estimate the cycles of a product on `num_programs` multiprocessors, without what every launch takes: the work of
    one multiprocessor, and adding up parts.

    It is within 12 % of 174 products of Qwen3-8B's shapes with 96 to 1,024 rows on an H200, 5 % on average, whose
    launches waited longer for scales than they do now.
    """
    features = _GROUPS * launch.blocks * (_BLOCK // 2 if kind == "gated" else _BLOCK)
    programs = -(-num_rows // launch.row_tile) * -(-out_features // features) * launch.num_parts
    of_block = _BLOCK_CYCLES + _ROW_CYCLES * launch.row_tile
    of_program = launch.blocks * (_tiles_of_part(in_features, launch) * of_block + _END_CYCLES)
    added = 0.0
    if launch.num_parts > 1:
        added = launch.num_parts * num_rows * out_features * 8 / (num_programs * _BYTES_PER_CYCLE)
        added += _LAUNCH_CYCLES if kind == "plain" else 0
    return -(-programs // num_programs) * of_program + added


def _tiles_of_part(in_features: int, launch: HopperW4Launch) -> int:
    return -(-in_features // (_TILE * launch.num_parts))


def linear(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    format: W4Format,
    launch: HopperW4Launch,
    out: Tensor | None = None,
    gate: Activation | None = None,
) -> Tensor:
    """x Wᵀ: [T, in] → [T, out], in `out` (contiguous) if that is given; or with several parts [P, T, out] float32; or
    with a gate, and one part, activation(x Gᵀ) × (x Uᵀ) for a weight that holds G above U."""
    num_parts = -(-x.shape[1] // (_TILE * _tiles_of_part(x.shape[1], launch)))
    out_features = len(words) if gate is None else len(words) // 2
    if num_parts > 1:
        out = torch.empty(num_parts, len(x), out_features, dtype=torch.float32, device=x.device)
    elif out is None:
        out = torch.empty(len(x), out_features, dtype=x.dtype, device=x.device)
    row_tiles = num_parts * ceil_div(len(x), launch.row_tile)
    activation = None if gate is None else ExpertActivation(kind=gate)
    _launch(x, ExpertMatrix(words[None], None, scales, format), out, launch, row_tiles, len(x), activation)
    return out


def multiply_experts(
    x: Tensor,
    matrix: ExpertMatrix,
    routes: Routes,
    work: WorkList,
    launch: HopperW4Launch,
    activation: ExpertActivation | None,
    out: Tensor,
) -> None:
    """Multiply as `experts.py` does, but with rows of x sorted by expert for both projections: [T × k, in]."""
    num_rows = len(x) if activation is not None else len(routes.experts)
    _launch(x, matrix, out, launch, len(work.items), num_rows, activation, work, routes)


@triton.jit
def _sort_rows_kernel(
    x_ptr,  # [T, SIZE]
    places_ptr,  # [T, EXPERTS_PER_TOKEN] int32, -1 for a pair without a place
    out_ptr,  # [pairs, SIZE], written
    SIZE: tl.constexpr,
    EXPERTS_PER_TOKEN: tl.constexpr,
):
    """Program (token, stretch of columns)."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * _COPIED + tl.arange(0, _COPIED)
    values = tl.load(x_ptr + token * SIZE + columns, mask=columns < SIZE)
    for choice in range(EXPERTS_PER_TOKEN):
        place = tl.load(places_ptr + token * EXPERTS_PER_TOKEN + choice).to(tl.int64)
        tl.store(out_ptr + place * SIZE + columns, values, mask=(columns < SIZE) & (place >= 0))


def sort_rows(x: Tensor, places: Tensor, out: Tensor) -> Tensor:
    """Write each token's row to the places of its pairs (`WorkList`): [T, H] → `out` [T × k, H]."""
    assert out.is_contiguous()
    _sort_rows_kernel[len(x), ceil_div(x.shape[1], _COPIED.value)](
        x, places, out, SIZE=x.shape[1], EXPERTS_PER_TOKEN=len(places) // len(x), num_warps=4
    )
    return out


def _launch(
    x: Tensor,
    matrix: ExpertMatrix,
    out: Tensor,
    launch: HopperW4Launch,
    row_tiles: int,
    num_rows: int,
    activation: ExpertActivation | None,
    work: WorkList | None = None,
    routes: Routes | None = None,
) -> None:
    """Multiply rows by words [E, rows, words of a row]. `row_tiles`: tiles of rows of all parts together."""
    words, bias, scales, format = matrix
    assert scales is not None
    assert format is not None
    assert format.row_block == ROW_BLOCK
    for tensor in (x, words, scales, out):
        assert tensor.is_contiguous()
    is_gated = activation is not None
    in_features, out_features = x.shape[1], out.shape[-1]
    features = _GROUPS * launch.blocks * (_BLOCK // 2 if is_gated else _BLOCK)
    strips = ceil_div(out_features, features)
    rows = words.shape[1]
    row_blocks, in_tiles = rows // ROW_BLOCK, ceil_div(in_features, _TILE)
    part, in_pieces = format.part, in_tiles * _TILE // format.tile
    block_words, eight_rows = ROW_BLOCK * part, 8 * part
    if is_gated:  # the last gate is as far from the end as every other one from its up projection
        half = row_blocks // 2 * in_pieces
        words_view = (
            (len(words) * row_blocks * in_pieces - half, ROW_BLOCK // 8, 2, 8, part),
            (block_words, eight_rows, half * block_words, part, 1),
        )
    else:
        words_view = (
            (len(words) * row_blocks, in_pieces, ROW_BLOCK // 8, 8, part),
            (in_pieces * block_words, block_words, eight_rows, part, 1),
        )
    # A group's words of scales follow the rows of the weight, and are brought in the same order.
    scales_view = (
        (scales.numel() // rows, rows // 16, 2, 8),
        (rows, 8 if is_gated else 16, out_features if is_gated else 8, 1),
    )
    scale_words = _scale_words(format)
    kind = HopperW4Kind(
        format=format.kind,
        scale_words=scale_words,
        pieces=_TILE // format.tile,
        piece_words=format.part,
        row_tile=launch.row_tile,
        blocks=launch.blocks,
        num_stages=num_stages(launch, format, out.element_size(), is_gated=is_gated),
        out_bytes=out.element_size(),
        is_gated=is_gated,
        activation=activation or ExpertActivation(),
        experts_per_token=0 if routes is None else routes.experts.shape[1],
    )
    hopper_w4_kernel[(min(row_tiles * strips, num_multiprocessors(x.device)),)](
        describe(x, (launch.row_tile, _PART), swizzle_bytes=64),
        describe_kept(words, kind.words_tile, view=words_view, swizzle_bytes=2 * part),
        describe_kept(scales, (scale_words, _BLOCK // 16, 2, 8), view=scales_view, swizzle_bytes=32),
        bias,
        None if work is None else work.items,
        None if work is None else work.order,
        None if routes is None else routes.weights,
        out,
        num_rows,
        row_tiles * strips,
        _tiles_of_part(in_features, launch),
        strips,
        in_tiles,
        row_blocks,
        out_features,
        KIND=kind,
        num_warps=4,
    )
