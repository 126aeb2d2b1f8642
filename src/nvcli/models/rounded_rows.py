"""How much of FP4 weights is rounded where they become FP8, by the scales of their blocks alone.

A number of FP4 has two bits of precision, and times its block's scale up to six, of which e4m3 holds four. A block
therefore loses nothing if three times its scale has at most four bits, and if half of it is not below the least step of
e4m3 by the row's own scale. That is so for all codes; a block with few of them may lose nothing where this says it
might.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nvcli.kernels.fp8_types import FP8, FP8_MAX

_LARGEST_CODE = 6.0
_LEAST_STEP = 2.0**-9
"""The distance of the smallest numbers of e4m3."""
EVERY = 8
_MOST_BITS = 16
"""Odd numbers below it have at most four bits."""


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
    """Adds up counts of some of the weights on a device, which is waited for at the end alone. For use by one
    thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._found = RoundedRows()
        self._calls = 0
        self._exact: Tensor | None = None
        """[2] int64: exact rows and blocks."""
        self._steps: Tensor | None = None

    def add(self, scales: Tensor) -> None:
        """Count rows by the scales of their blocks, [rows, blocks]: numbers of e4m3 in float32, or exponents in uint8.
        Of all calls the first and every further `EVERY`th counts, which costs next to nothing."""
        self._calls += 1
        if (self._calls - 1) % EVERY:
            return
        if self._exact is None or self._steps is None:
            self._exact = torch.zeros(2, dtype=torch.int64, device=self._device)
            self._steps = torch.tensor(_steps_of_codes(), device=self._device)
        if scales.dtype == torch.uint8:
            scales = (scales.int() << 23).view(torch.float32)
            steps = scales / 2
        else:
            steps = self._steps.index_select(0, scales.to(FP8).view(torch.uint8).flatten().int()).view(scales.shape)
        mantissas, exponents = torch.frexp(scales.amax(1) * (_LARGEST_CODE / FP8_MAX))
        exponents -= (mantissas == 0.5).int()
        least = ((exponents + 127) << 23).view(torch.float32) * _LEAST_STEP
        is_exact = steps >= least.unsqueeze(1)
        self._exact += torch.stack((is_exact.all(1).sum(), is_exact.sum()))
        self._found += RoundedRows(len(scales), scales.numel())

    def counts(self) -> RoundedRows:
        """Wait for the device, and return what was counted."""
        if self._exact is None:
            return self._found
        rows, blocks = self._exact.tolist()
        return self._found + RoundedRows(exact_rows=rows, exact_blocks=blocks)


def _steps_of_codes() -> list[float]:
    """Return for each scale in e4m3 the step of which its block's numbers are multiples, or 0 if they have too many
    bits."""
    scales = torch.arange(256, dtype=torch.uint8).view(FP8).float().abs().tolist()
    return [math.inf if scale == 0 else 0.0 if math.isnan(scale) else _step(scale) for scale in scales]


def _step(scale: float) -> float:
    numerator, denominator = scale.as_integer_ratio()
    lowest = numerator & -numerator
    return 0.0 if 3 * (numerator // lowest) >= _MOST_BITS else lowest / denominator / 2
