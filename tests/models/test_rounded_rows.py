"""The note on what was rounded of FP4 weights."""

from __future__ import annotations

import torch

from nvcli.models.rounded_rows import RoundedRows, RowTally

CPU = torch.device("cpu")


def test_rows_and_blocks_are_added_up() -> None:
    assert RowTally(CPU).counts().describe() is None
    tally = RowTally(CPU)
    tally.add(torch.tensor([8, 0, 3], dtype=torch.int32), 8)
    tally.add(torch.tensor([5], dtype=torch.int32), 8)
    assert tally.counts() == RoundedRows(rows=4, blocks=32, exact_rows=1, exact_blocks=16)
    counts = tally.counts() + RoundedRows(rows=4, blocks=32, exact_rows=1, exact_blocks=0)
    assert "25.0% of rows and 25.0% of blocks lose nothing" in str(counts.describe())
