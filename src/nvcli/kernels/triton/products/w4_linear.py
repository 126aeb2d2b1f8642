"""Products with weights of 4 bits: for few rows by the kernel for all GPUs (`products.py`), as fast as the weight is
read; for more by Hopper's own (`hopper_w4.py`) where it serves them; and for many by the library's, with the weight as
16 bits in memory.

The launches of the tables were measured on an H200. On other GPUs, and for numbers of more than 16 bits, tiles are made
as small as memory asks for. Shapes: T rows, `in` and `out` features, P parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.activation import Activation
from nvcli.kernels.expert_types import ExpertMatrix
from nvcli.kernels.triton.elementwise.results import sum_results
from nvcli.kernels.triton.launch.multiprocessors import num_multiprocessors
from nvcli.kernels.triton.launch.triton_version import has_known_gluon
from nvcli.kernels.triton.products.product_launch import HopperW4Launch, Kind, ProductLaunch, fit, for_format
from nvcli.kernels.triton.products.products import multiply
from nvcli.kernels.triton.products.w4_codes import (
    NVFP4_UNIT,
    affine_numbers,
    first_words,
    fp4_numbers,
    integers,
    nvfp4_numbers,
    scales_and_zeros,
)
from nvcli.kernels.weight_formats import CONVERTED_ROWS, ROW_BLOCK, W4Format
from nvcli.kernels.whole_numbers import ceil_div

Ranges = tuple[tuple[int, ProductLaunch | None], ...]
"""(Maximum rows, launch), ascending. None, and above the last range: the weight is converted to 16 bits in memory and
the library multiplies; for `gated`: a plain product, then the activation."""

LINEAR: Mapping[Kind, Ranges] = {
    "plain": (
        (16, ProductLaunch(16, 128, 128, 4, 4)),
        (32, ProductLaunch(32, 128, 128, 4, 4)),
        (256, ProductLaunch(64, 128, 128, 3, 4)),
    ),
    "sum": (
        (16, ProductLaunch(16, 128, 128, 4, 4)),
        (64, ProductLaunch(64, 128, 128, 3, 4)),
        (128, ProductLaunch(128, 128, 128, 3, 8)),
        (256, ProductLaunch(64, 128, 128, 3, 4)),
    ),
    "gated": (
        (16, ProductLaunch(16, 32, 128, 4, 2)),
        (32, ProductLaunch(32, 64, 128, 3, 4)),
    ),
}
_FEW_ROWS, _NARROW_TILES = 16, ProductLaunch(16, 64, 128, 4, 2)
"""The launch of so many rows, but for a gated product, of formats that `_takes_narrow_tiles` names. With Triton 3.8 an
H200 takes 9.6 µs in place of 12.1 for a row and 6,144 × 4,096 numbers of Q4_K, 9.2 of 12.5 for MXFP4 and 8.5 of 8.6 for
integers in groups of 128, but for the sum of 4,096 × 12,288 in groups of 32 16.1 of 14.0, and of NVFP4 26.4 of 17.8."""
HOPPER_ROWS: Mapping[Kind, tuple[int, int]] = {"plain": (64, 256), "sum": (64, 1024), "gated": (64, 1024)}
"""The kernel for Hopper GPUs serves more rows than the first number, up to the second one, and affine codes of 4 bits
from `_FEW_ROWS` on. With Triton 3.6 an H200 takes 34.8 µs in place of 46.5 for Qwen3-8B's gate and up projection of 32
rows in Q4_K, and 41.9 of 53.5 for 64 rows, where 16 bits take 53.0; integers in groups of 128 would take 35.3 of 31.4
and 41.4 of 38.1."""
HOPPER_ROWS_OF_8_BITS: Mapping[int, int] = {16: 512, 32: 1024}
"""The second number for codes of 8 bits, by the columns of a group. An H200 takes 106 µs in place of 179 for the gate
and up projection of Qwen3-8B at 256 rows in groups of 16, 205 of 237 at 512, and 391 of 372 at 1,024."""
HOPPER_HEAD_ROWS = 1024
"""The second number for an LM head, which is converted in parts: Qwen3-8B's takes 2,440 µs in place of 2,833 at so many
rows in groups of 16, 594 of 996 at 256 and 303 of 518 at 128, where one in bfloat16 takes 1,629, 428 and 310."""
HOPPER_EXPERT_ROWS = 256
"""Mean rows of an expert above which the kernel for Hopper GPUs multiplies it. A layer of gpt-oss-20b takes
an H200 2,955 µs with it and 3,490 without at 8,192 tokens, 1,024 for each expert; 1,127 and 1,110 at 320 for each."""
_HOPPER_GROUP, _HOPPER_AFFINE_GROUP, _HOPPER_TILE = 128, 32, 128

_DEQUANTISED_ROWS = tl.constexpr(32)
"""Rows of a weight that a program converts."""
_WARPS = 8
"""Warps of a multiprocessor that are enough to keep the memory busy."""


def linear(
    kind: Kind,
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    format: W4Format,
    out: Tensor | None = None,
    gate: Activation | None = None,
) -> Tensor | None:
    """Compute the products of `nvcli.kernels.w4`, without a bias; a plain one in `out` if that is given, a sum as parts
    [P, T, out] float32. None: the library is faster, or for a gated product a plain one followed by the activation."""
    launch = choose_w4_launch(kind, x, words, format)
    if launch is None:
        return None
    if isinstance(launch, HopperW4Launch):
        from nvcli.kernels.triton.products import hopper_w4

        in_parts = launch.num_parts > 1
        result = hopper_w4.linear(x, words, scales, format, launch, None if in_parts else out, gate)
    else:
        launch = for_format(launch, format)
        launch = fit(launch, launch.row_tile, x.device, x.element_size(), format.bits / 8, 1 if gate is None else 2)
        if kind != "gated":
            num_parts = choose_parts(len(x), len(words), x.shape[1], launch, num_multiprocessors(x.device))
            launch = launch._replace(num_parts=num_parts)
        in_parts = kind == "sum" or launch.num_parts > 1
        out_alone = None if in_parts else out
        result = multiply(x, words, launch, out_alone, scales=scales, format=format, gate=gate, in_parts=in_parts)
    if not in_parts or kind != "plain":
        return result
    if out is None:
        out = torch.empty(result.shape[1:], dtype=x.dtype, device=x.device)
    return sum_results(result, out=out)


def choose_w4_launch(kind: Kind, x: Tensor, words: Tensor, format: W4Format) -> ProductLaunch | HopperW4Launch | None:
    """Choose the launch of a product; see `Ranges` for None."""
    least, most = HOPPER_ROWS[kind]
    if format.kind == "affine":
        least = _FEW_ROWS
    if format.bits == 8:
        most = HOPPER_ROWS_OF_8_BITS[format.group]
    if kind == "plain" and len(words) > CONVERTED_ROWS:
        most = HOPPER_HEAD_ROWS
    if least < len(x) <= most and _serves_on_hopper(x, format, x.shape[1]):
        from nvcli.kernels.triton.products import hopper_w4

        out_features = len(words) // 2 if kind == "gated" else len(words)
        return hopper_w4.choose_hopper_w4_launch(kind, len(x), out_features, x.shape[1], format, x.device)
    if len(x) <= _FEW_ROWS and kind != "gated" and _takes_narrow_tiles(format):
        return _NARROW_TILES
    return next((launch for most_rows, launch in LINEAR[kind] if len(x) <= most_rows), None)


def _takes_narrow_tiles(format: W4Format) -> bool:
    """Whether the numbers of a tile are added up at once: neither NVFP4 nor integers in several groups."""
    return format.kind != "nvfp4" and (format.kind != "integer" or format.group == format.tile)


def takes_experts(num_rows: float, x: Tensor, gate_up: ExpertMatrix, down: ExpertMatrix) -> bool:
    """Whether the kernel for Hopper GPUs multiplies experts with this many rows on average."""
    return num_rows > HOPPER_EXPERT_ROWS and all(
        matrix.format is not None
        and matrix.scales is not None
        and _serves_on_hopper(x, matrix.format, matrix.scales.shape[1] * matrix.format.group)
        for matrix in (gate_up, down)
    )


def _serves_on_hopper(x: Tensor, format: W4Format, columns: int) -> bool:
    """Whether the kernel for Hopper takes activations like `x` and a weight of that format. `columns`: those that have
    scales of their own."""
    is_taken = x.dtype == torch.bfloat16 if format.kind == "mxfp4" else x.dtype.itemsize == 2
    has_groups = format.kind == "mxfp4" or (format.kind == "integer" and format.group == _HOPPER_GROUP)
    is_affine = format.kind == "affine in 8 bits" or (format.kind == "affine" and format.group == _HOPPER_AFFINE_GROUP)
    has_groups |= is_affine and columns % _HOPPER_TILE == 0
    return is_taken and has_groups and format.row_block == ROW_BLOCK and has_hopper_kernel(x.device)


@lru_cache(maxsize=64)
def has_hopper_kernel(device: torch.device) -> bool:
    """Whether the kernel for Hopper may be used on a GPU."""
    return has_known_gluon() and torch.cuda.get_device_capability(device) == (9, 0)


def choose_parts(num_rows: int, out_features: int, in_features: int, launch: ProductLaunch, num_sms: int) -> int:
    """Choose how many programs share the input features of a tile: enough to give each multiprocessor 8 warps, with two
    tiles of input features for each."""
    programs = ceil_div(num_rows, launch.row_tile) * ceil_div(out_features, launch.out_tile)
    wanted = num_sms * _WARPS // launch.num_warps
    return max(1, min(wanted // programs, ceil_div(in_features, launch.in_tile) // 2))


@triton.jit(do_not_specialize=["num_rows", "start"])
def _dequantise_kernel(
    ids_ptr,  # None: all rows; or [num_rows] int32 or int64, those that are converted, of which other weights have some
    words_ptr,  # [OUT_FEATURES / ROW_BLOCK, tiles, ROW_BLOCK, PART] int16
    scales_ptr,  # [groups or tiles, OUT_FEATURES] int32
    out_ptr,  # [num_rows, IN_FEATURES], written
    num_rows,
    start,  # the number by which ids name the first row
    OUT_FEATURES: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    KIND: tl.constexpr,
    HAS_GROUP_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
):
    """Program (tile of columns, tile of rows)."""
    TILE: tl.constexpr = PARTS * PART
    WORDS: tl.constexpr = (IN_FEATURES + TILE - 1) // TILE * PART
    tile = tl.program_id(0)
    out_rows = tl.program_id(1) * _DEQUANTISED_ROWS + tl.arange(0, _DEQUANTISED_ROWS)
    inner = tl.arange(0, PART)
    is_out_row = out_rows < num_rows
    rows, is_row = out_rows, is_out_row
    if ids_ptr is not None:
        rows = (tl.load(ids_ptr + out_rows, mask=is_out_row, other=-1) - start).to(tl.int32)
        is_row = is_out_row & (rows >= 0) & (rows < OUT_FEATURES)
    word_ptrs = words_ptr + first_words(rows, WORDS, ROW_BLOCK, PART) + tile * (ROW_BLOCK * PART)
    words = tl.load(word_ptrs, mask=is_row[:, None], other=0)
    out_ptrs = out_ptr + out_rows[:, None].to(tl.int64) * IN_FEATURES + tile * TILE + inner[None, :]
    if KIND == "nvfp4":
        factors = tl.load(scales_ptr + rows, mask=is_row, other=0).to(tl.float32, bitcast=True) * NVFP4_UNIT
        scales_ptr += OUT_FEATURES
    for part in tl.static_range(PARTS):
        first = tile * TILE + part * PART
        group = first // GROUP if HAS_GROUP_SCALES else tile
        scales = tl.load(scales_ptr + group * OUT_FEATURES + rows, mask=is_row & (first < IN_FEATURES), other=0)
        if KIND == "nvfp4":
            values = nvfp4_numbers(words, scales, part, tl.float32, PACKED=False) * factors[:, None]
        elif KIND == "mxfp4":
            values = fp4_numbers(words, scales, part, tl.float32, PACKED=False)
        elif KIND != "integer":
            values = affine_numbers(words, scales, part, 16 // PARTS, tl.float32, PACKED=False)
        else:
            of_group, zeros = scales_and_zeros(scales, tl.float32, PACKED=False)
            values = integers(words, zeros, part, tl.float32, PACKED=False) * of_group[:, None]
        mask = is_out_row[:, None] & (first + inner < IN_FEATURES)[None, :]
        tl.store(out_ptrs + part * PART, values.to(out_ptr.dtype.element_ty), mask=mask)


def dequantise(words: Tensor, scales: Tensor, columns: int, format: W4Format, dtype: torch.dtype) -> Tensor:
    """See `nvcli.kernels.w4.dequantise`. [out, columns] of `dtype`."""
    out = torch.empty(len(words), columns, dtype=dtype, device=words.device)
    return _convert(None, words, scales, format, 0, out)


def dequantise_rows(ids: Tensor, words: Tensor, scales: Tensor, format: W4Format, start: int, out: Tensor) -> Tensor:
    """See `nvcli.kernels.w4.w4_rows`."""
    return _convert(ids, words, scales, format, start, out)


def _convert(ids: Tensor | None, words: Tensor, scales: Tensor, format: W4Format, start: int, out: Tensor) -> Tensor:
    num_rows, columns = out.shape
    for tensor in (words, scales, out):
        assert tensor.is_contiguous()
    sizes = {"OUT_FEATURES": len(words), "IN_FEATURES": columns, "GROUP": format.group, "PART": format.part}
    sizes |= {"PARTS": format.parts, "HAS_GROUP_SCALES": format.has_group_scales}
    _dequantise_kernel[ceil_div(columns, format.tile), ceil_div(num_rows, _DEQUANTISED_ROWS.value)](
        ids, words, scales, out, num_rows, start, KIND=format.kind, ROW_BLOCK=format.row_block, **sizes
    )
    return out
