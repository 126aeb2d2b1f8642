"""Merging a low-rank product into a weight, against its definition in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernel_device import DEVICE, DTYPES, MARKS
from nvcli.kernels import low_rank_merge
from nvcli.kernels.triton.products.low_rank_merge import merge_low_rank as merge_by_kernel

pytestmark = MARKS


@pytest.mark.parametrize("merge_low_rank", [low_rank_merge.merge_low_rank, merge_by_kernel])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "rank"), [(70, 200, 16), (64, 128, 1), (5, 300, 40)])
def test_against_float64(
    merge_low_rank: Callable[[Tensor, Tensor, Tensor, Tensor, float], None],
    dtype: torch.dtype,
    rows: int,
    columns: int,
    rank: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rounded once, into a part of a larger weight, in blocks of a few rows; in place too."""
    monkeypatch.setattr(low_rank_merge, "_NUMBERS_AT_ONCE", 3000)
    generator = torch.Generator(DEVICE).manual_seed(rank)
    whole = torch.randn(rows + 3, columns + 8, generator=generator, device=DEVICE).to(dtype)
    base, before = whole[3:, :columns], whole.clone()
    up = torch.randn(rows, rank, generator=generator, device=DEVICE).to(dtype).t()
    down = torch.randn(rank, columns, generator=generator, device=DEVICE).to(dtype)
    expected = base.double() + 0.75 * up.t().double() @ down.double()
    out = torch.empty(rows, columns, dtype=dtype, device=DEVICE)
    merge_low_rank(out, base, up, down, 0.75)
    assert torch.equal(whole, before)
    bits = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=bits, atol=1e-5 + bits)
    exact = torch.empty(rows, columns, dtype=torch.float32, device=DEVICE)
    merge_low_rank(exact, base, up, down, 0.75)
    # Products of 16 bits are summed otherwise than those in float32: a sum may be rounded otherwise.
    torch.testing.assert_close(exact.double(), expected, rtol=1e-6, atol=1e-5)
    assert (exact.to(dtype) != out).float().mean() < 0.01
    merge_low_rank(base, base, up, down, 0.75)
    assert torch.equal(base, out)
    before[3:, :columns] = out
    assert torch.equal(whole, before)
