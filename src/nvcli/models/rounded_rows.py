"""How much of FP4 weights is rounded where they become FP8 (`kernels/fp4_rows.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class RoundedRows:
    """Counts of rows and blocks of weights, and of those in which nothing is rounded."""

    rows: int = 0
    blocks: int = 0
    exact_rows: int = 0
    exact_blocks: int = 0

    def __add__(self, other: RoundedRows) -> RoundedRows:
        return RoundedRows(
            self.rows + other.rows,
            self.blocks + other.blocks,
            self.exact_rows + other.exact_rows,
            self.exact_blocks + other.exact_blocks,
        )

    def describe(self) -> str | None:
        """Return a note for the user; None if nothing was counted."""
        if not self.rows:
            return None
        of_rows, of_blocks = self.exact_rows / self.rows, self.exact_blocks / self.blocks
        return (
            f"FP4 weights became FP8: by a sample {of_rows:.1%} of rows and {of_blocks:.1%} of blocks lose nothing; in "
            "the others numbers of more than 4 bits are rounded to 4"
        )


class RowTally:
    """Adds up counts on a device, which is waited for at the end alone. For use by one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._found = RoundedRows()
        self._exact: Tensor | None = None
        """[2] int64: exact rows and blocks."""

    def add(self, exact: Tensor, num_blocks: int) -> None:
        """Count rows by the number of exact ones among their `num_blocks` blocks, [rows]."""
        if self._exact is None:
            self._exact = torch.zeros(2, dtype=torch.int64, device=self._device)
        self._exact += torch.stack(((exact == num_blocks).sum(), exact.sum()))
        self._found += RoundedRows(len(exact), len(exact) * num_blocks)

    def counts(self) -> RoundedRows:
        """Wait for the device, and return what was counted."""
        if self._exact is None:
            return self._found
        rows, blocks = self._exact.tolist()
        return self._found + RoundedRows(exact_rows=rows, exact_blocks=blocks)
