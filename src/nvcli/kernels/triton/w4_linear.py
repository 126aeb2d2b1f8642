"""Products of activations and weights of 4 bits: x Wᵀ, for few rows as fast as the weight is read.

A program multiplies a tile of features by a tile of rows, one tile of input features at a time, whose codes become
numbers in registers: these are the first factor, which Hopper's matrix units take from registers, and x is the second
one. Where a product has too few tiles to keep the memory busy, programs take parts of the input features, which are
added up behind them. Gate and up projection of an MLP are multiplied side by side, so that the activation needs no
launch and no trip through memory.

The number of rows is an argument for which nothing is specialised: no other number compiles anew, but for the size of
the tiles. Shapes: T rows, `in` and `out` features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.triton.activation import activate
from nvcli.kernels.triton.w4_codes import add_tile, integers, scales_and_zeros
from nvcli.kernels.triton.w4_launches import LINEAR, Kind, Launch
from nvcli.kernels.weight_formats import W4Format
from nvcli.kernels.whole_numbers import ceil_div

_DEQUANTISED_ROWS = 32
"""The rows of a weight that a program turns into numbers."""
_SUMMED = 1024
"""The numbers of a result whose parts a program adds up."""
_LEAST_STAGES = 2


def choose_launch(kind: Kind, num_rows: int) -> Launch | None:
    """The launch for so many rows; see `Ranges` for what None says."""
    return next((launch for most, launch in LINEAR[kind] if num_rows <= most), None)


def fit(launch: Launch, x: Tensor, format: W4Format, *, is_gated: bool = False) -> Launch:
    """Make the tiles so small that those of all stages are in the shared memory of the GPU that has `x`."""
    if not x.is_cuda:
        return launch
    most = triton.runtime.driver.active.utils.get_device_properties(x.device.index)["max_shared_mem"]
    word_bytes = 2 * launch.out_tile * format.part * (2 if is_gated else 1)
    stage_bytes = word_bytes + launch.row_tile * format.tile * x.element_size()
    if launch.num_stages * stage_bytes <= most:
        return launch
    if launch.num_stages > _LEAST_STAGES:
        return fit(launch._replace(num_stages=launch.num_stages - 1), x, format, is_gated=is_gated)
    if launch.row_tile == 16:
        return launch
    return fit(launch._replace(row_tile=launch.row_tile // 2), x, format, is_gated=is_gated)


def choose_parts(num_rows: int, out_features: int, num_tiles: int, launch: Launch) -> int:
    """How many programs share the input features of a tile: enough to fill the GPU, with two tiles for each."""
    programs = -(-num_rows // launch.row_tile) * -(-out_features // launch.out_tile)
    return max(1, min(launch.num_programs // programs, num_tiles // 2))


@triton.jit(do_not_specialize=["num_rows"])
def _w4_linear_kernel(
    x_ptr,  # [T, IN_FEATURES]
    words_ptr,  # [OUT_FEATURES, or GATED 2 OUT_FEATURES, WORDS] int16
    scales_ptr,  # [groups, OUT_FEATURES or 2 OUT_FEATURES] int32
    out_ptr,  # [NUM_PARTS, T, OUT_FEATURES], written
    num_rows,
    OUT_FEATURES: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_TILE: tl.constexpr,
    OUT_TILE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    PART: tl.constexpr,
    PACKED: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Program (tile of rows, tile of features, part)."""
    TILES: tl.constexpr = (IN_FEATURES + 4 * PART - 1) // (4 * PART)
    TILES_OF_PART: tl.constexpr = (TILES + NUM_PARTS - 1) // NUM_PARTS
    OUT_ROWS: tl.constexpr = OUT_FEATURES * 2 if GATED else OUT_FEATURES
    WORDS: tl.constexpr = TILES * PART
    row, feature = tl.program_id(0) * ROW_TILE, tl.program_id(1) * OUT_TILE
    rows, features = row + tl.arange(0, ROW_TILE), feature + tl.arange(0, OUT_TILE)
    part = tl.program_id(2)
    is_row, is_feature = rows < num_rows, features < OUT_FEATURES
    inner = tl.arange(0, PART)
    x_ptrs = x_ptr + rows[None, :].to(tl.int64) * IN_FEATURES + inner[:, None]
    gate_ptrs = words_ptr + features[:, None].to(tl.int64) * WORDS + inner[None, :]
    up_ptrs = gate_ptrs + OUT_FEATURES * WORDS
    scales_ptrs = scales_ptr + features
    total = tl.zeros([OUT_TILE, ROW_TILE], tl.float32)
    up = tl.zeros([OUT_TILE, ROW_TILE], tl.float32)
    first = part * TILES_OF_PART
    for tile in tl.range(first, min(first + TILES_OF_PART, TILES), num_stages=NUM_STAGES):
        total = add_tile(
            total,
            gate_ptrs,
            scales_ptrs,
            x_ptrs,
            tile,
            is_row,
            is_feature,
            OUT_ROWS,
            IN_FEATURES,
            "integer",
            GROUP,
            PART,
            PACKED,
            IN_FEATURES % (4 * PART) == 0,
        )
        if GATED:
            up = add_tile(
                up,
                up_ptrs,
                scales_ptrs + OUT_FEATURES,
                x_ptrs,
                tile,
                is_row,
                is_feature,
                OUT_ROWS,
                IN_FEATURES,
                "integer",
                GROUP,
                PART,
                PACKED,
                IN_FEATURES % (4 * PART) == 0,
            )
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if GATED:
        # Rounded where the two-step version stores: both give the same bits but for the order of the sums.
        total = activate(total.to(dtype).to(tl.float32), GELU) * up.to(dtype).to(tl.float32)
    out_rows = part * num_rows + rows
    out_ptrs = out_ptr + out_rows[:, None].to(tl.int64) * OUT_FEATURES + features[None, :]
    tl.store(out_ptrs, total.to(dtype).T, mask=is_row[:, None] & is_feature[None, :])


@triton.jit(do_not_specialize=["size"])
def _add_parts_kernel(
    parts_ptr,  # [NUM_PARTS, size] float32
    out_ptr,  # [size], written
    size,
    NUM_PARTS: tl.constexpr,
    SUMMED: tl.constexpr,
):
    """Program (piece of the result)."""
    places = tl.program_id(0).to(tl.int64) * SUMMED + tl.arange(0, SUMMED)
    is_there = places < size
    total = tl.zeros([SUMMED], tl.float32)
    for part in tl.static_range(NUM_PARTS):
        total += tl.load(parts_ptr + part * size + places, mask=is_there, other=0.0)
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=is_there)


@triton.jit
def _dequantise_kernel(
    words_ptr,  # [OUT_FEATURES, WORDS] int16
    scales_ptr,  # [groups, OUT_FEATURES] int32
    out_ptr,  # [OUT_FEATURES, IN_FEATURES], written
    OUT_FEATURES: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    GROUP: tl.constexpr,
    OUT_TILE: tl.constexpr,
    PART: tl.constexpr,
):
    """Program (tile of columns, tile of rows)."""
    TILE: tl.constexpr = 4 * PART
    WORDS: tl.constexpr = (IN_FEATURES + TILE - 1) // TILE * PART
    tile = tl.program_id(0)
    rows = tl.program_id(1) * OUT_TILE + tl.arange(0, OUT_TILE)
    inner = tl.arange(0, PART)
    is_row = rows < OUT_FEATURES
    words = tl.load(
        words_ptr + rows[:, None].to(tl.int64) * WORDS + tile * PART + inner[None, :], mask=is_row[:, None], other=0
    )
    out_ptrs = out_ptr + rows[:, None].to(tl.int64) * IN_FEATURES + tile * TILE + inner[None, :]
    for part in tl.static_range(4):
        first = tile * TILE + part * PART
        pairs = tl.load(scales_ptr + first // GROUP * OUT_FEATURES + rows, mask=is_row & (first < IN_FEATURES), other=0)
        scales, zeros = scales_and_zeros(pairs, tl.float32, PACKED=False)
        values = integers(words, zeros, part, tl.float32, PACKED=False) * scales[:, None]
        mask = is_row[:, None] & (first + inner < IN_FEATURES)[None, :]
        tl.store(out_ptrs + part * PART, values.to(out_ptr.dtype.element_ty), mask=mask)


def w4_linear(
    x: Tensor, words: Tensor, scales: Tensor, format: W4Format, launch: Launch, out: Tensor | None = None
) -> Tensor:
    """See `nvcli.kernels.w4.w4_linear`, without a bias."""
    launch = fit(launch, x, format)
    num_parts = choose_parts(len(x), len(words), words.shape[1] // format.part, launch)
    if num_parts > 1:
        parts = torch.empty(num_parts, len(x), len(words), dtype=torch.float32, device=x.device)
        _launch(x, words, scales, format, parts, launch, num_parts=num_parts)
        return add_parts(parts, x.dtype, out)
    if out is None:
        out = torch.empty(len(x), len(words), dtype=x.dtype, device=x.device)
    assert out.is_contiguous()
    _launch(x, words, scales, format, out, launch, num_parts=1)
    return out


def add_parts(parts: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Add up parts [P, T, out] float32: [T, out] of `dtype`, in `out` (contiguous) if that is given."""
    if out is None:
        out = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    assert out.is_contiguous()
    _add_parts_kernel[(ceil_div(out.numel(), _SUMMED),)](parts, out, out.numel(), NUM_PARTS=len(parts), SUMMED=_SUMMED)
    return out


def w4_linear_parts(x: Tensor, words: Tensor, scales: Tensor, format: W4Format, launch: Launch) -> Tensor:
    """See `nvcli.kernels.w4.w4_linear_for_sum`. [P, T, out] float32."""
    launch = fit(launch, x, format)
    num_parts = choose_parts(len(x), len(words), words.shape[1] // format.part, launch)
    out = torch.empty(num_parts, len(x), len(words), dtype=torch.float32, device=x.device)
    _launch(x, words, scales, format, out, launch, num_parts=num_parts)
    return out


def w4_gated_linear(
    x: Tensor, words: Tensor, scales: Tensor, format: W4Format, launch: Launch, *, is_gelu: bool = False
) -> Tensor:
    """See `nvcli.kernels.w4.w4_gated_linear`."""
    out = torch.empty(len(x), len(words) // 2, dtype=x.dtype, device=x.device)
    launch = fit(launch, x, format, is_gated=True)
    _launch(x, words, scales, format, out, launch, num_parts=1, is_gated=True, is_gelu=is_gelu)
    return out


def dequantise(words: Tensor, scales: Tensor, columns: int, format: W4Format, dtype: torch.dtype) -> Tensor:
    """See `nvcli.kernels.w4.dequantise`. [out, columns] of `dtype`."""
    assert words.is_contiguous()
    assert scales.is_contiguous()
    out = torch.empty(len(words), columns, dtype=dtype, device=words.device)
    _dequantise_kernel[(ceil_div(columns, format.tile), ceil_div(len(words), _DEQUANTISED_ROWS))](
        words,
        scales,
        out,
        OUT_FEATURES=len(words),
        IN_FEATURES=columns,
        GROUP=format.group,
        OUT_TILE=_DEQUANTISED_ROWS,
        PART=format.part,
    )
    return out


def _launch(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    format: W4Format,
    out: Tensor,
    launch: Launch,
    *,
    num_parts: int,
    is_gated: bool = False,
    is_gelu: bool = False,
) -> None:
    num_rows, in_features = x.shape
    out_features = out.shape[-1]
    assert x.is_contiguous()
    assert words.is_contiguous()
    assert scales.is_contiguous()
    grid = (ceil_div(num_rows, launch.row_tile), ceil_div(out_features, launch.out_tile), num_parts)
    _w4_linear_kernel[grid](
        x,
        words,
        scales,
        out,
        num_rows,
        OUT_FEATURES=out_features,
        IN_FEATURES=in_features,
        GROUP=format.group,
        ROW_TILE=launch.row_tile,
        OUT_TILE=launch.out_tile,
        NUM_PARTS=num_parts,
        GATED=is_gated,
        GELU=is_gelu,
        PART=format.part,
        PACKED=x.is_cuda,
        NUM_STAGES=launch.num_stages,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
