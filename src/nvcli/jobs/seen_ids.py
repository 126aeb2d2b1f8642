"""Which row ids were taken, in little memory."""

from __future__ import annotations

from array import array
from bisect import bisect_right

from nvcli.jobs.job import JobId


class SeenIds:
    """A set of ids that costs nothing for rows without ids of their own.

    Texts are kept as Python's 64-bit hashes, with a random key in each process: ten million different ids have a
    chance of three in a million that two are taken for one. Line numbers that stand in for ids are kept as ranges.
    """

    def __init__(self) -> None:
        self._text_hashes: set[int] = set()
        self._integers: set[int] = set()
        self._range_starts = array("q")
        self._range_ends = array("q")

    def add(self, row_id: JobId, *, given: bool) -> bool:
        """False if it was taken already. `given`: the row brought it; else a line number, in ascending order."""
        if isinstance(row_id, str):
            return _add(self._text_hashes, hash(row_id))
        if self._is_line(row_id) or row_id in self._integers:
            return False
        if given:
            return _add(self._integers, row_id)
        if self._range_ends and self._range_ends[-1] == row_id:
            self._range_ends[-1] = row_id + 1
        else:
            self._range_starts.append(row_id)
            self._range_ends.append(row_id + 1)
        return True

    def _is_line(self, number: int) -> bool:
        at = bisect_right(self._range_starts, number) - 1
        return at >= 0 and number < self._range_ends[at]


def _add(values: set[int], value: int) -> bool:
    size = len(values)
    values.add(value)
    return len(values) > size
