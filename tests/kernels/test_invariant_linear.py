"""Products whose rows have the same bits in every batch: interpreted in float32, and on a GPU at real sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernel_device import DEVICE, DTYPES, HAS_GPU, MARKS
from nvcli.kernels.invariant_linear import invariant_linear
from nvcli.kernels.triton.products import linear
from nvcli.kernels.triton.products.product_launch import ProductLaunch
from nvcli.kernels.triton.products.products import multiply
from ordered_products import products_in_one_order

# [out, in]; some are no multiples of the tiles.
SHAPES = [(6144, 1024), (4096, 12288), (1000, 200), (96, 16)] if HAS_GPU else [(96, 64), (70, 40)]
ROWS = [1, 2, 17, 64, 65, 128, 300, 512, 1000, 5000] if HAS_GPU else [1, 2, 31, 70]

IS_HOPPER = HAS_GPU and torch.cuda.get_device_capability() == (9, 0)

pytestmark = MARKS

__all__ = ["products_in_one_order"]


def inputs(shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(max(ROWS) + 9, shape[1], generator=generator, device=DEVICE).to(dtype)
    weight = (torch.randn(shape, generator=generator, device=DEVICE) * shape[1] ** -0.5).to(dtype)
    return x, weight, torch.randn(shape[0], generator=generator, device=DEVICE).to(dtype)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The result is in float32, in which no bit is rounded away."""
    out = torch.full((len(x), len(weight)), torch.nan, dtype=torch.float32, device=x.device)
    linear.invariant_linear(x, weight, bias, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_among_any_number_of_rows(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight, bias = inputs(shape, dtype)
    whole = product(x, weight, bias)
    expected = F.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(whole.double(), expected, atol=1e-3, rtol=1e-3)
    for num_rows in ROWS:
        for first in (0, 9):
            rows = slice(first, first + num_rows)
            assert torch.equal(product(x[rows], weight, bias), whole[rows]), f"{num_rows} rows from {first} on"


@pytest.mark.skipif(not IS_HOPPER, reason="only there the launch follows the number of rows")
def test_no_launch_shows_in_the_bits() -> None:
    x, weight, _ = inputs(SHAPES[0], torch.bfloat16)
    whole = product(x, weight)
    for launch in (
        ProductLaunch(16, 32, 256, 4, 4, x_by_tma=False),
        ProductLaunch(64, 32, 128, 4, 4, rows_together=4, num_programs=2),
        ProductLaunch(128, 64, 64, 4, 4, rows_together=4, num_programs=2),
        ProductLaunch(128, 256, 64, 3, 8, rows_together=4, num_programs=1),
    ):
        assert torch.equal(multiply(x, weight, launch, torch.empty_like(whole)), whole), str(launch)


def test_the_result_may_have_another_type_and_a_place_of_its_own() -> None:
    x, weight, bias = inputs(SHAPES[1], DTYPES[-1])
    whole = invariant_linear(x, weight, dtype=torch.float32)
    assert whole.dtype == torch.float32
    torch.testing.assert_close(whole.double(), F.linear(x.double(), weight.double()), atol=1e-3, rtol=1e-3)
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    assert invariant_linear(x, weight, bias, out) is out
    assert torch.equal(out, invariant_linear(x, weight, bias))
    assert invariant_linear(x[:0], weight).shape == (0, len(weight))


def test_on_a_cpu_every_row_is_a_product_of_its_own() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = (
            torch.randn(70, 200, generator=generator).to(dtype),
            torch.randn(300, 200, generator=generator).to(dtype),
        )
        whole = invariant_linear(x, weight)
        for rows in (slice(0, 1), slice(3, 5), slice(9, 70)):
            assert torch.equal(invariant_linear(x[rows], weight), whole[rows])
