"""Which row ids were taken, in little memory."""

from __future__ import annotations

from array import array
from bisect import bisect_right

from nvcli.jobs.job import JobId

_NUM_TABLES = 1024
_FIRST_SLOTS = 4
_MASK = (1 << 64) - 1


class SeenIds:
    """A set of ids that costs nothing for rows without ids of their own, and 11 to 22 bytes for others.

    Ids are kept as 64-bit hashes, with a random key in each process: ten million different ids have a chance of three
    in a million that two are taken for one. Line numbers that stand in for ids are kept as ranges.
    """

    def __init__(self) -> None:
        self._hashes = _HashSet()
        self._has_integers = False
        self._range_starts = array("q")
        self._range_ends = array("q")

    def add(self, row_id: JobId, *, given: bool) -> bool:
        """False if it was taken already. `given`: the row brought it; else a line number, in ascending order."""
        if isinstance(row_id, str):
            return self._hashes.add(hash(row_id) & _MASK)
        if self._is_line(row_id):
            return False
        # Not of the number: that is alike for -1 and -2, and for numbers 2⁶¹ - 1 apart. In a tuple, as strings are ids.
        hashed = hash((str(row_id), "id")) & _MASK
        if given:
            self._has_integers = True
            return self._hashes.add(hashed)
        if self._has_integers and hashed in self._hashes:
            return False
        if self._range_ends and self._range_ends[-1] == row_id:
            self._range_ends[-1] = row_id + 1
        else:
            self._range_starts.append(row_id)
            self._range_ends.append(row_id + 1)
        return True

    def _is_line(self, number: int) -> bool:
        at = bisect_right(self._range_starts, number) - 1
        return at >= 0 and number < self._range_ends[at]


class _HashSet:
    """64-bit hashes in open addressing: many small tables, so that growing one takes no time worth noticing."""

    def __init__(self) -> None:
        self._tables = [array("Q", bytes(8 * _FIRST_SLOTS)) for _ in range(_NUM_TABLES)]
        self._sizes = array("Q", bytes(8 * _NUM_TABLES))

    def add(self, hashed: int) -> bool:
        """False if it was there."""
        hashed = hashed or 1  # 0 marks a free slot
        number = hashed % _NUM_TABLES
        table = self._tables[number]
        slot = _free_slot(table, hashed)
        if slot is None:
            return False
        table[slot] = hashed
        self._sizes[number] += 1
        if 4 * self._sizes[number] > 3 * len(table):
            larger = array("Q", bytes(16 * len(table)))
            for old in table:
                if old:
                    slot = _free_slot(larger, old)
                    assert slot is not None
                    larger[slot] = old
            self._tables[number] = larger
        return True

    def __contains__(self, hashed: int) -> bool:
        hashed = hashed or 1
        return _free_slot(self._tables[hashed % _NUM_TABLES], hashed) is None


def _free_slot(table: array[int], hashed: int) -> int | None:
    """Where `hashed` goes; None if it is there."""
    last = len(table) - 1
    slot = (hashed // _NUM_TABLES) & last
    while (held := table[slot]) != 0:
        if held == hashed:
            return None
        slot = (slot + 1) & last
    return slot
