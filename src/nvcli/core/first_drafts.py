"""The steps with which drafts of a head begin: their graphs are captured at the start, so that trying them costs
nothing else. The engine tries them first, and they serve steps with fewer rows too."""

from __future__ import annotations

from collections.abc import Sequence

_WIDTHS = ((16, (4, 6)), (64, (4,)), (1 << 30, (2,)))
"""Number of rows, and the tokens of each row in steps of up to that number. The tokens of many rows take longer than
reading the weights; those of few rows do too where each reads other experts."""
_MOST_ROWS = 256


def first_draft_widths(widths: Sequence[int], num_rows: int | None) -> set[int]:
    """Return the tokens of each row of such steps, some of `widths`. `num_rows` None: there are no such steps."""
    if num_rows is None:
        return set()
    wanted = next(wanted for rows, wanted in _WIDTHS if num_rows <= rows)
    return {max(width for width in widths if width <= most) for most in wanted}


def captured_first_from(num_rows: int) -> int | None:
    """Return the fewest rows, at least this many, for which graphs are captured at the start; None: there are none.
    Graphs for other numbers of rows are captured when they have been used for some time."""
    rows = 1 << (num_rows - 1).bit_length()
    return rows if rows <= _MOST_ROWS else None
