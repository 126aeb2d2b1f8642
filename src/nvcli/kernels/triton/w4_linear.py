"""How products with weights of 4 bits are launched by `products.py`, for few rows as fast as the weight is read; and
the weight in 16 bits, for the library's product of many rows.

Shapes: T rows, `in` and `out` features, P parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.triton.multiprocessors import num_multiprocessors, shared_memory_bytes
from nvcli.kernels.triton.product_launch import Gate, ProductLaunch
from nvcli.kernels.triton.products import multiply
from nvcli.kernels.triton.w4_codes import integers, scales_and_zeros
from nvcli.kernels.triton.w4_launches import LINEAR, Kind
from nvcli.kernels.weight_formats import W4Format
from nvcli.kernels.whole_numbers import ceil_div

_DEQUANTISED_ROWS = 32
"""The rows of a weight that a program turns into numbers."""
_SUMMED = 1024
"""The numbers of a result whose parts a program adds up."""
_LEAST_STAGES = 2
_WARPS = 8
"""The warps of a multiprocessor that keep the memory busy."""


def choose_launch(kind: Kind, num_rows: int) -> ProductLaunch | None:
    """The launch for so many rows; see `Ranges` for what None says."""
    return next((launch for most, launch in LINEAR[kind] if num_rows <= most), None)


def fit(launch: ProductLaunch, x: Tensor, format: W4Format, *, is_gated: bool = False) -> ProductLaunch:
    """Make the tiles so small that those of all stages are in the shared memory of the GPU that has `x`."""
    if not x.is_cuda:
        return launch
    most = shared_memory_bytes(x.device)
    word_bytes = 2 * launch.out_tile * format.part * (2 if is_gated else 1)
    stage_bytes = word_bytes + launch.row_tile * format.tile * x.element_size()
    if launch.num_stages * stage_bytes <= most:
        return launch
    if launch.num_stages > _LEAST_STAGES:
        return fit(launch._replace(num_stages=launch.num_stages - 1), x, format, is_gated=is_gated)
    if launch.row_tile == 16:
        return launch
    return fit(launch._replace(row_tile=launch.row_tile // 2), x, format, is_gated=is_gated)


def choose_parts(num_rows: int, out_features: int, in_features: int, launch: ProductLaunch, num_sms: int) -> int:
    """Choose how many programs share the input features of a tile: enough to give each multiprocessor 8 warps, with two
    tiles of input features for each."""
    programs = ceil_div(num_rows, launch.row_tile) * ceil_div(out_features, launch.out_tile)
    wanted = num_sms * _WARPS // launch.num_warps
    return max(1, min(wanted // programs, ceil_div(in_features, launch.in_tile) // 2))


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
    x: Tensor, words: Tensor, scales: Tensor, format: W4Format, launch: ProductLaunch, out: Tensor | None = None
) -> Tensor:
    """See `nvcli.kernels.w4.w4_linear`, without a bias."""
    return multiply(x, words, fit(launch, x, format), out, scales=scales, format=format)


def add_parts(parts: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Add up parts [P, T, out] float32: [T, out] of `dtype`, in `out` (contiguous) if that is given."""
    if out is None:
        out = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    assert out.is_contiguous()
    _add_parts_kernel[(ceil_div(out.numel(), _SUMMED),)](parts, out, out.numel(), NUM_PARTS=len(parts), SUMMED=_SUMMED)
    return out


def w4_linear_parts(x: Tensor, words: Tensor, scales: Tensor, format: W4Format, launch: ProductLaunch) -> Tensor:
    """See `nvcli.kernels.w4.w4_linear_for_sum`. [P, T, out] float32."""
    launch = fit(launch, x, format)
    num_parts = choose_parts(len(x), len(words), x.shape[1], launch, num_multiprocessors(x.device))
    return multiply(x, words, launch._replace(num_parts=num_parts), scales=scales, format=format, in_parts=True)


def w4_gated_linear(
    x: Tensor, words: Tensor, scales: Tensor, format: W4Format, launch: ProductLaunch, gate: Gate
) -> Tensor:
    """See `nvcli.kernels.w4.w4_gated_linear`."""
    return multiply(x, words, fit(launch, x, format, is_gated=True), scales=scales, format=format, gate=gate)


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
