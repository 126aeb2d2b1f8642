"""Weights kept in 4 bits: what is packed is what comes out, and the Triton kernels against plain torch."""

from __future__ import annotations

import pytest
import torch

from kernel_device import DEVICE, HAS_GPU, MARKS
from nvcli.kernels import w4
from nvcli.kernels.triton.products import w4_linear as kernels
from nvcli.kernels.triton.products.product_launch import Kind, ProductLaunch
from nvcli.kernels.triton.products.w4_linear import LINEAR
from nvcli.kernels.weight_formats import W4Format

pytestmark = MARKS
SHARED_MEMORY = 227 * 1024
# out, in, group
SHAPES = (
    [(6144, 4096, 128), (896, 864, 32), (1000, 4160, 64)] if HAS_GPU else [(96, 256, 128), (80, 160, 32), (64, 320, 64)]
)


def make(rows: int, columns: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Words, scales, and the values that they stand for, computed without either."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8)
    groups = -(-columns // group)
    scales = (torch.rand(rows, groups, generator=generator) + 0.5).half().float() * columns**-0.5 / 4
    scales = scales.half().float()
    zeros = torch.randint(0, 17, (rows, groups), generator=generator).float()
    spread = [one.repeat_interleave(group, 1)[:, :columns] for one in (scales, zeros)]
    words = w4.pack(codes, W4Format("integer", group))
    return words, w4.join_scales(scales, zeros), (codes.float() - spread[1]) * spread[0]


@pytest.mark.parametrize(("rows", "columns", "group"), SHAPES)
def test_nothing_is_lost(rows: int, columns: int, group: int) -> None:
    words, scales, values = make(rows, columns, group)
    assert torch.equal(w4.dequantise(words, scales, columns, W4Format("integer", group)), values)
    found = kernels.dequantise(words.to(DEVICE), scales.to(DEVICE), columns, W4Format("integer", group), torch.float32)
    assert torch.equal(found.cpu(), values)


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


def test_parts_give_each_multiprocessor_eight_warps() -> None:
    launch = ProductLaunch(16, 128, 128, 4, 4)
    assert kernels.choose_parts(1, 4096, 4096, launch, 132) == 8
    assert kernels.choose_parts(1, 4096, 4096, launch._replace(num_warps=8), 132) == 4
    assert kernels.choose_parts(1, 4096, 512, launch, 132) == 2, "two tiles of input features for each"
    assert kernels.choose_parts(1000, 65536, 4096, launch, 132) == 1
