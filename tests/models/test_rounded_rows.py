"""What FP8 rounds of FP4 weights, by the scales of blocks: a row or block that is said to lose nothing does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nvcli.kernels.fp8_types import FP8
from nvcli.kernels.mxfp4 import numbers_of_codes, powers_of_scales
from nvcli.models.kept_values import _move_to_fp8
from nvcli.models.rounded_rows import EVERY, RoundedRows, RowTally

CPU = torch.device("cpu")


def exact_blocks(scales: torch.Tensor) -> torch.Tensor:
    """Whether a block with all codes loses nothing, [rows, blocks]; each row has the code 6 in its largest block."""
    decoded = powers_of_scales(scales).float() if scales.dtype == torch.uint8 else scales
    values = (numbers_of_codes(torch.arange(16, dtype=torch.uint8)).float() * decoded.unsqueeze(-1)).flatten(1)
    codes, found = _move_to_fp8(values, None)
    return (codes.float() * found.unsqueeze(1) == values).view(*scales.shape, 16).all(-1)


@pytest.mark.parametrize("kind", ["e4m3", "exponents"])
def test_counts_are_those_of_the_numbers(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    if kind == "exponents":
        near = torch.randint(118, 124, (40, 24), generator=generator)
        scales: Any = torch.cat((near, torch.randint(90, 124, (40, 24), generator=generator))).to(torch.uint8)
    else:
        plain = torch.randint(1, 127, (40, 24), generator=generator).to(torch.uint8)
        powers = torch.randint(1, 8, (40, 24), generator=generator).to(torch.uint8) * 8
        scales = torch.cat((plain, powers, powers[:, :1].expand(-1, 24) + 4)).view(FP8).float()
    expected = exact_blocks(scales)
    tally = RowTally(CPU)
    for call in range(EVERY + 1):
        tally.add(scales[50:] if call == EVERY else scales[:50])
    blocks, rows = int(expected.sum()), int(expected.all(1).sum())
    assert tally.counts() == RoundedRows(len(scales), scales.numel(), rows, blocks)
    assert 0 < rows < len(scales)


def test_nothing_is_said_of_nothing() -> None:
    assert RowTally(CPU).counts().describe() is None
    counts = RoundedRows(4, 32, 1, 16) + RoundedRows(4, 32, 1, 0)
    assert "25.0% of rows and 25.0% of blocks lose nothing" in str(counts.describe())
