"""The steps with which drafts of a head begin: their graphs are captured at the start, so that trying them costs
nothing else. The engine tries them first."""

from __future__ import annotations

from collections.abc import Sequence

_WIDTHS = ((8, (4, 6)), (64, (4,)), (1 << 30, (2,)))
"""Rows, and the tokens of each in steps of at most so many. The tokens of many rows take longer than reading the
weights; those of few rows do too where each reads other experts."""
_MOST_ROWS = 256


def first_draft_widths(widths: Sequence[int], num_rows: int) -> set[int]:
    """Return the tokens of each row of such steps, some of `widths`."""
    wanted = next(wanted for rows, wanted in _WIDTHS if num_rows <= rows)
    return {max(width for width in widths if width <= most) for most in wanted}


def is_captured_first(num_rows: int) -> bool:
    """Whether the graph for this many rows is captured at the start; others are captured on first use."""
    return num_rows <= _MOST_ROWS and num_rows & (num_rows - 1) == 0
