"""A compact set of 64-bit hashes: 11 to 22 bytes for each."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

_NUM_TABLES = 1024
_NO_CELLS = array("Q", bytes(8 * 4))
"""A table that holds nothing; sets share it, so that those with few hashes take little memory."""


class HashSet:
    """A set of 64-bit hashes with open addressing, in many small tables, so that growing one takes negligible time."""

    def __init__(self) -> None:
        self._tables = [_NO_CELLS] * _NUM_TABLES
        self._sizes = array("Q", bytes(8 * _NUM_TABLES))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return (held for table in self._tables for held in table if held)

    def add(self, hashed: int) -> bool:
        """Add a hash. Returns False if it was already in the set."""
        hashed = hashed or 1  # 0 marks a free cell
        number = hashed % _NUM_TABLES
        table = self._tables[number]
        cell = _free_cell(table, hashed)
        if cell is None:
            return False
        if table is _NO_CELLS:
            table = self._tables[number] = table[:]
        table[cell] = hashed
        self._sizes[number] += 1
        self._count += 1
        if 4 * self._sizes[number] > 3 * len(table):
            larger = array("Q", bytes(16 * len(table)))
            for old in table:
                if old:
                    cell = _free_cell(larger, old)
                    assert cell is not None
                    larger[cell] = old
            self._tables[number] = larger
        return True

    def __contains__(self, hashed: int) -> bool:
        hashed = hashed or 1
        return _free_cell(self._tables[hashed % _NUM_TABLES], hashed) is None


def _free_cell(table: array[int], hashed: int) -> int | None:
    """Return the cell where `hashed` goes; None if it is in the table."""
    last = len(table) - 1
    cell = (hashed // _NUM_TABLES) & last
    while (held := table[cell]) != 0:
        if held == hashed:
            return None
        cell = (cell + 1) & last
    return cell
