"""Weights kept in 4 bits: what is packed is what comes out, and the Triton kernels against plain torch."""

from __future__ import annotations

from typing import Literal
from unittest.mock import patch

import pytest
import torch

from kernel_device import DEVICE, HAS_GPU, MARKS
from nvcli.kernels import w4
from nvcli.kernels.mxfp4 import numbers_of_codes, powers_of_scales
from nvcli.kernels.triton.products import w4_linear as kernels
from nvcli.kernels.triton.products.product_launch import Kind, ProductLaunch, for_format
from nvcli.kernels.triton.products.products import multiply
from nvcli.kernels.triton.products.w4_linear import LINEAR
from nvcli.kernels.weight_formats import NVFP4_BLOCK, StoredGroups, W4Format, W4Kind

pytestmark = MARKS
SHARED_MEMORY = 227 * 1024
# out, in, group
SHAPES = (
    [(6144, 4096, 128), (896, 864, 32), (1000, 4160, 64)] if HAS_GPU else [(96, 256, 128), (80, 160, 32), (64, 320, 64)]
)


def make(rows: int, columns: int, format: W4Format) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Words, scales, and the values that they stand for, computed without either."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8)
    group, groups = format.group, -(-columns // format.group)
    scales = (torch.rand(rows, groups, generator=generator) + 0.5).half().float() * columns**-0.5 / 4
    scales = scales.half().float()
    zeros = torch.randint(0, 17, (rows, groups), generator=generator).float()
    spread = [one.repeat_interleave(group, 1)[:, :columns] for one in (scales, zeros)]
    return w4.pack(codes, format), w4.join_scales(scales, zeros), (codes.float() - spread[1]) * spread[0]


@pytest.mark.parametrize(("rows", "columns", "group"), SHAPES)
def test_nothing_is_lost(rows: int, columns: int, group: int) -> None:
    format = W4Format("integer", group).for_rows(rows)
    words, scales, values = make(rows, columns, format)
    assert torch.equal(w4.dequantise(words, scales, columns, format), values)
    found = kernels.dequantise(words.to(DEVICE), scales.to(DEVICE), columns, format, torch.float32)
    assert torch.equal(found.cpu(), values)


@pytest.mark.parametrize(("kind", "group"), [("affine", 32), ("affine", 16), ("affine in 8 bits", 32)])
def test_nothing_is_lost_of_affine_codes(kind: Literal["affine", "affine in 8 bits"], group: int) -> None:
    """All codes, with scales and offsets in float16, also the smallest ones."""
    format, generator = W4Format(kind, group).for_rows(48), torch.Generator().manual_seed(0)
    codes = torch.arange(256, dtype=torch.uint8).repeat(48, 2)[:, : 256 + 3 * group] & ((1 << format.bits) - 1)
    shape = 48, codes.shape[1] // group
    scales, offsets = (torch.randn(shape, generator=generator).half().float() for _ in range(2))
    scales[0], offsets[0] = 2.0**-24, -(2.0**-24)
    words, joined = w4.pack(codes, format), w4.join_halves(scales, offsets)
    assert words.numel() * 2 + joined.numel() * 4 == format.num_bytes(*codes.shape)
    spread = [one.repeat_interleave(group, 1) for one in (scales, offsets)]
    values = (codes.float() - format.zero) * spread[0] + spread[1]
    assert torch.equal(w4.dequantise(words, joined, codes.shape[1], format), values)
    found = kernels.dequantise(words.to(DEVICE), joined.to(DEVICE), codes.shape[1], format, torch.float32)
    assert torch.equal(found.cpu(), values)


@pytest.mark.parametrize(
    ("kind", "group"), [("integer", 64), ("affine", 32), ("affine in 8 bits", 16), ("nvfp4", NVFP4_BLOCK)]
)
def test_rows_by_their_numbers(kind: W4Kind, group: int) -> None:
    """Of ids that another rank has, zeros; in blocks of few rows."""
    format, generator = W4Format(kind, group).for_rows(52), torch.Generator().manual_seed(0)
    codes = torch.randint(0, 1 << format.bits, (52, 320), generator=generator, dtype=torch.uint8)
    scales = torch.randn(52, 320 // group, generator=generator)
    if kind == "integer":
        joined = w4.join_scales(scales, scales.abs().round())
    elif kind == "nvfp4":
        joined = w4.join_block_scales(scales.abs().to(torch.float8_e4m3fn), torch.rand(52, generator=generator), format)
    else:
        joined = w4.join_halves(scales, scales.flip(0))
    words, ids = w4.pack(codes, format), torch.randint(90, 170, (40,), generator=generator, dtype=torch.int32)
    mine = (ids >= 100) & (ids < 152)
    expected = torch.zeros(40, 320)
    expected[mine] = w4.dequantise(words, joined, 320, format)[ids[mine] - 100]
    for look_up in (w4.w4_rows, kernels.dequantise_rows):
        device = torch.device("cpu") if look_up is w4.w4_rows else DEVICE
        moved = (one.to(device) for one in (ids, words, joined))
        found = look_up(*moved, format, 100, torch.full((40, 320), torch.nan, device=device))
        assert torch.equal(found.cpu(), expected)


def test_an_lm_head_is_converted_in_parts() -> None:
    format = W4Format("integer", 64)
    words, scales, values = make(160, 320, format)
    x, bias = torch.randn(3, 320, generator=torch.Generator().manual_seed(1)), torch.arange(160.0)
    with patch.object(w4, "CONVERTED_ROWS", 64):
        found = w4.w4_linear(x, words, scales, format, bias)
    torch.testing.assert_close(found, x @ values.t() + bias, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["integer", "mxfp4 for fp8"])
def test_rows_of_a_tile_follow_one_another(kind: Literal["integer", "mxfp4 for fp8"]) -> None:
    """In the largest blocks that divide the rows of all parts of a weight."""
    codes = torch.randint(0, 16, (192, 256), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    format = StoredGroups(kind=kind, size=None).kept(256, 160, 48)
    assert format is not None
    assert format.row_block == 16
    by_rows = w4.pack(codes, format.for_rows(1)).view(12, 16, 2, 32)
    assert torch.equal(w4.pack(codes, format).view(12, 2, 16, 32), by_rows.transpose(1, 2))


def test_mxfp4_for_fp8_is_exact_but_for_blocks_far_below_a_row() -> None:
    format, generator = W4Format("mxfp4 for fp8", 32), torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (64, 288), generator=generator, dtype=torch.uint8)
    scales = torch.randint(108, 120, (64, 9), generator=generator, dtype=torch.uint8)
    scales[:, 0], scales[:, 8] = 119, 107
    words, joined = w4.pack_mxfp4(codes, scales, format)
    kept = codes.clone()
    kept[:, -32:] = 0  # 2^-12 of the row's largest block
    assert torch.equal(w4.unpack(words, 288, format), kept)
    values = numbers_of_codes(kept).float() * powers_of_scales(scales).float().repeat_interleave(32, 1)
    assert torch.equal(w4.dequantise(words, joined, 288, format), values)
    assert words.numel() * 2 + joined.numel() * 4 == format.num_bytes(64, 288)


@pytest.mark.parametrize("multiplied", [pytest.param(127, marks=() if HAS_GPU else pytest.mark.full), 9])
def test_every_number_of_nvfp4_is_exact(multiplied: int) -> None:
    """All codes with all scales, the first and the last ones in whatever type they are multiplied. Rows have factors of
    their own."""
    format = W4Format("nvfp4", NVFP4_BLOCK).for_rows(3)
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    every = torch.tensor([*numbers, *(-one for one in numbers)])
    codes = torch.arange(16, dtype=torch.uint8).repeat(3, 127)
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).expand(3, -1).contiguous()
    factors = torch.tensor([1.0, 2.0**-10, 3.0])
    words, joined = w4.pack(codes, format), w4.join_block_scales(scales, factors, format)
    values = (every * scales.float().unsqueeze(-1)).flatten(1) * factors.unsqueeze(1)
    columns = codes.shape[1]
    assert torch.equal(w4.dequantise(words, joined, columns, format), values)
    found = kernels.dequantise(words.to(DEVICE), joined.to(DEVICE), columns, format, torch.float32)
    assert torch.equal(found.cpu(), values)
    ends = [*range(multiplied - multiplied // 2), *range(127 - multiplied // 2, 127)]
    codes, scales = codes[:, : 16 * multiplied], scales[:, ends].contiguous()
    words, joined = w4.pack(codes, format), w4.join_block_scales(scales, factors, format)
    values, columns = values.unflatten(1, (127, 16))[:, ends].flatten(1), codes.shape[1]
    launch = for_format(ProductLaunch(16, 64, 128, 3, 4), format)
    for dtype in (torch.bfloat16, torch.float16) if HAS_GPU else (torch.float32,):
        x = torch.eye(columns, dtype=dtype)
        product = multiply(x.to(DEVICE), words.to(DEVICE), launch, scales=joined.to(DEVICE), format=format)
        assert torch.equal(product.cpu(), values.t().to(dtype))


@pytest.mark.parametrize("kind", LINEAR)
def test_launches_of_the_tables(kind: Kind) -> None:
    """Tiles are powers of two, and fit into the shared memory of an H200; ranges ascend."""
    for launch in (launch for _, launch in LINEAR[kind] if launch is not None):
        sizes = (launch.row_tile, launch.out_tile, launch.num_warps)
        assert all(size & (size - 1) == 0 for size in sizes)
        part = W4Format("integer", 128).part
        word_tiles = launch.out_tile * (2 if kind == "gated" else 1)
        assert launch.num_stages * 2 * part * (word_tiles + launch.row_tile * 4) <= SHARED_MEMORY
    assert [most for most, _ in LINEAR[kind]] == sorted(most for most, _ in LINEAR[kind])


@pytest.mark.parametrize("has_out", [False, True])
def test_plain_products_of_few_rows_are_cut_into_parts(has_out: bool) -> None:
    format = W4Format("integer", 128)
    words, scales, values = (one.to(DEVICE) for one in make(160, 1024, format))
    x = torch.randn(5, 1024, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    out = torch.full((5, 160), torch.nan, device=DEVICE) if has_out else None
    with patch.object(kernels, "sum_results", wraps=kernels.sum_results) as sum_results:
        found = kernels.linear("plain", x, words, scales, format, out)
    assert len(sum_results.call_args.args[0]) == 4, "two tiles of input features for each"
    assert found is not None
    assert out is None or found is out
    torch.testing.assert_close(found, x @ values.t(), rtol=1e-4, atol=1e-4)


def test_parts_give_each_multiprocessor_eight_warps() -> None:
    launch = ProductLaunch(16, 128, 128, 4, 4)
    assert kernels.choose_parts(1, 4096, 4096, launch, 132) == 8
    assert kernels.choose_parts(1, 4096, 4096, launch._replace(num_warps=8), 132) == 4
    assert kernels.choose_parts(1, 4096, 512, launch, 132) == 2, "two tiles of input features for each"
    assert kernels.choose_parts(1000, 65536, 4096, launch, 132) == 1
